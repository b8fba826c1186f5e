"""Files of older versions, in `old_states`, load exactly, and the run continues as if it had never stopped."""

from __future__ import annotations

import gzip
import io
import pickle
from pathlib import Path

import pytest
import torch

from hf_muon.config import GROUP_OPTIONS, OPTIONS
from hf_muon.optimizer import Muon
from hf_muon.storage.factors import KEY
from tests.optimizer.old_states.write import KINDS, STEPS, build, params_of, step, trained, trained_of_groups
from tests.optimizer.small_run import equal

FOLDER = Path(__file__).parent / "old_states"


def content(name):
    return gzip.decompress((FOLDER / name).read_bytes())


def state_of(kind):
    """Return the weights and the state dict that the older version wrote, as plain tensors."""
    return torch.load(io.BytesIO(content("state_dicts.pt.gz")), weights_only=True)[kind]


def loaded(kind):
    """Return a new optimizer with the weights and the state dict of the file."""
    optimizer = build(kind)
    set_weights(optimizer, state_of(kind)["weights"])
    optimizer.load_state_dict(state_of(kind)["state_dict"])
    return optimizer


def with_todays_options(state_dict):
    """Return a state dict whose groups have the defaults of options that are newer than its file."""
    defaults = {KEY: None, **{name: OPTIONS[name].default for name in GROUP_OPTIONS}}
    return {**state_dict, "param_groups": [defaults | group for group in state_dict["param_groups"]]}


def in_fp32(state_dict):
    """Return a state dict whose AdamW moments, which older versions stored in the weights' dtype, are in fp32."""
    state = {
        i: {key: value.float() if key.startswith("exp_avg") else value for key, value in moments.items()}
        for i, moments in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def from_torch_save(kind):
    return torch.load(io.BytesIO(content("optimizers.pt.gz")), weights_only=False)[kind]


def from_pickle(kind):
    return pickle.loads(content("optimizers.pickle.gz"))[kind]


def set_weights(optimizer, weights):
    for param, weight in zip(params_of(optimizer), weights, strict=True):
        param.data.copy_(weight)


def assembled(kind):
    """Return an optimizer with the file's weights and moments, set by hand, without any loading code."""
    optimizer, saved = build(kind), state_of(kind)
    set_weights(optimizer, saved["weights"])
    for i, param in enumerate(params_of(optimizer)):
        optimizer.state[param].update(saved["state_dict"]["state"][i])
    for group in optimizer.param_groups:
        group["step"] = STEPS
    return optimizer


WAYS = [loaded, from_torch_save, from_pickle]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_loads_exactly_and_continues(kind, way):
    optimizer, saved = way(kind), state_of(kind)
    assert type(optimizer) is Muon
    assert equal(in_fp32(optimizer.state_dict()), in_fp32(with_todays_options(saved["state_dict"])))
    assert all(map(torch.equal, params_of(optimizer), saved["weights"]))
    expected = assembled(kind)
    for seed in range(STEPS, STEPS + 3):
        step(optimizer, seed)
        step(expected, seed)
    assert all(map(torch.equal, params_of(optimizer), params_of(expected)))
    assert equal(optimizer.state_dict(), expected.state_dict())


@pytest.mark.parametrize("way", WAYS)
def test_continues_the_run_that_never_stopped(way):
    """Compare within rounding: the CPU that wrote the file may have rounded differently."""
    optimizer, straight = way("fp32 weights, fp32 momentum"), trained("fp32 weights, fp32 momentum")
    for seed in range(STEPS, STEPS + 3):
        step(optimizer, seed)
        step(straight, seed)
    for one, other in zip(params_of(optimizer), params_of(straight), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_momentum_of_zero_would_show():
    optimizer, straight = build("fp32 weights, fp32 momentum"), trained("fp32 weights, fp32 momentum")
    set_weights(optimizer, params_of(straight))
    step(optimizer, STEPS)
    step(straight, STEPS)
    differences = [(one - other).abs().max() for one, other in zip(*map(params_of, (optimizer, straight)), strict=True)]
    assert min(differences) > 1e-3


def test_optimizers_over_ready_made_groups():
    """Load the optimizer that LLaMA-Factory's PPO and LoRA+ build over their own param groups."""
    optimizer, expected = pickle.loads(content("of_groups.pickle.gz")), trained_of_groups()[0]
    assert type(optimizer) is type(expected)
    assert optimizer.param_groups[0]["param_names"] == expected.param_groups[0]["param_names"]
    for seed in range(STEPS, STEPS + 3):
        step(optimizer, seed)
        step(expected, seed)
    for param, reference in zip(params_of(optimizer), params_of(expected), strict=True):
        torch.testing.assert_close(param, reference, rtol=1e-5, atol=1e-6)
