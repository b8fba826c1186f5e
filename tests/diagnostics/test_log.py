"""The environment variables of the step report and of diagnostics, and the older one that both shared."""

from __future__ import annotations

import pytest
import torch

from hf_muon import Muon
from hf_muon.diagnostics import log as diagnostics


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (diagnostics.REPORT, diagnostics.EVERY, diagnostics.OF_LLAMAFACTORY):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "report", "every"),
    [
        ({}, False, 0),
        ({"HF_MUON_STEP_REPORT": "1"}, True, 0),
        ({"HF_MUON_STEP_REPORT": "off"}, False, 0),
        ({"HF_MUON_DIAGNOSTICS_EVERY": "50"}, False, 50),
        ({"HF_MUON_DIAGNOSTICS_EVERY": "0"}, False, 0),
        ({"HF_MUON_DIAGNOSTICS_EVERY": "False"}, False, 0),
        ({"HF_MUON_DIAGNOSTICS_EVERY": " no "}, False, 0),
        ({"HF_MUON_STEP_REPORT": "1", "HF_MUON_DIAGNOSTICS_EVERY": "7"}, True, 7),
        ({"LLAMAFACTORY_MUON_DIAG": "1"}, True, 0),
        ({"LLAMAFACTORY_MUON_DIAG": "0"}, False, 0),
        ({"LLAMAFACTORY_MUON_DIAG": "1", "HF_MUON_STEP_REPORT": "0"}, False, 0),
    ],
)
def test_each_variable_has_one_meaning(variables, report, every, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (diagnostics.report_wanted(), diagnostics.every_from_environment()) == (report, every)


@pytest.mark.parametrize("text", ["often", "on", "-1", "1.5", "9" * 5000, "\u0663"])
def test_text_that_is_no_number_of_steps_is_refused(text, monkeypatch):
    monkeypatch.setenv(diagnostics.EVERY, text)
    with pytest.raises(ValueError, match=r"HF_MUON_DIAGNOSTICS_EVERY=.*\[invalid-value\]"):
        Muon([torch.nn.Parameter(torch.ones(3, 4))])


def test_the_variable_reaches_the_optimizer_and_the_option_wins(tmp_path, monkeypatch):
    monkeypatch.setenv(diagnostics.EVERY, "3")
    file = str(tmp_path / "d.jsonl")
    params = [torch.nn.Parameter(torch.ones(3, 4))]
    assert Muon(params, diagnostics_file=file).metrics.every == 3
    assert Muon(params, diagnostics_every=5, diagnostics_file=file).metrics.every == 5


def test_first_few():
    names = ["a", "b", "c"]
    assert diagnostics.first_few(names) == diagnostics.first_few(names, 3) == "a, b, c"
    assert diagnostics.first_few(dict.fromkeys(names), 1) == "a, and 2 more"
    assert diagnostics.first_few(names, 2, "\n  - ") == "a\n  - b\n  - and 1 more"
    assert diagnostics.first_few([]) == ""
