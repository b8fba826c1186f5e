"""Metrics have the options that rules change from step to step."""

from __future__ import annotations

import json

import pytest

from hf_muon import Muon
from tests.optimizer.cases import gradients, parameters, run
from tests.rules.others import registered


def lines_of(path, **options):
    weights = parameters()
    optimizer = Muon(weights, lr=0.1, weight_decay=0.25, diagnostics_every=2, diagnostics_file=str(path), **options)
    run(optimizer, weights, gradients(steps=2))
    start, line = map(json.loads, path.read_text().splitlines())
    return start, line


def test_options_that_rules_change_are_measured(tmp_path):
    with registered():
        start, line = lines_of(tmp_path / "d.jsonl", their_everything=True)
    assert start["options"]["muon"]["their_everything"] is True
    assert (line["muon_momentum"], line["muon_weight_decay"]) == (pytest.approx(0.82), 0.125)


def test_lines_without_rules_have_nothing_of_them(tmp_path):
    _, line = lines_of(tmp_path / "d.jsonl")
    assert not {"muon_momentum", "muon_weight_decay"} & line.keys()


def test_a_schedule_of_hf_muons_own_is_seen(tmp_path):
    _, line = lines_of(tmp_path / "d.jsonl", momentum_warmup=4, normalize="rows")
    assert line["muon_momentum"] == pytest.approx(0.85 + 0.1 / 4)
