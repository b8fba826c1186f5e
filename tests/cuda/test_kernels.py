"""What every compiled function becomes on a card, in each dtype that a step uses, within budgets.

A function is one kernel that allocates nothing, in one config, so that no stopwatch chooses between two. It rounds each
operation once, as the plain function does, and where sizes can be divided by 16 it loads and stores 16 bytes at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
import torch

from tests.cuda import compilation, fake_gpu
from tests.cuda.compilation import Built, Wrapper, built, wrapper_of, write
from tests.cuda.fake_step import CUDA, OFTEN, Call, calls, few, functions

pytestmark = pytest.mark.extended


@dataclasses.dataclass(frozen=True)
class Budget:
    """The largest numbers that are allowed; of `wide accesses` the smallest."""

    kernels: int = 1
    allocations: int = 0
    library_calls: int = 0
    configs: int = 1
    registers: int = 64
    spills: int = 0
    fma: int = 0
    inexact_divisions: int = 0
    inexact_roots: int = 0
    flushed_results: int = 0
    narrow_accesses: int | None = None
    wide_accesses: int = 0


ANY_SIZE = Budget()
# Addresses of rows take registers, and on sm_80 one of them is spilled.
WITH_GAPS = Budget(registers=80, spills=16)
ROWS = Budget(registers=96)
# 16 divides the sizes of "elements" and "blocks". In blocks, codes have 8 bits, and 64 elements share a scale.
BUDGETS = {
    "elements": dataclasses.replace(ANY_SIZE, narrow_accesses=0),
    "elements, any size": ANY_SIZE,
    "elements with gaps": WITH_GAPS,
    "blocks": dataclasses.replace(ROWS, wide_accesses=3),
    "blocks, any size": ROWS,
    "rows": ROWS,
}


def budgets_of(call: Call) -> Iterator[tuple[int, Budget]]:
    """Yield sizes, see `Call.tensors`, each with its budget."""
    if call.has_gaps or (call.in_rows and not call.in_blocks):
        yield 2**20, BUDGETS["elements with gaps" if call.has_gaps else "rows"]
        return
    kind = "blocks" if call.in_blocks else "elements"
    yield 2**20, BUDGETS[kind]
    yield 2**20 + 1, BUDGETS[f"{kind}, any size"]


def over(budget: Budget, wrapper: Wrapper, kernels: list[Built]) -> Iterator[str]:
    """Yield what exceeds a budget."""
    numbers = dataclasses.asdict(wrapper) | {"configs": len(kernels)}
    for name, found in numbers.items():
        if found > getattr(budget, name):
            yield f"{name.replace('_', ' ')} {found}, budget {getattr(budget, name)}"
    formulas = {kernel.formula for kernel in kernels}
    if len(formulas) > 1 and any(kernel.instructions["fma"] for kernel in kernels):
        yield f"configs round differently, and a process chooses one: {' | '.join(map(str, sorted(formulas)))[:400]}"
    for kernel in kernels:
        counted = {kind.replace(" ", "_"): count for kind, count in kernel.instructions.items()}
        for name, found in {"registers": kernel.registers, "spills": kernel.spills, **counted}.items():
            limit = getattr(budget, name)
            if limit is not None and (found < limit if name == "wide_accesses" else found > limit):
                yield f"{name.replace('_', ' ')} {found}, budget {limit} ({kernel.config})"


def over_budget(call: Call, size: int, budget: Budget, capability: int) -> Iterator[str]:
    """Yield what exceeds the budget of a call on a card."""
    written, _ = write(call, size, CUDA)
    module = written.modules[-1]
    kernels = [kernel for found in compilation.KERNEL.findall(module) for kernel in built(*found, capability)]
    again = [f"compiled {len(written.modules)} times for one size"] if len(written.modules) > 1 else []
    for line in [*again, *over(budget, wrapper_of(module), kernels)]:
        yield f"{call}, size {size}, sm_{capability}: {line}"


@pytest.mark.second_tier(f"^({'|'.join(OFTEN)})-few")
@pytest.mark.parametrize(
    ("capability", "all_of_it"),
    [(90, False), (90, True), (80, True), (100, True)],
    ids=["few", "sm_90", "sm_80", "sm_100"],
)
@pytest.mark.parametrize("name", functions())
def test_every_call_of_a_step_is_within_its_budget(name, capability, all_of_it):
    """Take few calls on an H100, at sizes that 16 divides; or all, at all sizes."""
    with fake_gpu.card(capability):
        lines = [
            line
            for call in (calls()[name] if all_of_it else few(name))
            for size, budget in list(budgets_of(call))[: None if all_of_it else 1]
            for line in over_budget(call, size, budget, capability)
        ]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


class TestBudgets:
    """Each budget is broken once, on purpose, and caught."""

    def test_of_a_kernel(self):
        good = Built("one config", 64, 0, dict.fromkeys(compilation.INSTRUCTIONS, 0), ("mul(x,x)",))
        assert list(over(BUDGETS["elements"], Wrapper(1, 0, 0), [good])) == []
        assert list(over(BUDGETS["blocks"], Wrapper(1, 0, 0), [good])) == ["wide accesses 0, budget 3 (one config)"]
        one_of_each = {kind: int(kind != "wide accesses") for kind in compilation.INSTRUCTIONS}
        worse = Built("one config", 65, 8, one_of_each, ("fma(x,x,x)",))
        found = list(over(BUDGETS["elements"], Wrapper(2, 1, 1), [good, worse]))
        assert {re.sub(r" \d.*|, and.*", "", line) for line in found} == {
            *("kernels", "allocations", "library calls", "configs", "configs round differently", "registers", "spills"),
            *(kind for kind in compilation.INSTRUCTIONS if kind != "wide accesses"),
        }

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("wrong", "lines"),
        [
            (lambda a, b, c: a.copy_(a * b + c / a), {"configs", "fma", "inexact divisions", "narrow accesses"}),
            (lambda a, b, c: a.copy_(a / a.sum()), {"kernels", "allocations"}),
            (lambda a, b, c: a.copy_(a.cumsum(0).sort().values), {"library calls"}),
        ],
        ids=["contracts and divides inexactly", "several kernels", "not compiled"],
    )
    def test_what_torch_compiles_by_itself(self, wrong, lines):
        """Compile what is wrong in each way, with torch's own options, and find it in what Inductor has written."""
        torch._dynamo.reset()
        with fake_gpu.card(90), compilation.writing() as written, torch._subclasses.FakeTensorMode():
            tensors = [torch.empty(2**20, device=CUDA) for _ in range(3)]

            def returns_nothing(a, b, c):
                wrong(a, b, c)

            torch.compile(returns_nothing, dynamic=True, fullgraph=True)(*tensors)
            (module,) = written.modules
        with fake_gpu.card(90):
            kernels = [kernel for found in compilation.KERNEL.findall(module) for kernel in built(*found, 90)]
        found = list(over(BUDGETS["elements"], wrapper_of(module), kernels))
        assert {re.sub(r" \d.*", "", line) for line in found} >= lines
