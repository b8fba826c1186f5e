"""Whole steps run on CUDA tensors that do not exist, with the operators and dtypes that CUDA is known to have.

And how often a process compiles their functions: for sizes, and for several cards.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_muon.math import compiler
from tests.cuda import compilation, fake_gpu
from tests.cuda.fake_step import CUDA, FIRST, STEPS, asked_of, calls, functions

pytestmark = pytest.mark.extended

# Fake tensors do not know the dtypes of CUDA's kernels. These were read in torch's dispatch, with their dtypes; what is
# new here needs reading.
OPERATORS = {
    "_foreach_add": {"fp32"},
    "_foreach_copy": {"bf16", "fp16", "fp32", "fp32 bf16", "fp32 fp16", "int8"},
    "_foreach_div": {"fp32"},
    "_foreach_norm": {"bf16", "fp16", "fp32"},
    "_fused_adamw": {"fp32"},
    "_local_scalar_dense": {"bool"},
    "_to_copy": {"bf16", "bool", "int64", "int8"},
    "abs": {"fp32"},
    "add": {"fp16", "fp32"},
    "all": {"bool"},
    "amax": {"fp32"},
    "baddbmm": {"bf16", "fp16", "fp32"},
    "bmm": {"bf16", "fp16", "fp32"},
    "cat": {"fp32", "int64"},
    "clone": {"fp32"},
    "copy": {"fp16", "fp32", "int8", "int8 fp32", "uint8"},
    "copysign": {"fp32"},
    "div": {"fp32"},
    "gt": {"fp32"},
    "le": {"fp32"},
    "lerp": {"fp32"},
    "linalg_vector_norm": {"fp32"},
    "mul": {"fp32", "fp32 fp64", "fp32 fp64 bf16", "fp32 fp64 fp16"},
    "new_empty": {"bf16", "fp16", "fp32"},
    "round": {"fp32"},
    "sqrt": {"fp32"},
    "stack": {"fp32"},
    "sub": {"fp32"},
    "where": {"bool fp32"},
}


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(name, marks=pytest.mark.nightly) for name in STEPS if name not in FIRST)]
)
def test_a_step(name):
    asked = asked_of(name)
    unread = {
        operator: sorted(dtypes - OPERATORS.get(operator, set()))
        for operator, dtypes in asked.operators.items()
        if dtypes - OPERATORS.get(operator, set())
    }
    assert unread == {}
    assert asked.reads == 1  # whether all gradients are finite


def test_the_first_steps_call_every_function():
    assert [name for name, own in calls(FIRST).items() if not own] == []


# --- compilations


MOST = 4
"""Compilations of a call on a card: sizes that 16 divides, others, one element, and more than 2**31 elements."""
SIZES = [1000, 64, 4096, 1, 2, 15, 16, 17, 1023, 2**20 + 1, 155582464, 2**31 - 64, 2**31 + 64, 2**32]


def compilations(call, sizes, devices):
    """Return for which sizes and devices something was compiled, of which each is called in turn."""
    function, options = functions()[call.function], dict(call.options)
    at = []
    with compilation.nothing_compiled(), compilation.writing() as written, FakeTensorMode(allow_non_fake_inputs=True):
        for device in devices:
            for size in sizes:
                before = len(written.modules)
                tensors = call.tensors(size, device)
                compiler.call(function.plain, tensors, options, function.row)
                at += [(str(device), size)] * (len(written.modules) - before)
    return at


@pytest.mark.second_tier("^invert$")
@pytest.mark.parametrize("name", functions())
def test_sizes_share_few_compilations(name):
    with fake_gpu.card(90):
        at = compilations(calls(FIRST)[name][0], SIZES, [CUDA])
    assert len(at) <= MOST, f"compiled anew at {at}"


@pytest.mark.nightly
def test_each_card_of_a_process_has_its_own():
    """Torch gives up on a function that it compiles too often: nothing may be shared by more cards than it allows."""
    cards = [torch.device("cuda", index) for index in range(8)]
    with fake_gpu.card(90, count=len(cards)):
        at = compilations(calls(FIRST)["apply"][0], [1024, 1023, 1], cards)
    counts = {str(card): [device for device, _ in at].count(str(card)) for card in cards}
    assert max(counts.values()) <= MOST, f"compiled anew at {at}"
    assert min(counts.values()) >= 1
