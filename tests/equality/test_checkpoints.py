"""Checkpoints that have something else than the run that loads them: other dtypes, other rules, or less."""

from __future__ import annotations

import dataclasses
import logging
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from hf_muon import Muon
from hf_muon.math.moments import decoded
from hf_muon.optimizer.sharded_checkpoints import loading_from
from hf_muon.rules.normalize import SECOND_MOMENT
from tests.equality.cells import LAST, SAVED, Cell
from tests.equality.checks import differing, everywhere
from tests.equality.runs import digest, numbers_of, prepare, started, train
from tests.optimizer.cases import gradients, parameters
from tests.optimizer.cases import run as steps_of

ROWS = {"normalize": "rows"}
FSDP = Cell(place="fsdp-2", model="wide")
PLACES = ["single-1", "fsdp-2"]


def with_all(cell, **changes):
    return dataclasses.replace(cell, **changes)


def saved(rank, cell, folder, steps=SAVED, without=""):
    """Train, save, and return moments as numbers."""
    with numbers_of(cell), started(cell, rank, folder) as layout:
        train(layout, 0, steps)
        layout.save(f"{folder}/checkpoint", without)
        return numbers(layout.tensors())


def loaded(rank, cell, folder, *, converts=True, stale=False, steps=SAVED, drop=""):
    """Load and train on; return moments as numbers right after the load, and digests of the end; or an error."""
    try:
        with numbers_of(cell), started(cell, rank, folder) as layout:
            if stale:  # gradients with which torch creates no state to load into
                prepare(layout, 0)
            layout.load(f"{folder}/checkpoint", converts=converts)
            if drop:
                layout.optimizer.state.clear()
            for group in layout.optimizer.param_groups if drop == "everything" else ():
                group["step"] = 0
            moments = numbers(layout.tensors())
            layout.optimizer.zero_grad()
            train(layout, steps, LAST)
            return moments, digest(layout.tensors())
    except BaseException as error:  # noqa: BLE001  torch.distributed.checkpoint raises one that is no Exception
        return str(error)


def numbers(tensors):
    """Return moments, decoded if they are stored in 8 bits, by the names of parameters and moments."""
    states = {}
    for name, tensor in tensors.items():
        param, key = name.rsplit(" ", 1)
        states.setdefault(param, {})[key] = tensor
    keys = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    return {f"{p} {k}": decoded(own, k).float() for p, own in states.items() for k in keys if k in own}


# What a run has of its own, and what a checkpoint has in its place.
CHANGES = [
    *({"momentum": pair} for pair in (("auto", "int8"), ("bf16", "int8"), ("int8", "auto"), ("int8", "bf16"))),
    *({"adamw": pair} for pair in (("auto", "int8"), ("bf16", "int8"), ("int8", "auto"), ("int8", "bf16"))),
    *({"rule": pair} for pair in (("plain", "normuon"), ("normuon", "plain"), ("plain", "others"))),
    {"rule": ("scaled", "plain"), "momentum": ("auto", "bf16"), "adamw": ("auto", "bf16")},
]


def id_of(change):
    return ",".join(f"{name}={before}-{after}" for name, (before, after) in change.items())


@pytest.mark.first_tier("momentum=auto-int8")
@pytest.mark.second_tier("momentum=(auto-int8|int8-bf16)|adamw=(int8-auto|bf16-int8)|rule=.*(normuon|scaled)")
@pytest.mark.parametrize("change", CHANGES, ids=id_of)
def test_another_dtype_or_rule_is_converted_alike_in_every_form(pools, change, tmp_path):
    """Compare shards, whole tensors and flattened keys with one another; moments keep their numbers."""
    before, after = (with_all(FSDP, **{name: pair[i] for name, pair in change.items()}) for i in (0, 1))
    forms = ["full", "sharded", "flat"]
    results = {}
    for form in forms:
        folder = str(tmp_path / form)
        (tmp_path / form).mkdir()
        (exact, _) = pools[2].run(saved, cell=with_all(before, form=form), folder=folder)
        result, other = pools[2].run(loaded, cell=with_all(after, form=form), folder=folder)
        assert not isinstance(result, str), result
        results[form] = result[1]
        assert other[1] == result[1]
        for name, moment in exact.items():
            bound = 0.02 if "int8" in (after.momentum, after.adamw) else 0.004
            exactly = after.momentum == after.adamw == "auto"
            assert (result[0][name] - moment).norm() <= (0 if exactly else bound) * moment.norm(), name
    assert all(result == results["full"] for result in results.values())
    has_state = {"plain": None, "normuon": SECOND_MOMENT, "others": "their_rows"}.get(after.rule)
    assert has_state is None or any(name.endswith(has_state) for name in results["full"])


