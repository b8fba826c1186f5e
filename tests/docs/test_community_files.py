"""The files for people who report or cite: they parse, and ask for what a report needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import hf_muon

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_has_the_version():
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert str(citation["version"]) == hf_muon.__version__
    assert all(reference["url"] for reference in citation["references"])


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_templates_ask_for_what_a_report_needs(name):
    template = read(TEMPLATES / f"{name}.yml")
    assert template.keys() >= {"name", "description", "body"}
    fields = {field["id"]: field for field in template["body"] if field["type"] != "markdown"}
    assert fields["doctor"]["attributes"]["label"] == "hf-muon doctor --json"
    needed = {"layout", "settings"} | ({"doctor", "ranks", "program"} if name == "bug" else set())
    assert {key for key, field in fields.items() if field.get("validations", {}).get("required")} >= needed
    assert read(TEMPLATES / "config.yml") == {"blank_issues_enabled": False}
