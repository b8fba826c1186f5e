"""The notebook of the demo, and the files for people who report or cite: they run or parse, and have what is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "demo" / "demo.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def read(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


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


def test_the_citation_names_sources():
    assert all(reference["url"] for reference in read("CITATION.cff")["references"])


def test_the_owner_of_code_is_the_contact_of_the_package():
    (owner,) = re.findall(r"^\* (\S+)$", (ROOT / ".github/CODEOWNERS").read_text(encoding="utf-8"), re.MULTILINE)
    assert f'email = "{owner}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_templates_ask_for_what_a_report_needs(name):
    template = read(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert template.keys() >= {"name", "description", "body"}
    fields = {field["id"]: field for field in template["body"] if field["type"] != "markdown"}
    assert fields["doctor"]["attributes"]["label"] == "hf-muon doctor --json"
    needed = {"layout", "settings"} | ({"doctor", "ranks", "program"} if name == "bug" else set())
    assert {key for key, field in fields.items() if field.get("validations", {}).get("required")} >= needed