@pytest.mark.first_tier("fsdp-2-sharded")
@pytest.mark.parametrize("form", ["sharded", "full"])
@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_from_before_the_first_step_changes_nothing(pools, place, form, tmp_path):
    """Do not count the step with zero gradients by which torch creates the state that it saves."""
    cell = Cell(place=place, form=form)
    everywhere(saved, cell, pools, str(tmp_path), steps=0)
    for result in everywhere(loaded, cell, pools, str(tmp_path), steps=0, converts=False):
        assert result[1] == everywhere(straight, cell, pools, str(tmp_path))[0]


def straight(rank, cell, folder):
    with started(cell, rank, folder) as layout:
        train(layout, 0, LAST)
        return digest(layout.tensors())


@pytest.mark.promise("lost-moments")
@pytest.mark.first_tier("fsdp")
@pytest.mark.parametrize("place", PLACES)
def test_moments_that_are_lost_are_refused_or_seen(pools, place, tmp_path):
    """Drop them, to prove that comparisons of resumed runs would notice."""
    cell, folder = Cell(place=place), str(tmp_path)
    everywhere(saved, cell, pools, folder)
    expected = everywhere(straight, cell, pools, folder)[0]
    (_, resumed), *_ = everywhere(loaded, cell, pools, folder)
    assert not differing(resumed, expected)
    (_, without), *_ = everywhere(loaded, cell, pools, folder, drop="everything")
    assert all(without[name] != value for name, value in expected.items() if name.endswith("weight"))
    for text in everywhere(loaded, cell, pools, folder, drop="state"):
        assert "has taken 2 steps" in text
        assert "[moments-gone]" in text
    for text in everywhere(loaded, cell, pools, folder, stale=True, converts=False):
        assert re.search(r"\[moments-missing\]|Missing optimizer state|\[moments-gone\]", text), text


@pytest.mark.first_tier("momentum_scale|exp_avg_sq")
@pytest.mark.parametrize(
    ("there", "here", "lost", "message"),
    [
        ({"momentum": "int8"}, {}, "", r"momentum_scale.*\[moments-missing\]"),
        ({}, {"momentum": "int8"}, "", "Missing key.*momentum_scale"),
        ({"adamw": "int8"}, {}, "", r"exp_avg_scale.*\[moments-missing\]"),
        ({}, {"adamw": "int8"}, "", "Missing key.*exp_avg_scale"),
        ({}, {"rule": "normuon"}, "momentum_buffer", "Missing key.*momentum_buffer"),
        ({}, {"rule": "normuon"}, "exp_avg_sq", "Missing key.*exp_avg_sq"),
        ({"rule": "normuon"}, {"rule": "normuon"}, SECOND_MOMENT, rf"{SECOND_MOMENT}.*\[moments-missing\]"),
    ],
)
def test_shards_without_what_the_run_needs_are_refused(pools, there, here, lost, message, tmp_path):
    """Without `loading_from`, torch would read codes into moments of numbers, or vice versa; nothing is made up."""
    converts = bool(lost) or "form" in here
    pools[2].run(saved, cell=with_all(FSDP, **there), folder=str(tmp_path), without=lost)
    for text in pools[2].run(loaded, cell=with_all(FSDP, **here), folder=str(tmp_path), converts=converts):
        assert isinstance(text, str)
        assert re.search(message, text, re.DOTALL), text


# --- rules, in one process


