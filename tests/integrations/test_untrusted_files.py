"""A checkpoint from a stranger: nothing of it is run with `optim: muon` that is not run with AdamW.

And files that are written completely or not at all.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from hf_muon.integrations.archives import complete_or_absent
from tests.integrations.plain_script import model
from tests.integrations.trainer_runs import train

pytestmark = pytest.mark.every_stack

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
        train(model(), folder / optim, optim=optim, max_steps=1, save_strategy="steps", save_steps=1)
    return {optim: folder / optim / "checkpoint-1" for optim in ("adamw_torch", "muon")}


# Which files are planted, and whether optimizer.pt is cut off, so that the other files may be read to explain it.
PLANTED = [
    *((names, False) for names in (FILES[:1], FILES[1:2], FILES[2:])),
    *(((name,), True) for name in FILES[1:]),
]


@pytest.mark.parametrize("form", ["archive", "plain"])
@pytest.mark.parametrize(("names", "is_cut"), PLANTED, ids=str)
def test_resuming(checkpoints, names, is_cut, form, tmp_path):
    """Expect that a planted file is not run, but for one that is run with AdamW, too."""

    def run_by(optim):
        folder = shutil.copytree(checkpoints[optim], tmp_path / optim / "checkpoint-1")
        if is_cut:
            content = (folder / "optimizer.pt").read_bytes()
            (folder / "optimizer.pt").write_bytes(content[: len(content) // 2])
        proofs = {name: tmp_path / f"{optim} ran {name.replace('/', ' ')}" for name in names}
        for name, proof in proofs.items():
            plant(folder / name, proof, form)
        with contextlib.suppress(Exception):
            train(model(), tmp_path / optim, resume=str(folder), optim=optim, max_steps=2)
        return {name for name, proof in proofs.items() if proof.exists()}

    found = run_by("muon")
    assert not found or found <= run_by("adamw_torch")


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path):
    target = tmp_path / "page.html"
    with complete_or_absent(target) as file:
        file.write_text("old")
    with pytest.raises(RuntimeError), complete_or_absent(target) as file:
        raise RuntimeError(file.write_text("half of the new"))
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path):
    """Expect that a file of the user stays, to which another user has made a link where a page is to be written."""
    target, mine = tmp_path / "page.html", tmp_path / "mine"
    mine.write_text("mine")
    with complete_or_absent(target) as file:
        temporary = file
    temporary.symlink_to(mine)
    with complete_or_absent(target) as file:
        file.write_text("page")
    assert (temporary, target.is_symlink()) == (file, False)
    assert (mine.read_text(), target.read_text()) == ("mine", "page")


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
