"""The notebook runs, its two runs agree, and what it shows and links to exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "demo" / "demo.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_it_opens_with_a_picture_and_its_links_lead_somewhere():
    texts = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown"]
    assert re.search(r"!\[[^\]]+\]\(curves\.svg\)", texts[0])
    targets = [target for text in texts for target in re.findall(r"\]\(([^)#]+)\)", text)]
    assert [target for target in targets if not (NOTEBOOK.parent / target).is_file()] == []
    assert not any(cell.get("outputs") for cell in CELLS), "clear the outputs"


@pytest.mark.extended
@pytest.mark.slow
def test_its_cells_run_and_the_loop_by_hand_equals_the_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    assert max(names["differences"].values()) < 1e-3
    assert names["muon_loss"] < names["adamw_loss"]
