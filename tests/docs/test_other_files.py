"""The notebook of the demo runs, and workflows call what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "demo" / "demo.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_the_notebook_opens_with_a_picture_and_its_links_lead_somewhere():
    texts = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown"]
    assert re.search(r"!\[[^\]]+\]\(curves\.svg\)", texts[0])
    targets = [target for text in texts for target in re.findall(r"\]\(([^)#]+)\)", text)]
    assert [target for target in targets if not (NOTEBOOK.parent / target).is_file()] == []
    assert not any(cell.get("outputs") for cell in CELLS), "clear the outputs"


@pytest.mark.extended
@pytest.mark.slow
def test_the_notebook_runs_and_its_loop_by_hand_equals_the_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    assert max(names["differences"].values()) < 1e-3
    assert names["muon_loss"] < names["adamw_loss"]


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_actions_are_pinned_by_hash_and_commands_exist(path):
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    actions = re.findall(r"uses: (.+)", text)
    assert [action for action in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", action)] == []
    targets = re.findall(r"run: make (?:-o \w+ )?([\w-]+)", text)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [
        target for target in targets if not re.search(rf"^([\w-]+ )*{target}( [\w-]+)*:", makefile, re.MULTILINE)
    ] == []
