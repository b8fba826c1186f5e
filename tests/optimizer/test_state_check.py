"""An invalid state raises an error of one sentence and changes nothing; so do thousands of mutated states."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from hf_muon.math.moments import is_quantized
from hf_muon.optimizer.state import ALL_STATE_KEYS
from tests.optimizer.small_run import build, equal, step, stepped


def refused(state_dict, message, optimizer=None):
    optimizer = optimizer or stepped()[1]
    before, (state, groups) = copy.deepcopy(optimizer.state_dict()), (optimizer.state, optimizer.param_groups)
    with pytest.raises(ValueError, match=message) as error:
        optimizer.load_state_dict(state_dict)
    assert str(error.value).startswith("This optimizer state cannot be loaded, and nothing was changed:\n  - ")
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert equal(optimizer.state_dict(), before)


REFUSED = {
    "step of a shape": (("state", 2, "step"), torch.tensor([1.0, 2.0]), r"its step is a tensor of shape \(2,\)"),
    "negative step": (
        ("state", 2, "step"),
        torch.tensor(-1.0),
        r"its step is tensor\(-1.\), and not a number of steps",
    ),
    "fractional step": (("state", 2, "step"), torch.tensor(0.5), r"its step is tensor\(0.5"),
    "endless step": (("state", 2, "step"), torch.tensor(float("inf")), r"its step is tensor\(inf\)"),
    "step as text": (("state", 2, "step"), "2", "its step is '2', and not a number of steps"),
    "group step none": (("param_groups", 0, "step"), None, "its param group 0 has step=None, and not a number"),
    "group step fraction": (("param_groups", 1, "step"), 0.5, "its param group 1 has step=0.5"),
    "group step text": (("param_groups", 0, "step"), "2", "its param group 0 has step='2'"),
    "group step below zero": (("param_groups", 0, "step"), -1, "its param group 0 has step=-1"),
    "lr": (("param_groups", 0, "lr"), float("nan"), "one of its param groups has lr=nan is not valid"),
    "tensor lr": (("param_groups", 0, "lr"), torch.tensor(float("nan")), r"has lr=tensor\(nan\) is not valid"),
    "huge lr": (("param_groups", 0, "lr"), 10**400, r"has lr=10+\.\.\. is not valid"),
    "initial_lr": (("param_groups", 0, "initial_lr"), None, "param group 0 has initial_lr=None, and not a number"),
    "use_muon": (("param_groups", 0, "use_muon"), "yes", "param group 0 has use_muon='yes'. Valid: true or false"),
    "a group": (("param_groups", 1), [1], r"its param group 1 is \[1\], and not a mapping"),
    "params": (("param_groups", 0, "params"), None, "param group 0 has params=None, and not a list"),
    "params of lists": (("param_groups", 0, "params"), [[0], [1]], r"param group 0 has params=\[\[0\], \[1\]\]"),
    "params twice": (("param_groups", 0, "params"), [0, 0], "its param groups name a parameter twice"),
    "names": (("param_groups", 0, "param_names"), 3, "has param_names=3, and not a text for each parameter"),
    "a name too many": (("param_groups", 0, "views"), ["", "", ""], "it has 3 views for 2 parameters"),
    "groups": (("param_groups",), None, "not an optimizer's state_dict: its keys are"),
    "state": (("state",), None, "not an optimizer's state_dict: its keys are"),
    "a parameter's state": (("state", 0), torch.ones(2), r"0.weight \(8, 18\): its state is a tensor of shape \(2,\)"),
    "text for a moment": (("state", 2, "exp_avg"), "zeros", "its exp_avg is 'zeros', and not a tensor"),
    "numbers for a moment": (("state", 2, "exp_avg"), [0.0] * 8, "its exp_avg is .*, and not a tensor"),
    "sparse": (("state", 0, "momentum_buffer"), torch.zeros(8, 18).to_sparse(), "layout torch.sparse_coo"),
    "float8": (
        ("state", 0, "momentum_buffer"),
        torch.zeros(8, 18).to(torch.float8_e5m2),
        "has dtype torch.float8_e5m2",
    ),
    "meta": (("state", 0, "momentum_buffer"), torch.zeros(8, 18, device="meta"), "is on the meta device"),
    "negative squares": (("state", 2, "exp_avg_sq"), torch.full((8,), -1.0), "its exp_avg_sq has negative entries, -1"),
    "too large": (("state", 0, "momentum_buffer"), torch.full((8, 18), 3e38), r"has entries as large as 3e\+38"),
    "too large in fp64": (
        ("state", 2, "exp_avg"),
        torch.full((8,), 1e300, dtype=torch.float64),
        r"has entries as large as 1e\+300",
    ),
    "momentum of AdamW": (("state", 2, "momentum_buffer"), torch.ones(8), "holds momentum_buffer, which AdamW .* not"),
    "moments of Muon": (("state", 0, "exp_avg"), torch.ones(8, 18), "holds exp_avg, which Muon .* not keep"),
    "differentiable": (("param_groups", 0, "differentiable"), True, "has differentiable=True"),
}


def put(state_dict, path, value):
    *most, last = path
    for key in most:
        state_dict = state_dict[key]
    state_dict[last] = value


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_a_sentence(what):
    path, value, message = REFUSED[what]
    _, optimizer = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    put(saved, path, value)
    refused(saved, message)
    refused(saved, message, build()[1])


@pytest.mark.parametrize("state_dict", [None, 3, [], "state", torch.ones(2)])
def test_something_other_than_a_mapping(state_dict):
    refused(state_dict, "and not an optimizer's state_dict")


def test_a_missing_step():
    saved = stepped()[1].state_dict()
    del saved["param_groups"][1]["step"]
    refused(saved, "its param group 1 lacks `step`")


def test_codes_and_scales():
    _, optimizer = stepped(momentum_dtype="int8")
    saved = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(saved)
    wrong["state"][0]["momentum_buffer"][0, 0] = -128
    refused(wrong, "its momentum_buffer has entries as large as 128")
    saved["state"][0]["momentum_scale"][0, 0] = -1.0
    refused(saved, "its momentum_scale has negative entries")


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
    """Change one to three places of a state; return which."""
    changes = []
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
        changes.append((kind, path))
    return changes


CHAOS = [(dtype, choice) for dtype in (torch.float32, torch.bfloat16) for choice in ("fp32", "bf16", "int8")]


@pytest.mark.extended(but="torch.float32")
@pytest.mark.parametrize(("dtype", "momentum_dtype"), CHAOS, ids=lambda value: str(value))
def test_mutated_states(dtype, momentum_dtype, record_property):
    """Require that every loaded state is complete and finite, and that the next step gives finite weights."""
    seed = CHAOS.index((dtype, momentum_dtype))
    rng = random.Random(seed)
    record_property("seed", seed)
    _, source = stepped(dtype, momentum_dtype=momentum_dtype)
    saved = copy.deepcopy(source.state_dict())
    other, optimizer = build(dtype, momentum_dtype=momentum_dtype)
    weights = copy.deepcopy(other.state_dict())
    step(other, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    outcomes = {"refused": 0, "loaded": 0}
    for k in range(450):
        state_dict = copy.deepcopy(saved)
        title = f"seed {seed}, state {k}: {mutate(state_dict, rng)}"
        snapshot = copy.deepcopy(state_dict)
        try:
            optimizer.load_state_dict(state_dict)
        except ValueError as error:
            assert str(error).startswith("This optimizer state cannot be loaded, and nothing was changed:\n  - "), title  # noqa: PT017
            assert "cannot be read" not in str(error), f"{title}: {error}"  # noqa: PT017
            assert equal(optimizer.state_dict(), before), title
            outcomes["refused"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"{title}: {type(error).__name__}: {error}") from error
        outcomes["loaded"] += 1
        assert_loaded(optimizer, snapshot, title)
        other.load_state_dict(weights)
        try:
            step(other, optimizer, seed=3)
        except Exception as error:
            raise AssertionError(f"{title}: the step after it: {type(error).__name__}: {error}") from error
        assert all(param.isfinite().all() for param in other.parameters()), title
        assert all(v.float().isfinite().all() for s in optimizer.state.values() for v in s.values()), title
        for key in range(6):  # a load does not change the state dict
            before_and_after = (own_moments(each["state"].get(key)) for each in (snapshot, state_dict))
            assert equal(*before_and_after), title
        optimizer.load_state_dict(before)
        assert equal(optimizer.state_dict(), before), title
    assert min(outcomes.values()) > 30


def own_moments(moments):
    """Return the moments without foreign keys, whose values may be NaN or lack data, and so equal nothing."""
    return {k: v for k, v in moments.items() if k in ALL_STATE_KEYS} if isinstance(moments, dict) else moments


def assert_loaded(optimizer, saved, title):
    """Assert that every number of the optimizer is the saved one."""
    for group, there in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        assert isinstance(group["step"], int), title
        for param, key in zip(group["params"], there["params"], strict=True):
            moments = saved["state"].get(key)
            if not moments:
                continue
            for name, value in moments.items():
                if name not in ALL_STATE_KEYS:
                    continue  # a foreign key, which the load drops
                if name == "momentum_scale" and not is_quantized(there.get("momentum_dtype", "auto"), param.shape):
                    continue  # from a template
                loaded = optimizer.state[param].get(name)
                assert loaded is not None, title
                expected = torch.as_tensor(value).detach().float().reshape(loaded.shape)
                assert torch.equal(loaded.float(), expected.to(loaded.dtype).float()), (title, name)
