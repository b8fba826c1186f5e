"""What `hf-muon report` says of a run, where the cause is known."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from hf_muon.diagnostics.findings import diagnose
from hf_muon.diagnostics.metrics import FILE
from hf_muon.diagnostics.run_file import read_run

KINDS = ("q", "k", "v", "up")


def losses(count=200, noise=0.02, seed=0):
    """Return a noisy loss that falls from 4 to 2, by step."""
    numbers = random.Random(seed)
    return {10 * i: 2 + 2 * math.exp(-i / 40) + numbers.gauss(0, noise) for i in range(1, count + 1)}


def run_with(tmp_path, loss, update=1e-3, rate=0.02, **step_of):
    """Return a run whose matrices all have one relative update."""
    names = [f"layers.{layer}.{kind}" for layer in range(6) for kind in KINDS]
    parameters = [{"name": n, "layer": i // 4, "kind": KINDS[i % 4], "shape": [2, 2]} for i, n in enumerate(names)]
    lines = [{"event": "start", "parameters": parameters}]
    for step, value in loss.items():
        line = {"event": "step", "step": step, "muon_lr": rate, "relative_update": [update] * len(names), **step_of}
        lines += [line, {"event": "log", "step": step, "loss": value}]
    file = tmp_path / FILE
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(file)


@pytest.mark.parametrize(
    ("update", "level", "text"),
    [
        (1e-3, "good", "The learning rate is usual: a step moves a matrix by 0.1 % of its size (median, while the"),
        (0.05, "look", "The learning rate is high: a step moves a matrix by 5 % of its size"),
        (1e-6, "look", "The learning rate is low: a step moves a matrix by 0.0001 % of its size"),
    ],
)
def test_of_the_rate(tmp_path, update, level, text):
    (finding,) = diagnose(run_with(tmp_path, losses(), update=update))
    assert finding.level == level
    assert finding.text.startswith(text)
    assert ("try 0.0067" in finding.text, "try 0.06" in finding.text) == (update == 0.05, update == 1e-6)


def test_of_the_loss(tmp_path):
    for seed in range(20):
        assert [finding.level for finding in diagnose(run_with(tmp_path, losses(seed=seed)))] == ["good"]
    _, finding = diagnose(run_with(tmp_path, {s: v + (1.0 if s > 1500 else 0) for s, v in losses().items()}))
    assert finding.level == "bad"
    assert finding.text.startswith("The loss rose from 2.")
    assert "to 3." in finding.text
    _, finding = diagnose(run_with(tmp_path, {step: 3 + 0.001 * (value - 3) for step, value in losses().items()}))
    assert finding.text.startswith("The loss has hardly fallen: 3.0")
    _, finding = diagnose(run_with(tmp_path, losses() | {700: None, 900: None}))
    assert (finding.level, finding.text) == ("bad", "The loss was not finite at step 700, 900.")


def test_of_the_orthogonality(tmp_path):
    assert len(diagnose(run_with(tmp_path, losses(), orthogonality_error=[0.2] * 23 + [None]))) == 1
    _, finding = diagnose(run_with(tmp_path, losses(), orthogonality_error=[0.6] * 24))
    assert finding.text.startswith("Orthogonality error 0.60 in the median")


def test_steps_at_a_small_rate_do_not_count(tmp_path):
    """Warm up, and decay to zero: updates are small there, and say nothing about the rate."""
    file = tmp_path / FILE
    names = ["layers.0.q", "layers.1.q"]
    parameters = [{"name": name, "layer": i, "kind": "q", "shape": [2, 2]} for i, name in enumerate(names)]
    lines = [{"event": "start", "parameters": parameters}]
    for step in range(1, 101):
        rate = 0.02 * min(step / 10, (100 - step) / 90)
        lines.append({"event": "step", "step": step, "muon_lr": rate, "relative_update": [rate / 20, rate / 20]})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (finding,) = diagnose(read_run(file))
    assert finding.level == "good"
    high = [0.02 * min(step / 10, (100 - step) / 90) for step in range(5, 56)]
    assert f"by {100 * statistics.median(high) / 20:.2g} % of its size" in finding.text
