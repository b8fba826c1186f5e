"""What `hf-muon report` says of a run, where the cause is known."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from hf_muon.diagnostics.findings import Spike, diagnose, outliers, spikes
from hf_muon.diagnostics.metrics import FILE
from hf_muon.diagnostics.run_file import read_run

KINDS = ("q", "k", "v", "up")


def losses(count=200, noise=0.02, seed=0):
    """Return a noisy loss that falls from 4 to 2, by step."""
    numbers = random.Random(seed)
    return {10 * i: 2 + 2 * math.exp(-i / 40) + numbers.gauss(0, noise) for i in range(1, count + 1)}


def run_with(tmp_path, loss, update=1e-3, rate=0.02, special=None, noise=0.0, **step_of):
    """Return a run whose matrices all have one relative update, but for some."""
    names = [f"layers.{layer}.{kind}" for layer in range(6) for kind in KINDS]
    parameters = [{"name": n, "layer": i // 4, "kind": KINDS[i % 4], "shape": [2, 2]} for i, n in enumerate(names)]
    numbers = random.Random(1)
    lines = [{"event": "start", "parameters": parameters}]
    for step, value in loss.items():
        updates = [(special or {}).get(name, update) * numbers.uniform(1 - noise, 1 + noise) for name in names]
        line = {"event": "step", "step": step, "muon_lr": rate, "relative_update": updates, **step_of}
        lines += [line, {"event": "log", "step": step, "loss": value}]
    file = tmp_path / FILE
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(file)


def levels(run):
    return {finding.level for finding in diagnose(run)}


def test_planted_spikes_are_all_and_the_only_ones():
    for seed in range(20):
        loss = losses(seed=seed)
        assert spikes(sorted(loss.items())) == []
        loss[500] += 1.5
        loss[510] += 2.5
        loss[520] += 0.9
        loss[1500] += 0.8
        first, second = spikes(sorted(loss.items()))
        assert (first.step, first.value, first.is_over) == (510, loss[510], True)
        assert first.usual == pytest.approx(2 + 2 * math.exp(-40 / 40), abs=0.1)
        assert (second.step, second.value, second.is_over) == (1500, loss[1500], True)


def test_a_loss_that_does_not_come_back():
    loss = {step: value + (1.0 if step > 1000 else 0) for step, value in losses().items()}
    (spike,) = spikes(sorted(loss.items()))
    assert not spike.is_over
    assert 1000 < spike.step <= 1200
    loss = {step: value + (1.0 if step > 1950 else 0) for step, value in losses().items()}
    (spike,) = spikes(sorted(loss.items()))
    assert isinstance(spike, Spike)
    assert not spike.is_over


def test_short_and_constant_losses_have_no_spikes():
    assert spikes([]) == []
    assert spikes([(1, 5.0), (2, 50.0)]) == []
    assert spikes([(step, 3.0) for step in range(100)]) == []


def test_outliers_are_those_that_differ_from_their_kind(tmp_path):
    special = {"layers.3.up": 8e-3, "layers.0.q": 1e-4, "layers.5.v": 2e-3}
    result = outliers(run_with(tmp_path, losses(), special=special, noise=0.2))
    assert [outlier.name for outlier in result] == ["layers.0.q", "layers.3.up"]
    assert [outlier.value for outlier in result] == pytest.approx([1e-4, 8e-3], rel=0.15)
    assert [outlier.usual for outlier in result] == pytest.approx([1e-3, 1e-3], rel=0.15)
    assert outliers(run_with(tmp_path, losses(), noise=0.2)) == []


def test_a_usual_rate_is_called_usual(tmp_path):
    (finding,) = diagnose(run_with(tmp_path, losses()))
    assert finding.level == "good"
    assert "a step moves a matrix by 0.1 % of its size" in finding.text


def test_too_high_says_why(tmp_path):
    (finding,) = diagnose(run_with(tmp_path, losses(), update=0.05))
    assert finding.level == "look"
    assert "moves a matrix by 5 % of its size" in finding.text
    loss = {step: value + (1.0 if step > 1000 else 0) for step, value in losses().items()}
    (finding,) = diagnose(run_with(tmp_path, loss, update=0.05))
    assert finding.level == "bad"
    assert finding.text.startswith("The learning rate looks too high: a step moves a matrix by 5 % of its size")
    assert "the loss rose from 2." in finding.text
    assert "Try 0.0067, or a longer warmup" in finding.text


def test_too_low_says_why(tmp_path):
    (finding,) = diagnose(run_with(tmp_path, losses(), update=1e-6))
    assert finding.level == "look"
    assert "by 0.0001 % of its size" in finding.text
    assert "all 2,000 steps together by at most 0.2 %" in finding.text
    flat = {step: 3 + 0.001 * (value - 3) for step, value in losses().items()}
    (finding,) = diagnose(run_with(tmp_path, flat, update=1e-6))
    assert finding.level == "bad"
    assert finding.text.startswith("The learning rate looks too low")
    assert "The loss has hardly fallen. Try 0.06" in finding.text


def test_a_loss_that_is_in_trouble_for_another_reason(tmp_path):
    loss = losses()
    for step in (500, 900, 1300):
        loss[step] += 1
    (finding,) = diagnose(run_with(tmp_path, loss))
    assert finding.level == "bad"
    assert "The loss spiked at step 500, 900, 1,300. Muon's updates are no reason for it" in finding.text
    loss[700] = None
    assert "not finite at step 700" in diagnose(run_with(tmp_path, loss))[0].text


def test_time_orthogonality_and_growth_are_looked_at(tmp_path):
    count = 24
    run = run_with(tmp_path, losses(), time_share=0.4, orthogonality_error=[0.2] * 23 + [None])
    assert [finding.text for finding in diagnose(run)[1:]] == [
        "The optimizer takes 40% of a training step. More tokens a step (batch, gradient accumulation) make that less."
    ]
    run = run_with(tmp_path, losses(), orthogonality_error=[0.6] * count)
    assert diagnose(run)[1].text.startswith("Orthogonality error 0.60 in the median")
    for rows, expected in (([1.0] * count, 1), ([0.5] * count, 2)):
        run = run_with(tmp_path, losses(), weight_rms=[1.0] * count)
        middle = run.rows[run.steps[100]][1]["weight_rms"]
        middle[:] = type(middle)("d", rows)
        assert len(diagnose(run)) == expected


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
