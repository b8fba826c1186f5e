"""Momentum in bf16 and int8: bit-identical in every layout, and state that moves between layouts."""

from __future__ import annotations

import re

import pytest
import torch

from hf_muon.math.moments import decoded
from tests.distributed.cases import WIDE, given_gradients, refusal
from tests.distributed.test_layouts import assert_equal
from tests.distributed.test_training import assert_same

# Columns that two ranks cut at a block boundary.
ALIGNED = [((6, 128), ""), ((3, 5, 256), "")]
CUT = [((6, 250), "")]
STACKS = [WIDE[1], WIDE[8]]


@pytest.mark.parametrize(
    ("layout", "ranks", "dtype"), [("ddp", 2, "float32"), ("fsdp", 2, "bfloat16"), ("fsdp-tp-row", 4, "float32")]
)
def test_bf16_rounds_alike_in_every_layout(pools, layout, ranks, dtype):
    options = {"momentum_dtype": "bf16", "dtype": dtype, "viewed": WIDE}
    expected = given_gradients(0, "single", **options)
    assert all(state[1].dtype is torch.bfloat16 for state in expected[: len(WIDE)])
    assert_equal(pools[ranks].run(given_gradients, layout=layout, **options), expected)


@pytest.mark.parametrize(
    ("layout", "ranks", "viewed"),
    [("ddp", 2, WIDE), ("fsdp", 2, WIDE), ("hsdp", 4, WIDE), ("middle", 2, STACKS), ("last", 2, ALIGNED)],
)
def test_int8_rounds_alike_in_every_layout(pools, layout, ranks, viewed):
    options = {"momentum_dtype": "int8", "viewed": viewed, "max_batch_bytes": 1125}
    expected = given_gradients(0, "single", **options)
    assert any(state[1].dtype is torch.int8 for state in expected[: len(viewed)])
    plain = (len(viewed), len(viewed) + 1)  # vectors have no second dim
    assert_equal(pools[ranks].run(given_gradients, layout=layout, plain=plain, **options), expected)


def test_blocks_that_a_layout_cuts_are_refused(pools):
    options = {"case": "given_gradients", "layout": "last", "momentum_dtype": "int8", "viewed": CUT}
    message = (
        r"\(6, 250\) is stored as .*Shard\(dim=1\).*, which cuts its rows of 250 between multiples of 64, .* Use bf16"
    )
    for error in pools[2].run(refusal, **options):
        assert re.search(message, error)


@pytest.mark.extended(but="int8-False")
@pytest.mark.parametrize(("choice", "full"), [("bf16", False), ("int8", False), ("int8", True)])
def test_resume_is_exact_and_state_moves_between_layouts(run, choice, full, tmp_path):
    path = str(tmp_path / "checkpoint")
    options = {"momentum_dtype": choice, "full": full}
    saved = run("fsdp", 2, last=4, save=path, **options)
    straight = run("fsdp", 2, last=6, **options)
    resumed = run("fsdp", 2, first=4, last=6, load=path, **options)
    assert_same(resumed, {**straight, "losses": straight["losses"][4:]})
    dtypes = {value.dtype for state in saved["states"].values() for value in state.values()}
    assert {"bf16": torch.bfloat16, "int8": torch.int8}[choice] in dtypes
    for layout, ranks in (("fsdp", 4), ("single", 1)):
        loaded = run(layout, ranks, first=4, last=4, load=path, **options)
        assert_same({**loaded, "losses": []}, {**saved, "losses": []})


@pytest.mark.parametrize(
    ("there", "here", "full"),
    [("fp32", "bf16", False), ("bf16", "fp32", True), ("int8", "fp32", True), ("fp32", "int8", True)],
)
def test_another_dtype_is_converted(run, there, here, full, tmp_path):
    path = str(tmp_path / "checkpoint")
    saved = run("fsdp", 2, last=3, save=path, full=full, momentum_dtype=there)
    loaded = run("fsdp", 2, first=3, last=3, load=path, full=full, momentum_dtype=here)
    assert_converted(saved["states"], loaded["states"], ["momentum_buffer"], here)


def assert_converted(saved, loaded, keys, dtype):
    """Check that moments under these keys are those of a checkpoint, within the rounding of the dtype they now have."""
    present = [(name, key) for name, state in saved.items() for key in keys if key in state]
    assert present
    for name, key in present:
        exact, results = (decoded(states[name], key).float() for states in (saved, loaded))
        assert (results - exact).norm() <= (0.02 if dtype == "int8" else 0.004) * exact.norm()
        assert dtype != "fp32" or torch.equal(results, exact)
