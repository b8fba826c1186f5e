"""The format of checkpoints is a promise: states of before load in a version with another option, later ones do not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import hf_muon
from hf_muon import Muon
from hf_muon.config import GROUP_OPTIONS
from hf_muon.optimizer import checkpoint_format
from tests.optimizer.cases import stepped

REPOSITORY = Path(hf_muon.__file__).parents[1]
STATES = Path(__file__).parents[1] / "states"
SCRIPT = Path(__file__).with_name("format_cases.py")
LATER = """    new_option: Annotated[int, types.integer("a number", 1)] = option(3, "An option of a later version.")
    rules: Mapping[str, Any] = """


def replace(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def later(tmp_path_factory):
    """Return a folder with a copy of the package that has one option more."""
    folder = tmp_path_factory.mktemp("later")
    shutil.copytree(REPOSITORY / "hf_muon", folder / "hf_muon", ignore=shutil.ignore_patterns("__pycache__"))
    replace(folder / "hf_muon" / "config.py", "    rules: Mapping[str, Any] = ", LATER)
    replace(folder / "hf_muon" / "__init__.py", f'"{hf_muon.__version__}"', '"7.8.9"')
    return folder


def run(package, what, folder, ranks):
    """Save or load with a package, and return what each rank has printed, and whether all have succeeded."""
    env = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    commands = [[sys.executable, SCRIPT, what, folder, str(rank), str(ranks)] for rank in range(ranks)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, env=env, cwd=folder, **pipes) for command in commands]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    return texts, all(process.returncode == 0 for process in processes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_load_in_a_version_with_one_option_more_and_not_the_other_way_round(later, ranks, tmp_path):
    for there, here, loads in ((REPOSITORY, later, True), (later, REPOSITORY, False)):
        folder = tmp_path / str(loads)
        folder.mkdir()
        texts, is_saved = run(there, "save", folder, ranks)
        assert is_saved, texts
        texts, is_loaded = run(here, "load", folder, ranks)
        assert is_loaded == loads, texts
        for text in () if loads else texts:
            assert re.search(rf"new_option of hf_muon 7\.8\.9.*{hf_muon.__version__}.*\[newer-state\]", text)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", sorted(folder.name for folder in STATES.iterdir()))
def test_states_of_released_versions_load(version, ranks, tmp_path):
    shutil.copytree(STATES / version, tmp_path / version)
    # Of two ranks; tests/deepspeed loads the last.
    assert {path.name for path in (tmp_path / version).iterdir()} == {"shards", "whole", "zero2"}
    texts, is_loaded = run(REPOSITORY, "load", tmp_path / version, ranks)
    assert is_loaded, texts


def test_the_page_lists_what_a_saved_group_has():
    text = (
        (REPOSITORY / "docs" / "exactness.md").read_text(encoding="utf-8").partition("## What a param group stores")[2]
    )
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.M))
    groups = stepped()[1].state_dict()["param_groups"]
    assert listed == set().union(*groups)
    content = json.loads(groups[0][checkpoint_format.KEY])
    assert content["format"] == checkpoint_format.FORMAT
    assert {*content["options"], "lr", "weight_decay"} == {*GROUP_OPTIONS, "lr_factors"}


def test_a_flattened_state_of_several_optimizers_is_whole():
    """Expect nothing of SGD, which keeps no state, and each key of a group, also one with a dot."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizers = (Muon([model[0].weight]), torch.optim.SGD([model[0].bias], lr=0.1))
    optimizers[1].param_groups[0]["my.tag"] = 1
    model(torch.ones(3, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizers, options=options)
    momentum = optimizers[0].state[model[0].weight]["momentum_buffer"].clone()
    set_optimizer_state_dict(model, optimizers, state, options=options)
    assert torch.equal(optimizers[0].state[model[0].weight]["momentum_buffer"], momentum)
    assert optimizers[1].param_groups[0]["my.tag"] == 1
