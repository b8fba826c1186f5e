"""bf16 and fp16 weights and AdamW moments in bf16: the same bits in every layout and after a resume."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.cases import WIDE, given_gradients
from tests.distributed.test_layouts import assert_equal
from tests.distributed.test_momentum import assert_converted
from tests.distributed.test_training import assert_same


@pytest.mark.extended(but="fsdp-2-bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("adamw_state_dtype", ["bf16", "int8"])
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("fsdp-tp-row", 4)])
def test_rounded_alike_in_every_layout(pools, layout, ranks, adamw_state_dtype, dtype):
    tables = [(9, 128), (5, 256)] if layout == "fsdp-tp-row" else [(9, 150), (3, 64), (40, 8)]
    options = {"adamw_state_dtype": adamw_state_dtype, "dtype": dtype, "viewed": WIDE, "tables": tables}
    expected = given_gradients(0, "single", **options)
    dtypes = {value.dtype for state in expected[len(WIDE) :] for value in state}
    assert {"bf16": torch.bfloat16, "int8": torch.uint8}[adamw_state_dtype] in dtypes
    assert_equal(pools[ranks].run(given_gradients, layout=layout, **options), expected)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has one dtype for both")
@pytest.mark.extended(but="bfloat16-float32-fsdp-2")
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("fsdp", 2), ("fsdp-tp-row", 4)])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [("bfloat16", "float32"), ("bfloat16", "float16"), ("float32", "bfloat16")]
)
def test_gradients_of_another_dtype_in_every_layout(pools, layout, ranks, dtype, grad_dtype):
    options = {"dtype": dtype, "grad_dtype": grad_dtype, "tables": [(9, 128), (5, 256)]}
    expected = given_gradients(0, "single", **options)
    assert_equal(pools[ranks].run(given_gradients, layout=layout, **options), expected)


def test_nearest_is_another_result():
    """Show that the comparison above sees how weights are rounded."""
    results = [given_gradients(0, "single", dtype="bfloat16", weight_rounding=r) for r in ("stochastic", "nearest")]
    weights = [[state[0] for state in result] for result in results]
    assert not all(map(torch.equal, *weights))


@pytest.mark.parametrize(("adamw_state_dtype", "stored"), [("bf16", torch.bfloat16), ("int8", torch.uint8)])
def test_resume_is_exact_and_state_moves_between_layouts(run, adamw_state_dtype, stored, tmp_path):
    path = str(tmp_path / "checkpoint")
    options = {"adamw_state_dtype": adamw_state_dtype, "dtype": "bfloat16", "full": False}
    saved = run("fsdp", 2, last=4, save=path, **options)
    straight = run("fsdp", 2, last=6, **options)
    resumed = run("fsdp", 2, first=4, last=6, load=path, **options)
    assert_same(resumed, {**straight, "losses": straight["losses"][4:]})
    assert stored in {value.dtype for state in saved["states"].values() for value in state.values()}
    for layout, ranks in (("fsdp", 4), ("single", 1)):
        loaded = run(layout, ranks, first=4, last=4, load=path, **options)
        assert_same({**loaded, "losses": []}, {**saved, "losses": []})


@pytest.mark.extended
@pytest.mark.parametrize(
    ("there", "here", "full"),
    [("fp32", "bf16", False), ("bf16", "fp32", True), ("int8", "fp32", True), ("fp32", "int8", True)],
)
def test_another_dtype_is_converted(run, there, here, full, tmp_path):
    path = str(tmp_path / "checkpoint")
    saved = run("fsdp", 2, last=3, save=path, full=full, adamw_state_dtype=there)
    loaded = run("fsdp", 2, first=3, last=3, load=path, full=full, adamw_state_dtype=here)
    assert_converted(saved["states"], loaded["states"], ["exp_avg", "exp_avg_sq"], here)
