"""`hf-muon report`: a page from a run's diagnostics, read as text."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
from torch import nn

from hf_muon import Muon
from hf_muon.diagnostics import charts
from hf_muon.diagnostics.findings import diagnose
from hf_muon.diagnostics.metrics import FILE
from hf_muon.diagnostics.run_file import read_run
from tests.diagnostics.pages import KINDS, OPTIONS, START, Page, lines_of_run, report, write, write_lines


def page_of(folder):
    """Report a run that can be reported, and return its page."""
    result = report(folder)
    assert result.exit_code == 0, result.stderr
    return Page(folder / "muon_report.html")


@pytest.mark.promise("report")
def test_numbers_are_those_of_the_file(tmp_path, golden):
    write(tmp_path / "run")
    result = report(tmp_path / "run", "--out", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    said = re.sub(r"\(\d+ kB", "(... kB", result.stdout)
    golden("report/one_run", f"{said}\n{page.text}", FOLDER=tmp_path)
    # It needs nothing else, and names cannot break out.
    assert (page.links, "b" in page.tags) == ([], False)
    assert list(page.charts) == page.titles[1:]


def test_logits_of_attentions_have_a_chart_where_they_were_measured(tmp_path):
    names = [f"model.layers.{k}.self_attn" for k in range(15)]
    logits = [{name: step + k for k, name in enumerate(names)} for step in (10, 20)]
    logits[1][names[14]] = None  # overflowed
    lines = lines_of_run((10, 20))
    for line, own in zip((line for line in lines if line["event"] == "step"), logits, strict=True):
        line |= {"max_logit": own, "clipped_heads": 1}
    write_lines(tmp_path, lines)
    assert page_of(tmp_path).line("Largest attention logit", "largest") == {10: 24, 20: 33}


def test_noise_stays_pale():
    figure = charts.heat_map("Title", {"": {("0", "a"): 1.0, ("0", "b"): 1.01, ("0", "c"): 0.99}})
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-1, 1)
    assert max(map(abs, figure.data[0].z[0])) < 0.02


def test_several_runs_side_by_side(tmp_path, monkeypatch, golden):
    """Compare with a run whose updates are four times larger: two more in the logarithm that colours a cell."""
    monkeypatch.chdir(tmp_path)
    other = {**OPTIONS, "muon": {**OPTIONS["muon"], "lr": 0.5}}
    write(tmp_path / "a")
    write(tmp_path / "b", steps=(10, 20), options=other, scale=4.0)
    assert report("a", "b").exit_code == 0
    page = Page(tmp_path / "muon_report.html")
    golden("report/two_runs", page.text)
    one, two = page.charts["Relative update by layer and kind"]
    assert two["z"][0][0] == pytest.approx(one["z"][0][0] + 2)


def test_parts_of_a_weight_are_kinds_of_their_own(tmp_path):
    named = [(f"model.layers.{i}.mlp.gate_up_proj.weight", nn.Parameter(torch.randn(8, 6))) for i in range(2)]
    options = {"diagnostics_every": 1, "diagnostics_file": str(tmp_path / FILE)}
    optimizer = Muon([{"params": named, "views": ["rows 4+4"] * 2}], **options)
    for _, param in named:
        param.grad = torch.randn_like(param)
    optimizer.step()
    page = page_of(tmp_path)
    kinds = ["mlp.gate_up_proj[0]", "mlp.gate_up_proj[1]"]
    assert [trace["name"] for trace in page.charts["Update RMS by kind"]] == kinds
    (table,) = page.charts["Relative update by layer and kind"]
    assert (table["x"], table["y"]) == (kinds, ["layer 0", "layer 1"])


def test_a_resumed_run_is_one_and_half_a_line_is_no_error(tmp_path):
    """Report a run that was killed after step 30 in the midst of a line, and has come from step 10 to step 20."""
    not_finite = {"event": "log", "run": "a", "step": 30, "loss": None}
    again = lines_of_run((20,), scale=2.0, run="b", after=10)
    file = write_lines(tmp_path, [*lines_of_run(), not_finite, *again])
    page = page_of(tmp_path)
    assert page.line("Update RMS by kind", KINDS[0]) == {10: 0.3, 20: 0.6}
    assert page.line("Loss", "loss") == {10: 1, 20: 0.5}
    assert not re.search("not finite|run in its file", page.text)
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([first, '{"event":"step","st\n', *rest, '{"event":"lo']))
    assert page_of(tmp_path).text == page.text


def test_of_several_runs_in_a_file_the_last_watched_one_is_shown(tmp_path):
    """Report a run that diverged and was resumed, one from scratch at another rate, and one without a watched step."""
    diverged = lines_of_run((10, 20, 300), scale=9.0)
    resumed = lines_of_run((310,), scale=9.0, run="b", after=300)
    early_loss = {"event": "log", "run": "c", "step": 5, "loss": 2.0}
    start, *steps = lines_of_run(run="c")
    file = write_lines(tmp_path, [*diverged, *resumed, start, early_loss, *steps, *lines_of_run((), run="d")])
    page = page_of(tmp_path)
    assert "run in its file:\n2 of 3; the others: a|b, d" in page.text
    assert page.line("Loss", "loss") == {5: 2, 10: 1, 20: 0.5, 30: pytest.approx(10 / 30, rel=1e-4)}
    assert list(page.line("Update RMS by kind", KINDS[0])) == [10, 20, 30]
    # The page of another one, as docs/command-line.md says.
    chosen = [line for line in file.read_text().splitlines(keepends=True) if re.search('"(a|b)"', line)]
    (tmp_path / "first.jsonl").write_text("".join(chosen))
    report(tmp_path / "first.jsonl", "--out", tmp_path / "first.html")
    assert list(Page(tmp_path / "first.html").line("Loss", "loss")) == [10, 20, 300, 310]


def test_lines_of_two_runs_at_a_time_are_told_apart(tmp_path):
    one, two = lines_of_run(), lines_of_run(scale=4.0, run="b")
    write_lines(tmp_path, [line for pair in zip(one, two, strict=True) for line in pair])
    assert page_of(tmp_path).line("Update RMS by kind", KINDS[0]) == {10: 1.2, 20: 1.2, 30: 1.2}


def test_long_runs_are_thinned_by_means(tmp_path):
    write(tmp_path, steps=range(1, 2001))
    loss = page_of(tmp_path).line("Loss", "loss")
    assert len(loss) == 500
    assert loss[8] == pytest.approx(sum(10 / step for step in range(5, 9)) / 4, rel=1e-4)
    assert max(loss) == 2000


@pytest.mark.parametrize("out", ["no/page.html", "run", "."])
def test_a_page_that_cannot_be_written(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run")
    files = sorted(tmp_path.rglob("*"))
    result = report("run", "--out", out)
    assert result.exit_code == 1
    assert "directory" in result.stderr
    assert sorted(tmp_path.rglob("*")) == files


# --- what the page says of a run, where the cause is known


def losses(seed=0):
    """Return a noisy loss that falls from 4 to 2, by step."""
    noise = random.Random(seed)
    return {10 * i: 2 + 2 * math.exp(-i / 40) + noise.gauss(0, 0.02) for i in range(1, 201)}


def findings(folder, loss, rate=lambda step: 0.02, update=1 / 20, **step_of):
    """Return what is said of a run whose matrices all move by a part of the rate."""
    names = {"options": {}, "parameters": {f"layers.{i}.q": [2, 2] for i in range(24)}}
    lines = [START]
    for step, value in loss.items():
        own = {"muon_lr": rate(step), "relative_update": [rate(step) * update] * 24, **step_of, **names}
        lines += [{"event": "step", "step": step, **own}, {"event": "log", "step": step, "loss": value}]
    return diagnose(read_run(write_lines(folder, [{**line, "run": "a"} for line in lines])))


def test_findings(tmp_path, golden):
    fine, warmed = losses(), lambda step: 0.02 * min(step / 200, (2000 - step) / 1800)
    runs = {
        "usual": findings(tmp_path, fine),
        "updates of 5 %": findings(tmp_path, fine, update=2.5),
        "updates of 0.0001 %": findings(tmp_path, fine, update=5e-5),
        "warm-up and decay to zero, whose small updates do not count": findings(tmp_path, fine, warmed),
        "the loss jumps": findings(tmp_path, {step: loss + (step > 1500) for step, loss in fine.items()}),
        "the loss stays": findings(tmp_path, {step: 3 + 0.001 * (loss - 3) for step, loss in fine.items()}),
        "no finite loss": findings(tmp_path, fine | {700: None, 900: None}),
        "usual errors": findings(tmp_path, fine, orthogonality_error=[0.2] * 23 + [None]),
        "large errors": findings(tmp_path, fine, orthogonality_error=[0.6] * 24),
    }
    lines = [f"{name}\n" + "".join(f"  {f.level}: {f.text}\n" for f in found) for name, found in runs.items()]
    golden("report/findings", "".join(lines))
    for seed in range(1, 20):
        assert [finding.level for finding in findings(tmp_path, losses(seed))] == ["good"]
