"""A checkpoint from a stranger: nothing of it is run with `optim: muon` that is not run with AdamW."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_muon.cli.app import app
from tests.integrations.plain_script import InOrder, dataset, model
from tests.integrations.trainer_runs import arguments

PACKAGE = Path(__file__).parents[2] / "hf_muon"
# What Trainer saves for an optimizer, and what hf_muon reads of a checkpoint's folder.
FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "optimizer_0/.metadata", "optimizer_0/__0_0.distcp")


class Attack:
    """A pickle that makes a folder when it is read."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def plant(file: Path, proof: Path, form: str) -> None:
    file.parent.mkdir(exist_ok=True)
    if form == "archive":
        with file.open("wb") as stream:  # torch does not write files of every name
            torch.save({"state": Attack(proof)}, stream)
    else:
        file.write_bytes(pickle.dumps(Attack(proof)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a checkpoint of each optimizer."""
    folder = tmp_path_factory.mktemp("saved")
    for optim in ("adamw_torch", "muon"):
        options = {"optim": optim, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
        InOrder(model(), arguments(folder / optim, **options), train_dataset=dataset()).train()
    return {optim: folder / optim / "checkpoint-1" for optim in ("adamw_torch", "muon")}


@pytest.mark.parametrize("form", ["archive", "plain"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "optimizer.pt is cut off"])
@pytest.mark.parametrize("name", FILES)
def test_resuming(checkpoints, name, form, is_cut, tmp_path):
    """Expect that the planted file is not run, also where a load has failed and the error is explained."""
    ran = {}
    for optim, saved in checkpoints.items():
        folder = shutil.copytree(saved, tmp_path / optim / "checkpoint-1")
        if is_cut:
            content = (folder / "optimizer.pt").read_bytes()
            (folder / "optimizer.pt").write_bytes(content[: len(content) // 2])
        proof = tmp_path / f"ran with {optim}"
        plant(folder / name, proof, form)
        trainer = InOrder(model(), arguments(tmp_path / optim, optim=optim, max_steps=2), train_dataset=dataset())
        with contextlib.suppress(Exception):
            trainer.train(resume_from_checkpoint=str(folder))
        ran[optim] = proof.exists()
    assert ran["muon"] <= ran["adamw_torch"]


@pytest.mark.parametrize("form", ["archive", "plain"])
def test_converting(tmp_path, form):
    proof = tmp_path / "ran"
    plant(tmp_path / "optimizer.pt", proof, form)
    command = ["convert", str(tmp_path / "optimizer.pt"), str(tmp_path / "new.pt"), "--to", "hf_muon"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    assert not proof.exists()


# DeepSpeed itself unpickles its files; without it, hf_muon is not asked to read them.
UNPICKLES = {"integrations/deepspeed/loading.py"}


def test_no_other_file_of_the_package_unpickles():
    """Look for what unpickles in the source, so that a new reader comes with a row above."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        calls = re.findall(r"torch\.load\([^\n]*(?:\n[^\n]*)?", text)
        if re.search(r"pickle\.loads?\(|Unpickler\(", text) or any("weights_only=True" not in call for call in calls):
            found.add(path.relative_to(PACKAGE).as_posix())
    assert found <= UNPICKLES
