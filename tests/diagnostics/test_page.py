"""`hf-muon report`: a page from a run's diagnostics, read as text."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn

from hf_muon import Muon
from hf_muon.diagnostics import charts
from hf_muon.diagnostics.metrics import FILE
from tests.diagnostics.pages import KINDS, OPTIONS, START, TITLES, Page, report, step_line, write


def page_of(folder):
    """Report a run that can be reported, and return its page."""
    result = report(folder)
    assert result.exit_code == 0, result.output
    return Page(folder / "muon_report.html")


@pytest.mark.promise("report")
def test_numbers_are_those_of_the_file(tmp_path, golden):
    write(tmp_path / "run")
    result = report(tmp_path / "run", "--out", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.titles == ["What it says", *TITLES]
    said = re.sub(r"\(\d+ kB", "(... kB", result.output)
    golden("report/one_run", f"{said}\n{page.text}", FOLDER=tmp_path)
    # It needs nothing else, and names cannot break out.
    assert page.links == []
    assert "b" not in page.tags
    assert list(page.charts) == page.titles[1:]


def test_logits_of_attentions_have_a_chart_where_they_were_measured(tmp_path):
    names = [f"model.layers.{k}.self_attn" for k in range(15)]
    steps = [
        {**step_line(step), "max_logit": {name: step + k for k, name in enumerate(names)}, "clipped_heads": 1}
        for step in (10, 20)
    ]
    steps[1]["max_logit"][names[14]] = None  # overflowed
    (tmp_path / FILE).write_text("\n".join(json.dumps(line) for line in (START, *steps)))
    assert page_of(tmp_path).line("Largest attention logit", "largest") == {10: 24, 20: 33}


def test_noise_stays_pale():
    figure = charts.heat_map("Title", {"": {("0", "a"): 1.0, ("0", "b"): 1.01, ("0", "c"): 0.99}})
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-1, 1)
    assert max(map(abs, figure.data[0].z[0])) < 0.02


def test_several_runs_side_by_side(tmp_path, monkeypatch, golden):
    """Compare with a run whose updates are four times larger: two more in the logarithm that colours a cell."""
    monkeypatch.chdir(tmp_path)
    other = {**START, "options": {**OPTIONS, "muon": {**OPTIONS["muon"], "lr": 0.5}}}
    write(tmp_path / "a")
    write(tmp_path / "b", steps=(10, 20), start=other, scale=4.0)
    assert report("a", "b").exit_code == 0
    page = Page(tmp_path / "muon_report.html")
    golden("report/two_runs", page.text)
    one, two = page.charts["Relative update by layer and kind"]
    assert two["z"][0][0] == pytest.approx(one["z"][0][0] + 2)


@pytest.mark.extended
def test_a_hundred_thousand_lines_make_a_page_that_a_browser_opens(tmp_path):
    write(tmp_path, steps=range(1, 50_001))
    assert report(tmp_path).exit_code == 0
    assert (tmp_path / "muon_report.html").stat().st_size < 10e6


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


def test_of_steps_taken_again_the_later_ones_count(tmp_path):
    """Report a run that was killed after step 30 and resumed from step 10."""
    write(tmp_path, extra=[START, step_line(20, 2.0), step_line(30, 3.0), {"event": "log", "step": 20, "loss": 7.0}])
    page = page_of(tmp_path)
    assert page.line("Update RMS by kind", KINDS[0]) == {10: 0.3, 20: 0.6, 30: 0.9}
    assert page.line("Loss", "loss")[20] == 7


def test_long_runs_are_thinned_by_means(tmp_path):
    write(tmp_path, steps=range(1, 2001))
    loss = page_of(tmp_path).line("Loss", "loss")
    assert len(loss) == 500
    assert loss[8] == pytest.approx(sum(10 / step for step in range(5, 9)) / 4, rel=1e-4)
    assert max(loss) == 2000


def test_half_a_line_that_a_killed_run_has_left_is_no_error(tmp_path):
    file = write(tmp_path)
    whole = page_of(tmp_path).text
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([first, '{"event":"step","st\n', *rest, '{"event":"lo']))
    assert page_of(tmp_path).text == whole


@pytest.mark.parametrize("out", ["no/page.html", "run"])
def test_a_page_that_cannot_be_written(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run")
    files = sorted(tmp_path.rglob("*"))
    result = report("run", "--out", out)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "directory" in result.stderr
    assert sorted(tmp_path.rglob("*")) == files