@pytest.mark.parametrize(("before", "after"), [(ROWS, {}), ({}, ROWS)], ids=["off", "on"])
def test_a_rule_is_switched_on_and_off_on_resume(before, after, caplog):
    weights, grads = parameters(), gradients(steps=6)
    optimizer = Muon(weights, **before)
    steps_of(optimizer, weights, grads[:3])
    resumed = [nn.Parameter(weight.detach().clone()) for weight in weights]
    other = Muon(resumed, **after)
    with caplog.at_level(logging.WARNING, logger="hf_muon"):
        other.load_state_dict(optimizer.state_dict())
    here, there = after.get("normalize", "none"), before.get("normalize", "none")
    assert f"normalize '{here}' here, '{there}' in the checkpoint" in caplog.text
    # The same as an optimizer that has the other's momentum, and a rule whose state is new.
    optimizer.param_groups[0]["normalize"] = here
    for own in optimizer.state.values():
        own.pop(SECOND_MOMENT, None)
    steps_of(optimizer, weights, grads[3:])
    steps_of(other, resumed, grads[3:])
    assert all(map(torch.equal, weights, resumed))
    assert all((SECOND_MOMENT in own) is bool(after) for own in other.state.values())


def test_shards_replace_the_state_of_a_rule_by_zeros_and_a_warning_says_so(tmp_path, caplog):
    """Load into an optimizer that has taken steps with the rule: its momentum is replaced, and the rule's state new."""
    models = [nn.ParameterList(parameters()) for _ in range(2)]
    first, other = Muon(models[0].parameters()), Muon(models[1].parameters(), **ROWS)
    steps_of(first, list(models[0]), gradients(steps=2))
    steps_of(other, list(models[1]), gradients(steps=3, seed=5))
    dcp.save({"optimizer": get_optimizer_state_dict(models[0], first)}, checkpoint_id=tmp_path)
    with loading_from(other, tmp_path):
        state = {"optimizer": get_optimizer_state_dict(models[1], other)}
    assert all(SECOND_MOMENT in own for own in (*other.state.values(), *other.state_dict()["state"].values()))
    with caplog.at_level(logging.WARNING, logger="hf_muon"):
        dcp.load(state, checkpoint_id=tmp_path)
        set_optimizer_state_dict(models[1], other, state["optimizer"])
    assert "starts from zero: normalize 'rows' here, 'none' in the checkpoint" in caplog.text
    other.init_state()
    for mine, its in zip(other.state.values(), first.state.values(), strict=True):
        assert torch.equal(mine["momentum_buffer"], its["momentum_buffer"])
        assert not mine[SECOND_MOMENT].any()


def test_a_checkpoint_whose_metadata_cannot_be_read_is_left_to_torch(tmp_path):
    optimizer = Muon(parameters(), **ROWS)
    optimizer.init_state()
    (tmp_path / ".metadata").write_bytes(b"damaged")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with loading_from(optimizer, folder):
            assert all(SECOND_MOMENT in own for own in optimizer.state_dict()["state"].values())


def mixed():
    """Return two matrices and an embedding and a head, one of each stored in 8 bits, after two steps."""
    shapes = {"a": (70, 64), "b": (64, 70), "embed": (30, 64), "head": (20, 64)}
    generator = torch.Generator().manual_seed(1)
    model = nn.ParameterDict({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})
    int8 = {"momentum_dtype": "int8", "adamw_state_dtype": "int8"}
    groups = [
        {"params": [(name, model[name])], "use_muon": name in "ab", **(int8 if name in ("a", "head") else {})}
        for name in shapes
    ]
    optimizer = Muon(groups, lr=0.1)
    for _ in range(2):
        for param in model.values():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("named", [True, False])
def test_groups_that_store_moments_in_different_dtypes_resume_unchanged(named, tmp_path):
    model, optimizer = mixed()
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    other_model, other = mixed()
    for moment in (moment for own in other.state.values() for moment in own.values()):
        moment.zero_()
    for group in other.param_groups if not named else ():
        del group["param_names"]
    with loading_from(other, tmp_path):
        state = {"optimizer": get_optimizer_state_dict(other_model, other)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other_model, other, state["optimizer"])
    for name, param in model.items():
        expected, results = optimizer.state[param], other.state[other_model[name]]
        assert expected.keys() == results.keys()
        assert all(torch.equal(expected[key], results[key]) for key in expected)
