"""What every compiled function becomes on a card, in each dtype that a step uses, within budgets.

A function is one kernel that allocates nothing, in one config, so that no stopwatch chooses between two. It rounds each
operation once, as the plain function does, and where sizes can be divided by 16 it loads and stores 16 bytes at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tests.cuda import compilation, fake_gpu
from tests.cuda.compilation import Built, Wrapper, built, wrapper_of, write
from tests.cuda.fake_step import CUDA, Call, calls, functions


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


def over_budget(call: Call, capability: int) -> Iterator[str]:
    """Yield what exceeds the budgets of a call on a card."""
    for size, budget in budgets_of(call):
        written, _ = write(call, size, CUDA)
        module = written.modules[-1]
        kernels = [kernel for found in compilation.KERNEL.findall(module) for kernel in built(*found, capability)]
        again = [f"compiled {len(written.modules)} times for one size"] if len(written.modules) > 1 else []
        for line in [*again, *over(budget, wrapper_of(module), kernels)]:
            yield f"{call}, size {size}, sm_{capability}: {line}"


@pytest.mark.parametrize("capability", fake_gpu.CARDS)
@pytest.mark.parametrize("name", functions())
def test_every_call_of_a_step_is_within_its_budget(name, capability):
    with fake_gpu.card(capability):
        lines = [line for call in calls()[name] for line in over_budget(call, capability)]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_steps_call_every_function():
    assert [name for name, own in calls().items() if not own] == []


class TestBudgets:
    """Each budget is broken once, on purpose, and caught."""

    GOOD = Built("one config", 64, 0, dict.fromkeys(compilation.INSTRUCTIONS, 0), ("mul(x,x)",))

    @pytest.mark.parametrize(
        ("kernel", "line"),
        [
            ({"registers": 65}, "registers 65, budget 64 (one config)"),
            ({"spills": 8}, "spills 8, budget 0 (one config)"),
            ({"fma": 2}, "fma 2, budget 0 (one config)"),
            ({"inexact divisions": 1}, "inexact divisions 1, budget 0 (one config)"),
            ({"inexact roots": 1}, "inexact roots 1, budget 0 (one config)"),
            ({"flushed results": 1}, "flushed results 1, budget 0 (one config)"),
            ({"narrow accesses": 1}, "narrow accesses 1, budget 0 (one config)"),
        ],
        ids=str,
    )
    def test_of_a_kernel(self, kernel, line):
        own = {key: value for key, value in kernel.items() if key in ("registers", "spills")}
        instructions = self.GOOD.instructions | {key: value for key, value in kernel.items() if key not in own}
        worse = dataclasses.replace(self.GOOD, instructions=instructions, **own)
        assert list(over(BUDGETS["elements"], Wrapper(1, 0, 0), [self.GOOD])) == []
        assert list(over(BUDGETS["elements"], Wrapper(1, 0, 0), [worse])) == [line]

    def test_of_wide_accesses_in_blocks(self):
        assert list(over(BUDGETS["blocks"], Wrapper(1, 0, 0), [self.GOOD])) == [
            "wide accesses 0, budget 3 (one config)"
        ]

    def test_of_configs(self):
        fused = dataclasses.replace(
            self.GOOD, formula=("fma(x,x,x)",), instructions=self.GOOD.instructions | {"fma": 1}
        )
        assert list(over(ANY_SIZE, Wrapper(1, 0, 0), [self.GOOD, fused])) == [
            "configs 2, budget 1",
            "configs round differently, and a process chooses one: ('fma(x,x,x)',) | ('mul(x,x)',)",
            "fma 1, budget 0 (one config)",
        ]

    def test_what_torch_compiles_by_itself_contracts_and_divides_inexactly(self):
        """Compile what is wrong in each way, with torch's own options, and find it in what Inductor has written."""

        def wrong(a, b, c):
            a.copy_(a * b + c / a)

        assert {line.split(",")[0].rstrip(" 0123456789") for line in self.of(wrong, 3)} == {
            "configs",
            "fma",
            "inexact divisions",
            "narrow accesses",
        }

    def test_sums_over_everything_are_several_kernels(self):
        def wrong(a):
            a.copy_(a / a.sum())

        assert {"kernels 3, budget 1", "allocations 2, budget 0"} <= {*self.of(wrong, 1)}

    def test_sorting_is_not_compiled(self):
        def wrong(a):
            a.copy_(a.cumsum(0).sort().values)

        assert "library calls" in " ".join(self.of(wrong, 1))

    @staticmethod
    def of(plain, count):
        torch._dynamo.reset()
        with fake_gpu.card(90), compilation.writing() as written, torch._subclasses.FakeTensorMode():
            tensors = [torch.empty(2**20, device=CUDA) for _ in range(count)]
            torch.compile(plain, dynamic=True, fullgraph=True)(*tensors)
            (module,) = written.modules
        with fake_gpu.card(90):
            kernels = [kernel for found in compilation.KERNEL.findall(module) for kernel in built(*found, 90)]
        return list(over(BUDGETS["elements"], wrapper_of(module), kernels))
