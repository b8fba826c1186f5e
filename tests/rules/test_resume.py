"""State of rules is saved and resharded like momentum; rules are switched on and off on resume."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from hf_muon import Muon
from hf_muon.optimizer.sharded_checkpoints import loading_from
from hf_muon.rules.normalize import SECOND_MOMENT
from tests.distributed.cases import refusal
from tests.distributed.conftest import run as run
from tests.distributed.test_training import assert_same
from tests.distributed.training import train as without_rules
from tests.optimizer.cases import gradients, parameters
from tests.optimizer.cases import run as steps_of
from tests.rules.others import trained
from tests.rules.settings import TOGETHER

ROWS = {"normalize": "rows"}


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize(("layout", "ranks", "other", "others"), [("fsdp", 2, "hsdp", 4), ("tp", 2, "single", 1)])
def test_state_moves_between_layouts_and_resumes_exactly(run, layout, ranks, other, others, full, tmp_path):
    path = str(tmp_path / "checkpoint")
    saved = run(layout, ranks, last=3, save=path, full=full, **TOGETHER)
    assert any(SECOND_MOMENT in state and state[SECOND_MOMENT].any() for state in saved["states"].values())
    loaded = run(other, others, first=3, last=3, load=path, full=full, **TOGETHER)
    assert_same({**loaded, "losses": []}, {**saved, "losses": []})
    straight = run(layout, ranks, last=5, **TOGETHER)
    resumed = run(layout, ranks, first=3, last=5, load=path, full=full, **TOGETHER)
    assert_same(resumed, {**straight, "losses": straight["losses"][3:]})


def test_state_that_is_lost_is_refused_and_changes_nothing():
    weights = parameters()
    optimizer = Muon(weights, **ROWS)
    steps_of(optimizer, weights, gradients(steps=2))
    saved = optimizer.state_dict()
    for change, message in [
        (lambda state: state.pop(SECOND_MOMENT), f"lacks ['{SECOND_MOMENT}']"),
        (lambda state: state.update({SECOND_MOMENT: torch.zeros(5)}), "has 5 elements, and its matrices need"),
        (lambda state: state[SECOND_MOMENT].fill_(torch.nan), "is not finite"),
        (lambda state: state[SECOND_MOMENT].neg_(), "has negative entries"),
    ]:
        damaged = {**saved, "state": {k: {n: t.clone() for n, t in s.items()} for k, s in saved["state"].items()}}
        change(damaged["state"][1])
        other = Muon(parameters(), **ROWS)
        with pytest.raises(ValueError, match=re.escape(message)):
            other.load_state_dict(damaged)
        assert not other.state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop(SECOND_MOMENT), "is gone"),
        (lambda state: state.update({SECOND_MOMENT: torch.zeros(5)}), "has shape (5,), no longer"),
    ],
    ids=["gone", "resized"],
)
def test_state_that_changes_during_a_run_is_refused(change, message):
    weights, grads = parameters(), gradients(steps=2)
    optimizer = Muon(weights, **ROWS)
    steps_of(optimizer, weights, grads)
    before = [weight.detach().clone() for weight in weights]
    change(optimizer.state[weights[1]])
    with pytest.raises(RuntimeError, match=re.escape(f"its {SECOND_MOMENT} {message}")):
        steps_of(optimizer, weights, grads)
    assert all(map(torch.equal, weights, before))


def test_a_state_that_the_next_step_would_refuse_is_not_loaded():
    weights = parameters()
    optimizer = Muon(weights, momentum=0.5)
    steps_of(optimizer, weights, gradients(steps=1))
    other = Muon(parameters(), momentum_warmup=3)
    with pytest.raises(ValueError, match=r"a step would refuse param group 0: momentum=0.5 is below 0.85"):
        other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["momentum"] == 0.95


def damaged_on_rank_1(rank):
    """Return the error of loading a state of replicas, in which a number of a rule is NaN on one rank."""
    weights = parameters()
    optimizer = Muon(weights, replicate_group=dist.group.WORLD, **ROWS)
    steps_of(optimizer, weights, gradients(steps=1))
    saved = optimizer.state_dict()
    if rank == 1:
        saved["state"][1][SECOND_MOMENT].fill_(torch.nan)
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        return str(error)


def test_a_state_that_one_replica_refuses_is_refused_by_all(pools):
    one, other = pools[2].run(damaged_on_rank_1)
    assert one == other
    assert re.search(rf"its {SECOND_MOMENT} is not finite .*\[rank 1\]", one)


@pytest.mark.parametrize(("before", "after"), [(ROWS, {}), ({}, ROWS)], ids=["off", "on"])
def test_a_rule_is_switched_on_and_off_on_resume(before, after, caplog):
    weights, grads = parameters(), gradients(steps=6)
    optimizer = Muon(weights, **before)
    steps_of(optimizer, weights, grads[:3])
    resumed = parameters()
    for mine, saved in zip(resumed, weights, strict=True):
        mine.data.copy_(saved.data)
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


@pytest.mark.parametrize(("layout", "ranks", "flat"), [("fsdp", 2, False), ("fsdp", 2, True), ("hsdp", 4, False)])
@pytest.mark.parametrize(("before", "after"), [(ROWS, {}), ({}, ROWS)], ids=["off", "on"])
def test_a_rule_is_switched_on_and_off_with_a_sharded_checkpoint(run, before, after, layout, ranks, flat, tmp_path):
    """Compare with the whole state of the same run, bit for bit."""
    results = {}
    for full in (False, True):
        path = str(tmp_path / f"{full=}")
        run("fsdp", 2, last=3, save=path, full=full, flat=flat and not full, **before)
        resume = {"first": 3, "load": path, "full": full, "flat": flat and not full, "converts": not full}
        results[full] = run(layout, ranks, last=5, **resume, **after)
    assert_same(results[False], results[True])
    assert any(SECOND_MOMENT in state for state in results[False]["states"].values()) is bool(after)


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [({}, ROWS, "momentum_buffer"), ({}, ROWS, "exp_avg_sq"), (ROWS, ROWS, SECOND_MOMENT)],
)
def test_a_sharded_checkpoint_without_moments_is_refused(pools, run, before, after, lost, tmp_path):
    path = str(tmp_path / "checkpoint")
    run("fsdp", 2, last=1, save=path, without=lost, **before)
    options = {"case": "train", "layout": "fsdp", "first": 1, "load": path, "converts": True}
    expected = f"moments are missing: .*lacks \\['{lost}'\\]" if before else f"Missing key.*{lost}"
    for error in pools[2].run(refusal, **options, **after):
        assert re.search(expected, error)


@pytest.mark.parametrize(("before", "after"), [({"their_normalize": True}, {}), ({}, {"their_normalize": True})])
def test_a_rule_is_registered_or_gone_after_a_sharded_checkpoint(pools, before, after, tmp_path):
    """Compare with the whole state; the options of the rule, too, are in one of the two runs alone."""
    results = {}
    for full in (False, True):
        path = str(tmp_path / f"{full=}")
        runs = [
            {"last": 3, "save": path, **before},
            {"first": 3, "last": 5, "load": path, "converts": not full, "direct": full, **after},
        ]
        for options in runs:
            train = trained if "their_normalize" in options else without_rules
            results[full] = pools[2].run(train, layout="fsdp", full=full, **options)[0]
    assert_same(results[False], results[True])
    assert any("their_moment" in state for state in results[False]["states"].values()) is bool(after)


def test_shards_replace_the_state_of_a_rule_by_zeros_and_a_warning_says_so(tmp_path, caplog):
    """Load into an optimizer that has taken steps with the rule: its momentum is replaced, and the rule's state new."""
    path = str(tmp_path)
    models = [nn.ParameterList(parameters()) for _ in range(2)]
    saved, other = Muon(models[0].parameters()), Muon(models[1].parameters(), **ROWS)
    steps_of(saved, list(models[0]), gradients(steps=2))
    steps_of(other, list(models[1]), gradients(steps=3, seed=5))
    dcp.save({"optimizer": get_optimizer_state_dict(models[0], saved)}, checkpoint_id=path)
    with loading_from(other, path):
        state = {"optimizer": get_optimizer_state_dict(models[1], other)}
    assert all(SECOND_MOMENT in own for own in (*other.state.values(), *other.state_dict()["state"].values()))
    with caplog.at_level(logging.WARNING, logger="hf_muon"):
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(models[1], other, state["optimizer"])
    text = "state that they lack starts from zero: normalize 'rows' here, 'none' in the checkpoint"
    assert text in caplog.text
    other.init_state()
    for mine, its in zip(other.state.values(), saved.state.values(), strict=True):
        assert torch.equal(mine["momentum_buffer"], its["momentum_buffer"])
        assert not mine[SECOND_MOMENT].any()


def test_a_checkpoint_whose_metadata_cannot_be_read_is_left_to_torch(tmp_path):
    model = nn.ParameterList(parameters())
    optimizer = Muon(model.parameters(), **ROWS)
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
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path)
    other_model, other = mixed()
    for own in other.state.values():
        for moment in own.values():
            moment.zero_()
    for group in other.param_groups if not named else ():
        del group["param_names"]
    with loading_from(other, tmp_path):
        state = {"optimizer": get_optimizer_state_dict(other_model, other)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other_model, other, state["optimizer"])
    for name, param in model.items():
        expected, loaded = optimizer.state[param], other.state[other_model[name]]
        assert expected.keys() == loaded.keys()
        assert all(torch.equal(expected[key], loaded[key]) for key in expected)
