"""The number of steps, a list of coefficients, the scaling of rows before the first step, and the newer presets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_muon import orthogonalize
from hf_muon.math import cost
from hf_muon.math.coefficients import AUTO, PRESETS, resolve
from hf_muon.math.newton_schulz import newton_schulz
from hf_muon.math.products import Workspace
from tests.math.matrices import spectrum, with_spectrum
from tests.reference import almost_orthogonal, newton_schulz_on_singular_values, normalized

SLACK_OF_BF16 = 6e-2


def test_the_docs_have_every_preset_with_its_range():
    page = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
    for name, preset in PRESETS.items():
        low, high = preset.singular_range
        numbers = f"{preset.default_steps} | {low:.3f} to {high:.3f} |"
        assert f"| `{name}` | {numbers}" in page, f"docs/how-it-works.md lacks {name!r} with {numbers!r}"


def test_each_step_of_a_list_has_its_own_coefficients():
    matrix = torch.randn(24, 40)
    for name, preset in PRESETS.items():
        if len(preset.steps) > 1 and not preset.almost_orthogonal:
            steps = len(preset.steps)
            expected = orthogonalize(matrix, ns_coefficients=name, ns_steps=steps, ns_dtype="fp32")
            for options in ({}, {"ns_steps": steps}):
                result = orthogonalize(matrix, ns_coefficients=preset.steps, ns_dtype="fp32", **options)
                assert torch.equal(result, expected)
    one = orthogonalize(matrix, ns_coefficients=[(3.4445, -4.775, 2.0315)], ns_dtype="fp32")
    assert torch.equal(one, orthogonalize(matrix, ns_coefficients="original", ns_steps=1, ns_dtype="fp32"))


def test_the_number_of_steps_follows_from_the_coefficients():
    numbers = {"deepseek_v4": 10, "aol": 4, (1.5, -0.5, 0.0): 5, ((1.5, -0.5, 0.0),) * 7: 7}
    for coefficients in (*PRESETS, *numbers):
        assert len(resolve(coefficients)) == len(resolve(coefficients, AUTO)) == numbers.get(coefficients, 5)
    assert len(resolve("pion", 7)) == len(resolve("original", 7)) == 7


def test_rows_are_scaled_with_what_the_first_step_computes_anyway():
    for shape in ((2, 12, 31), (2, 31, 12), (2, 20, 20)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(shape), resolve("aol"), torch.float32, lengths=(1,) * 4)
        assert counter.get_total_flops() == 2 * cost.flops(shape, (1,) * 4)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (30, 30)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scaled_rows_have_no_singular_value_above_one(shape, dtype):
    matrix = torch.randn(3, *shape, dtype=torch.float64)
    x = matrix.to(dtype, copy=True)
    work = Workspace(x, (1,), cost.BlockRows(5, 4), low_precision=False)
    r = work.gram_of(x)
    work.make_almost_orthogonal_(x, r)
    slack = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(x.double(), almost_orthogonal(matrix), rtol=slack, atol=slack)
    wide = x.double() if shape[0] <= shape[1] else x.double().mT
    torch.testing.assert_close(r.double(), wide @ wide.mT, rtol=slack, atol=slack)
    assert spectrum(x).max() <= 1 + slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tall", [False, True])
def test_rows_of_all_sizes_are_scaled(dtype, tall):
    sizes = torch.tensor([1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-9, 1e-30, 0.0], dtype=torch.float64)
    matrix = torch.linalg.qr(torch.randn(60, 8, dtype=torch.float64)).Q.T * sizes.view(-1, 1)
    stored = (matrix.T if tall else matrix).unsqueeze(0)
    result = newton_schulz(stored, resolve("aol"), dtype)[0].double()
    rows = (result.T if tall else result).norm(dim=1)
    assert rows.isfinite().all()
    assert rows[-1] == 0
    # fp16 holds the squares of rows down to 6e-5 of the norm. Those of orthogonal rows become one.
    (one,) = newton_schulz_on_singular_values(torch.eye(1), resolve("aol")).view(-1).abs()
    assert (rows[:5] - one).abs().max() < 4 * SLACK_OF_BF16


@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
def test_scaling_does_not_depend_on_the_batch(ns_dtype):
    batch = torch.randn(5, 33, 70) * torch.logspace(-3, 0, 33).view(-1, 1)
    together = orthogonalize(batch, ns_coefficients="aol", ns_dtype=ns_dtype)
    for matrix, direction in zip(batch, together, strict=True):
        alone = orthogonalize(matrix, ns_coefficients="aol", ns_dtype=ns_dtype)
        assert (alone - direction).abs().max() <= (1e-5 if ns_dtype == "fp32" else 0.1)


@pytest.mark.parametrize("preset", ["deepseek_v4", "pion", "aol"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n"), [(64, 128), (256, 512), (512, 256)])
def test_the_form_that_is_chosen_stays_in_the_range(preset, dtype, m, n):
    steps = resolve(preset)
    low, high = PRESETS[preset].singular_range
    slack = SLACK_OF_BF16 if dtype == torch.bfloat16 else 5e-3
    steep = with_spectrum(m, n, torch.logspace(-3, 0, min(m, n), dtype=torch.float64))
    spiked = with_spectrum(m, n, torch.tensor([1.0] * 3 + [1e-2] * (min(m, n) - 3), dtype=torch.float64))
    rows = torch.randn(m, n, dtype=torch.float64) * torch.logspace(-3, 0, m, dtype=torch.float64).view(-1, 1)
    for matrix in (torch.randn(m, n).double(), steep, spiked, rows, torch.ones(m, n) + 0.01 * torch.randn(m, n)):
        u, values, vh = torch.linalg.svd(normalized(matrix, steps), full_matrices=False)
        direction = newton_schulz(matrix.float().unsqueeze(0), steps, dtype)[0].double()
        assert spectrum(direction).max() <= high + slack
        stretches = (u.mT @ direction @ vh.mT).diagonal()[values >= 1e-3]
        assert stretches.min() >= low - slack
