from __future__ import annotations

import contextlib

import pytest
import torch

from hf_muon.math import cost
from hf_muon.math.coefficients import resolve
from hf_muon.math.newton_schulz import newton_schulz, newton_schulz_step
from hf_muon.math.products import Workspace, symmetric_
from tests.accelerated import accelerated
from tests.math.matrices import STANDARD, WAYS, frobenius_normalized


@pytest.mark.parametrize("rows", [1, 4, 7, 12, 100])
def test_symmetric_products(rows):
    x, addend = torch.randn(2, 12, 20, dtype=torch.float64), torch.randn(2, 12, 12, dtype=torch.float64)
    addend = addend + addend.mT
    out = torch.full((2, 12, 12), torch.nan, dtype=torch.float64)
    torch.testing.assert_close(symmetric_(out, x, x.mT, rows=rows), x @ x.mT)
    expected = 0.3 * addend - 2 * x @ x.mT
    torch.testing.assert_close(symmetric_(out, x, x.mT, add=addend, beta=0.3, alpha=-2, rows=rows), expected)
    torch.testing.assert_close(
        symmetric_(addend, x, x.mT, add=addend, beta=0.3, alpha=-2, rows=rows), expected
    )  # in place


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("rows", [4, 7])
def test_symmetric_products_of_parts_in_bf16(rows, tall):
    x = torch.randn(2, 12, 20).bfloat16()
    x = x.mT.contiguous().mT if tall else x
    addend = (torch.randn(2, 12, 12) / 8).bfloat16()
    addend = addend + addend.mT
    memory = torch.full((2, 12, 28), torch.nan, dtype=torch.bfloat16)
    out = memory[..., :12]
    for beta, alpha, add in ((1.0, 1.0, None), (0.5, -2.0, addend)):
        result = symmetric_(out, x, x.mT, add=add, beta=beta, alpha=alpha, rows=rows)
        expected = alpha * (x.double() @ x.double().mT) + (0 if add is None else beta * add.double())
        torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=1e-2)
        assert torch.equal(result, result.mT)
        assert memory[..., 12:].isnan().all()


@pytest.mark.parametrize("way", ["apart", "explicit", "accelerated"])
@pytest.mark.parametrize("shape", [(2, 17, 17), (3, 9, 40), (3, 40, 9)], ids=str)
def test_a_step_is_the_formula(shape, way):
    x = frobenius_normalized(shape)
    wide = x if shape[1] <= shape[2] else x.mT
    r = wide @ wide.mT
    expected = 2.0 * wide - 1.5 * r @ wide + 0.5 * r @ r @ wide
    work = Workspace(x, (1,), cost.BlockRows(5, 4))
    with accelerated() if way == "accelerated" else contextlib.nullcontext():
        result = newton_schulz_step(x, (2.0, -1.5, 0.5), work, apart=way == "apart")
    torch.testing.assert_close(result, expected if wide is x else expected.mT)


@pytest.mark.parametrize(("lengths", "rows"), WAYS, ids=str)
@pytest.mark.parametrize("shape", [(2, 17, 17), (3, 9, 40), (3, 40, 9)], ids=str)
def test_every_form_takes_the_same_steps(shape, lengths, rows):
    x = frobenius_normalized(shape)
    result = newton_schulz(x, resolve("polar_express", 5), torch.float64, lengths=lengths, rows=rows)
    work = Workspace(x, STANDARD, cost.BlockRows(*shape[1:]))
    for coefficients in resolve("polar_express", 5):
        x = newton_schulz_step(x, coefficients, work)
    torch.testing.assert_close(result, x, rtol=0, atol=1e-10)
