"""The format of DeepSpeed's files is a promise, as tests/optimizer/test_checkpoint_format.py shows for other ones.

Ranks import `save`, `load` and `reference` by name.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_muon
from hf_muon import build_optimizer
from hf_muon.config import GROUP_OPTIONS
from hf_muon.integrations.deepspeed.engine import initialize
from hf_muon.integrations.deepspeed.saving import INDEX
from hf_muon.optimizer.checkpoint_format import FORMAT, KEY
from tests.deepspeed.runs import assert_same, config_of, rank_of_environment, whole_state
from tests.deepspeed.test_checkpoints import state_in

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.every_stack]

STATES = Path(__file__).parents[1] / "states"


@contextlib.contextmanager
def stepped(steps, stage=2, **options):
    """Yield an engine with a small model after some steps, and its optimizer."""
    rank_of_environment()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3))
    optimizer = build_optimizer(model, **{"lr": 0.01, "ns_dtype": "fp32", **options})
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config_of(stage))
    for number in range(steps):
        engine.backward(engine(torch.ones(4, 6) * (number + 1)).square().sum())
        engine.step()
    yield engine, optimizer
    engine.destroy()


def save(rank, folder):
    """Save what tests/states keeps of a version, without DeepSpeed's scripts."""
    with stepped(2, momentum=0.9) as (engine, _):
        engine.save_checkpoint(folder)


def load(rank, folder, steps=0, **options):
    """Load into a run after some steps; return the error, if there is one, the whole state, and the param groups."""
    with stepped(steps, **options) as (engine, optimizer):
        try:
            text = str(engine.load_checkpoint(folder)[0])
        except ValueError as error:
            text = str(error)
        groups = [{name: group[name] for name in ("step", *GROUP_OPTIONS)} for group in optimizer.param_groups]
        return text, whole_state(engine, optimizer), groups


def reference(rank, steps, **options):
    """Return the whole state of a run that loads nothing."""
    with stepped(steps, **options) as run:
        return whole_state(*run)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Return a checkpoint that this version has written."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(save, folder=str(folder))
    return folder


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("version", ["this", *sorted(folder.parent.name for folder in STATES.glob("*/zero2"))])
def test_states_of_released_versions_load(ranks, saved, version, stage):
    folder = saved if version == "this" else STATES / version / "zero2"
    expected = ranks.run(reference, steps=2, momentum=0.9)[0]
    for _, state, groups in ranks.run(load, folder=str(folder), stage=stage):
        assert {(group["step"], group["momentum"]) for group in groups} == {(2, 0.9)}
        assert state.keys() == expected.keys()
        for name, tensors in expected.items():
            assert state[name].keys() == tensors.keys()
            for key, tensor in tensors.items():
                # They are of another machine, whose last bits Newton-Schulz amplifies in updates of rank one.
                torch.testing.assert_close(state[name][key], tensor, rtol=1e-5, atol=1e-6)
                assert state[name][key].any()


def edit(folder, change, files="*_states.pt"):
    """Change the texts of a checkpoint in files: those of param groups, or the index."""
    changed = 0
    for file in folder.glob(f"*/{files}"):
        content = torch.load(file, weights_only=False)
        groups = state_in(content)["param_groups"] if "optimizer_state_dict" in content else []
        for holder, key in [(content, INDEX), *((group, KEY) for group in groups)]:
            text = json.loads(holder[key])
            changed += change(text, key) is not None
            holder[key] = json.dumps(text)
        torch.save(content, file)
    assert changed


def newer(what, where):
    """Return a change that makes a text one of a version 7.8.9, with a later format or with one option more."""

    def change(text, key):
        if key != where:
            return None
        (text["options"] if what == "new_option" else text).update({what: FORMAT + 1})
        return text.update(version="7.8.9") or what

    return change


ALL, OF_RANK_1 = "*_states.pt", "*rank_1_*_states.pt"


@pytest.mark.parametrize(
    ("what", "where", "files", "stage"),
    [
        *(("format", INDEX, ALL, stage) for stage in (0, 2, 3)),
        ("format", KEY, ALL, 2),
        *(("new_option", KEY, ALL, stage) for stage in (0, 2, 3)),
        ("new_option", KEY, OF_RANK_1, 2),
    ],
)
def test_a_state_of_a_newer_version_is_refused_by_all_ranks(ranks, saved, what, where, files, stage, tmp_path):
    """Expect the same error, and a run as if nothing had been loaded."""
    folder = shutil.copytree(saved, tmp_path / "copy")
    edit(folder, newer(what, where), files)
    expected = ranks.run(reference, steps=1, stage=stage)[0]
    (one, *_), (other, *_) = results = ranks.run(load, folder=str(folder), steps=1, stage=stage)
    assert one == other
    assert re.search(rf"{what}.* of hf_muon 7\.8\.9.*{re.escape(hf_muon.__version__)}.*\[newer-state\]", one), one
    assert re.findall(r"\[[a-z-]+\]", one) == ["[newer-state]"]
    for _, state, groups in results:
        assert_same(state, expected)
        assert {group["step"] for group in groups} == {1}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_state_without_an_option_of_this_version_loads(ranks, saved, stage, tmp_path):
    """Expect this run's option, and the others of the checkpoint."""
    folder = shutil.copytree(saved, tmp_path / "copy")
    edit(folder, lambda text, key: text["options"].pop("nesterov") if key == KEY else None)
    for nesterov in (True, False):
        for text, state, groups in ranks.run(load, folder=str(folder), steps=1, stage=stage, nesterov=nesterov):
            assert "[" not in text
            assert {(group["step"], group["momentum"], group["nesterov"]) for group in groups} == {(2, 0.9, nesterov)}
            assert_same(state, ranks.run(load, folder=str(saved), stage=stage)[0][1])
