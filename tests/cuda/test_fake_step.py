"""Whole steps run on CUDA tensors that do not exist, with the operators and dtypes that CUDA is known to have."""

from __future__ import annotations

import pytest

from tests.cuda.fake_step import STEPS, asked_of, calls

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


@pytest.mark.parametrize("name", STEPS)
def test_a_step(name):
    asked = asked_of(name)
    unread = {
        operator: sorted(dtypes - OPERATORS.get(operator, set()))
        for operator, dtypes in asked.operators.items()
        if dtypes - OPERATORS.get(operator, set())
    }
    assert unread == {}
    assert asked.reads == 1  # whether all gradients are finite


def test_steps_call_every_function():
    assert [name for name, own in calls().items() if not own] == []
