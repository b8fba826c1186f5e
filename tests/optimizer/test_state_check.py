"""Thousands of mutated states: each is refused in a sentence with nothing changed, or loaded right."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from hf_muon.math.momentum import is_quantized
from hf_muon.optimizer.state import ALL_STATE_KEYS
from tests.optimizer.test_loading import equal, made, step, stepped

VALUES = [
    None, True, False, 0, 1, -1, 2, 2.5, -0.0, 1e-300, 1e30, float("nan"), float("inf"), 10**400, "", "2", "auto",
    "int8", b"x", [], [1], (), (0.9, 0.95), [0.9, 0.95], {}, {"a": 1}, {1, 2}, object, 3 + 4j,
    torch.tensor(1.0), torch.tensor(3), torch.tensor(float("nan")), torch.tensor(-2.0), torch.tensor(True),
    torch.ones(2), torch.ones(0), torch.ones(8, 18), torch.ones(3, 8), torch.ones(8), -torch.ones(8),
    torch.ones(8) * 3e38, torch.ones(8, 18, dtype=torch.int8), torch.ones(8, 18).double() * 1e200,
    torch.ones(8, 18, device="meta"), torch.ones(8, 18).to_sparse(), torch.ones(8, 1), nn.Parameter(torch.ones(8)),
    torch.ones(8, 18, dtype=torch.complex64),
]  # fmt: skip


def paths(tree, prefix=()):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*prefix, key)
        yield from paths(value, (*prefix, key))


def mutate(saved, rng):
    """Change one to three places; say which."""
    said = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(paths(saved))
        if not places:
            break
        path = rng.choice(places)
        kind = rng.choice(("put", "put", "put", "delete", "add", "swap", "entry"))
        holder = saved
        for key in path[:-1]:
            holder = holder[key]
        value = holder[path[-1]]
        if kind == "put":
            holder[path[-1]] = copy.deepcopy(rng.choice(VALUES))
        elif kind == "delete":
            del holder[path[-1]]
        elif kind == "add" and isinstance(holder, dict):
            key = rng.choice(
                ("momentum_buffer", "momentum_scale", "exp_avg", "step", "foreach", "views", 77, "initial_lr")
            )
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == "swap":
            other = rng.choice(places)
            there = saved
            for key in other[:-1]:
                there = there[key]
            if path[: len(other)] != other and other[: len(path)] != path:
                holder[path[-1]], there[other[-1]] = there[other[-1]], value
        elif isinstance(value, torch.Tensor) and value.numel():
            entry = rng.choice((0.0, -1.0, 100.0, float("nan"), float("inf"), 1e38, -1e38))
            if value.dtype != torch.int8 or abs(entry) < 128:
                value.detach().view(-1)[rng.randrange(value.numel())] = entry
        said.append((kind, path))
    return said


CHAOS = [(dtype, choice) for dtype in (torch.float32, torch.bfloat16) for choice in ("fp32", "bf16", "int8")]


@pytest.mark.extended(but="True-torch.float32")
@pytest.mark.parametrize(("dtype", "momentum_dtype"), CHAOS, ids=lambda value: str(value))
@pytest.mark.parametrize("accept_rerouted", [False, True])
def test_mutated_states(dtype, momentum_dtype, accept_rerouted, record_property):
    """A step follows each load: what is loaded must be whole, finite, and give finite weights."""
    seed = CHAOS.index((dtype, momentum_dtype)) * 2 + accept_rerouted
    rng = random.Random(seed)
    record_property("seed", seed)
    _, source = stepped(dtype, momentum_dtype=momentum_dtype)
    saved = copy.deepcopy(source.state_dict())
    other, optimizer = made(dtype, momentum_dtype=momentum_dtype, accept_rerouted=accept_rerouted)
    weights = copy.deepcopy(other.state_dict())
    step(other, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    outcomes = {"refused": 0, "loaded": 0}
    for k in range(450):
        state_dict = copy.deepcopy(saved)
        said = f"seed {seed}, state {k}: {mutate(state_dict, rng)}"
        snapshot = copy.deepcopy(state_dict)
        try:
            optimizer.load_state_dict(state_dict)
        except ValueError as error:
            assert str(error).startswith("This optimizer state cannot be loaded, and nothing was changed:\n  - "), said  # noqa: PT017
            assert "cannot be read" not in str(error), f"{said}: {error}"  # noqa: PT017
            assert equal(optimizer.state_dict(), before), said
            outcomes["refused"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"{said}: {type(error).__name__}: {error}") from error
        outcomes["loaded"] += 1
        assert_loaded(optimizer, snapshot, said, accept_rerouted=accept_rerouted)
        other.load_state_dict(weights)
        try:
            step(other, optimizer, seed=3)
        except Exception as error:
            raise AssertionError(f"{said}: the step after it: {type(error).__name__}: {error}") from error
        assert all(param.isfinite().all() for param in other.parameters()), said
        assert all(v.float().isfinite().all() for s in optimizer.state.values() for v in s.values()), said
        assert all(equal(*(known(each["state"].get(key)) for each in (state_dict, snapshot))) for key in range(6)), said
        optimizer.load_state_dict(before)
        assert equal(optimizer.state_dict(), before), said
    assert min(outcomes.values()) > 30


def known(moments):
    """Without what somebody else has put there: equality of NaN, and of what has no data, is not asked for."""
    return {k: v for k, v in moments.items() if k in ALL_STATE_KEYS} if isinstance(moments, dict) else moments


def assert_loaded(optimizer, saved, said, *, accept_rerouted):
    """Every number of the optimizer is the one of the state, where nothing moved from half to half."""
    for group, there in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        assert isinstance(group["step"], int), said
        names = [g.get("param_names") for g in saved["param_groups"]]
        rerouted = accept_rerouted and names != [g["param_names"] for g in optimizer.param_groups]
        for param, key in zip(group["params"], there["params"], strict=True):
            moments = saved["state"].get(key)
            if not moments or rerouted:
                continue
            for name, value in moments.items():
                if name not in ALL_STATE_KEYS:
                    continue  # of somebody else, and left out
                if name == "momentum_scale" and not is_quantized(there.get("momentum_dtype", "auto"), param.shape):
                    continue  # left there by a template, and of no use
                loaded = optimizer.state[param].get(name)
                assert loaded is not None, said
                expected = torch.as_tensor(value).detach().float().reshape(loaded.shape)
                assert torch.equal(loaded.float(), expected.to(loaded.dtype).float()), (said, name)
