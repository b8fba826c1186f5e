"""The bounds of `tests/support/bounds.py` accept rounding and reject small errors."""

from __future__ import annotations

import pytest
import torch

from hf_muon import build_optimizer
from tests.integrations.plain_script import BATCH, model, sentences
from tests.support.bounds import beyond_rounding, move


def trained(seed=None, parts=1, fault=None):
    """Return the weights after four steps, with each batch cut into `parts` whose gradients are summed."""
    network = model()
    move(network, seed)
    optimizer = build_optimizer(network, lr=0.01, weight_decay=0.1, ns_dtype="fp32")
    victim = dict(network.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    for step, batch in enumerate(sentences().split(BATCH)[:4]):
        optimizer.zero_grad()
        for share in batch.chunk(parts):
            (network(input_ids=share, labels=share).loss / parts).backward()
        if fault == "gradient" and step == 2:
            victim.grad[0] *= 1.001  # one row, in one step
        before = victim.detach().clone()
        optimizer.step()
        if fault == "update":
            victim.data.add_(victim.data - before, alpha=1e-3)
        if fault == "decay":
            victim.data.mul_(1 - 1e-5)
    return {name: param.detach() for name, param in network.named_parameters()}


@pytest.fixture(scope="module")
def results():
    return [trained(seed) for seed in (None, 0, 1)]


def test_another_order_of_sums_is_rounding(results):
    expected, *controls = results
    weights = trained(parts=4)
    assert not all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert not beyond_rounding(weights, expected, controls)


@pytest.mark.parametrize(("fault", "parts"), [("update", 1), ("gradient", 1), ("decay", 1), ("gradient", 2)])
def test_a_thousandth_of_one_matrix_is_not(results, fault, parts):
    """Scale an update or a row of one gradient by 1.001, or decay a weight by 1e-5 more."""
    expected, *controls = results
    beyond = beyond_rounding(trained(parts=parts, fault=fault), expected, controls)
    assert beyond["model.layers.1.mlp.up_proj.weight"] > 2


def test_what_is_no_number_is_beyond():
    one = {"a": torch.ones(20), "b": torch.zeros(3)}
    assert not beyond_rounding(one, one, [one])
    assert set(beyond_rounding({"a": one["a"] * torch.nan, "b": one["b"] + 1e-30}, one, [one])) == {"a", "b"}
