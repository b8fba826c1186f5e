"""The number of steps, a list of coefficients, and the newest preset."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_muon import orthogonalize
from hf_muon.math.coefficients import AUTO, PRESETS, resolve
from hf_muon.math.newton_schulz import newton_schulz
from tests.math.matrices import spectrum, with_spectrum
from tests.reference import normalized

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
        if len(preset.steps) > 1:
            steps = len(preset.steps)
            expected = orthogonalize(matrix, ns_coefficients=name, ns_steps=steps, ns_dtype="fp32")
            for options in ({}, {"ns_steps": steps}):
                result = orthogonalize(matrix, ns_coefficients=preset.steps, ns_dtype="fp32", **options)
                assert torch.equal(result, expected)
    one = orthogonalize(matrix, ns_coefficients=[(3.4445, -4.775, 2.0315)], ns_dtype="fp32")
    assert torch.equal(one, orthogonalize(matrix, ns_coefficients="original", ns_steps=1, ns_dtype="fp32"))


def test_the_number_of_steps_follows_from_the_coefficients():
    numbers = {"deepseek_v4": 10, (1.5, -0.5, 0.0): 5, ((1.5, -0.5, 0.0),) * 7: 7}
    for coefficients in (*PRESETS, *numbers):
        assert len(resolve(coefficients)) == len(resolve(coefficients, AUTO)) == numbers.get(coefficients, 5)
    assert len(resolve("original", 7)) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n"), [(64, 128), (256, 512), (512, 256)])
def test_the_form_that_is_chosen_stays_in_the_range(dtype, m, n):
    steps = resolve("deepseek_v4")
    low, high = PRESETS["deepseek_v4"].singular_range
    slack = SLACK_OF_BF16 if dtype == torch.bfloat16 else 5e-3
    steep = with_spectrum(m, n, torch.logspace(-3, 0, min(m, n), dtype=torch.float64))
    spiked = with_spectrum(m, n, torch.tensor([1.0] * 3 + [1e-2] * (min(m, n) - 3), dtype=torch.float64))
    rows = torch.randn(m, n, dtype=torch.float64) * torch.logspace(-3, 0, m, dtype=torch.float64).view(-1, 1)
    for matrix in (torch.randn(m, n).double(), steep, spiked, rows, torch.ones(m, n) + 0.01 * torch.randn(m, n)):
        u, values, vh = torch.linalg.svd(normalized(matrix), full_matrices=False)
        direction = newton_schulz(matrix.float().unsqueeze(0), steps, dtype)[0].double()
        assert spectrum(direction).max() <= high + slack
        stretches = (u.mT @ direction @ vh.mT).diagonal()[values >= 1e-3]
        assert stretches.min() >= low - slack
