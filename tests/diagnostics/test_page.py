"""`hf-muon report`: a page from a run's diagnostics, read as text."""

from __future__ import annotations

import html
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_muon import Muon
from hf_muon.diagnostics import charts
from hf_muon.diagnostics.metrics import FILE
from tests.diagnostics.pages import KINDS, OPTIONS, START, TITLES, Page, report, step_line, write


def test_numbers_are_those_of_the_file(tmp_path):
    write(tmp_path)
    result = report(tmp_path)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "muon_report.html").read_text()
    page = Page(text)
    assert page.titles == ["What it says", *TITLES]
    assert "no experiment with Muon is behind it" in text
    lines = page.lines
    assert lines["Loss"] == {"loss": {10: 1.0, 20: 0.5, 30: pytest.approx(1 / 3, rel=1e-4)}}
    assert lines["Learning rates"]["AdamW"][20] == 1e-4
    assert lines["Update RMS by kind"] == {
        html.escape(kind): {step: pytest.approx(mean) for step in (10, 20, 30)}
        for kind, mean in zip(KINDS, (0.3, 0.4), strict=True)
    }
    assert lines["Time share of the optimizer"]["optimizer step"][10] == 0.05
    assert lines["Relative update by kind"][html.escape(KINDS[0])][10] == pytest.approx(3e-4)
    assert lines["RMS of weights by kind"][html.escape(KINDS[1])] == {10: 2, 20: 2, 30: 2}
    assert lines["Relative update of AdamW"] == {"model.norm": {10: 5e-5, 20: 5e-5, 30: 5e-5}}
    (table,) = page.charts["Relative update by layer and kind"]
    assert (table["x"], table["y"]) == ([html.escape(kind) for kind in KINDS], [f"layer {i}" for i in range(3)])
    assert table["text"] == [["0.01", "0.02"], ["0.03", "0.04"], ["0.05", "0.06"]]
    ratios = [[math.log2(value / 3.5) for value in row] for row in ((1, 2), (3, 4), (5, 6))]
    assert table["z"] == [pytest.approx(row) for row in ratios]
    assert "rank 0 of 4: matrices that it orthogonalizes" in text
    facts = dict(zip(page.words[1::2], page.words[2::2], strict=False))
    assert facts == {
        "model": "Llama",
        "trained weights": "1,000, 90.0% with Muon",
        "watched steps": "3, from 10 to 30",
        "last loss": "training 0.3333 at step 30",
        "ranks": "4",
        "versions": "hf_muon 1, torch 2",
        "options of Muon": "lr=0.001, nesterov=true, adjust_lr_fn=match_rms_adamw",
        "options of AdamW": "betas=0.9|1",
    }


def test_logits_of_attentions_have_a_chart_where_they_were_measured(tmp_path):
    names = [f"model.layers.{k}.self_attn" for k in range(15)]
    steps = [
        {**step_line(step), "max_logit": {name: step + k for k, name in enumerate(names)}, "clipped_heads": 1}
        for step in (10, 20)
    ]
    steps[1]["max_logit"][names[14]] = None  # overflowed
    (tmp_path / FILE).write_text("\n".join(json.dumps(line) for line in (START, *steps)))
    assert report(tmp_path).exit_code == 0
    lines = Page((tmp_path / "muon_report.html").read_text()).lines["Largest attention logit"]
    assert lines == {"largest": {10: 24, 20: 33}}


def test_noise_stays_pale():
    figure = charts.heat_map("Title", {"": {("0", "a"): 1.0, ("0", "b"): 1.01, ("0", "c"): 0.99}})
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-1, 1)
    assert max(map(abs, figure.data[0].z[0])) < 0.02


def test_several_runs_side_by_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = {**START, "options": {**OPTIONS, "muon": {**OPTIONS["muon"], "lr": 0.5}}}
    write(tmp_path / "a")
    write(tmp_path / "b", steps=(10, 20), start=other, scale=4.0)
    assert report("a", "b").exit_code == 0
    page = Page((tmp_path / "muon_report.html").read_text())
    assert page.lines["Loss"] == {
        "loss · a": {10: 1.0, 20: 0.5, 30: pytest.approx(1 / 3, rel=1e-4)},
        "loss · b": {10: 1.0, 20: 0.5},
    }
    assert page.lines["Relative update"]["b"][10] == pytest.approx(4 * page.lines["Relative update"]["a"][10])
    one, other = page.panels("Relative update by kind")
    assert list(one) == list(other) == [html.escape(kind) for kind in KINDS]
    assert list(other[KINDS[0]].values()) == pytest.approx([4 * y for x, y in one[KINDS[0]].items() if x < 30])
    maps = page.charts["Relative update by layer and kind"]
    assert {table["coloraxis"] for table in maps} == {"coloraxis"}
    assert maps[1]["z"][0][0] == pytest.approx(maps[0]["z"][0][0] + 2)
    words = page.words
    assert words[0].startswith("a 0.3333 at step 30, b 0.5 at step 20")
    where = words.index("Muon: lr")
    assert words[where + 1 : where + 3] == ["0.001", "0.5"]
    assert words[words.index("options of Muon") + 1] == "nesterov=true, adjust_lr_fn=match_rms_adamw"


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
    assert report(tmp_path).exit_code == 0
    page = Page((tmp_path / "muon_report.html").read_text())
    kinds = ["mlp.gate_up_proj[0]", "mlp.gate_up_proj[1]"]
    assert list(page.lines["Update RMS by kind"]) == kinds
    (table,) = page.charts["Relative update by layer and kind"]
    assert (table["x"], table["y"]) == (kinds, ["layer 0", "layer 1"])


def test_the_page_needs_nothing_else_and_names_cannot_break_out(tmp_path):
    write(tmp_path)
    report(tmp_path)
    page = Page((tmp_path / "muon_report.html").read_text())
    assert page.links == []
    assert "b" not in page.tags
    # Each title of a chart has a script that draws it.
    assert list(page.charts) == page.titles[1:]


def test_of_steps_taken_again_the_later_ones_count(tmp_path):
    """Report a run that was killed after step 30 and resumed from step 10."""
    write(tmp_path, extra=[START, step_line(20, 2.0), step_line(30, 3.0), {"event": "log", "step": 20, "loss": 7.0}])
    report(tmp_path)
    lines = Page((tmp_path / "muon_report.html").read_text()).lines
    assert lines["Update RMS by kind"][KINDS[0]] == {10: 0.3, 20: 0.6, 30: 0.9}
    assert lines["Loss"]["loss"][20] == 7


def test_long_runs_are_thinned_by_means(tmp_path):
    write(tmp_path, steps=range(1, 2001))
    report(tmp_path)
    loss = Page((tmp_path / "muon_report.html").read_text()).lines["Loss"]["loss"]
    assert len(loss) == 500
    assert loss[8] == pytest.approx(sum(10 / step for step in range(5, 9)) / 4, rel=1e-4)
    assert max(loss) == 2000


def test_half_a_line_that_a_killed_run_has_left_is_no_error(tmp_path):
    file = write(tmp_path)
    report(tmp_path)
    charts_of = [Page((tmp_path / "muon_report.html").read_text()).charts]
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([first, '{"event":"step","st\n', *rest, '{"event":"lo']))
    result = report(tmp_path)
    assert result.exit_code == 0, result.output
    charts_of.append(Page((tmp_path / "muon_report.html").read_text()).charts)
    assert charts_of[0] == charts_of[1]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"event":"dance"}',
        '{"event":"step"}',
        '{"event":"step","step":40,"update_rms":[1]}',
        '{"event":"step","step":40,"update_rms":["x",1,1,1,1,1,1]}',
        '{"event":"log","step":"often"}',
        '{"event":"start","parameters":[{}]}',
        '{"event":"start","parameters":[],"model":3}',
        '{"event":"start","parameters":[],"options":"x"}',
    ],
)
def test_a_file_that_is_not_ours_is_one_plain_error(tmp_path, line):
    write(tmp_path).open("a").write(line + "\n")
    result = report(tmp_path)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert f"{FILE}, line 8, is no line of metrics (" in result.stderr


def test_refused(tmp_path):
    file = tmp_path / "run" / FILE
    for path, message in (
        ("lost", f"does not exist. Name a run's output directory, or its {FILE}"),
        (".", f"holds no {FILE}. A run writes it with HF_MUON_DIAGNOSTICS_EVERY=50"),
    ):
        result = report(tmp_path / path)
        assert (result.exit_code, type(result.exception)) == (1, SystemExit)
        assert message in result.stderr
    file.parent.mkdir()
    file.write_text("")
    message = "holds no watched step yet. The first comes after as many steps as diagnostics_every says"
    assert message in report(file.parent).stderr
    write(file.parent)
    for out in (tmp_path / "no" / "page.html", tmp_path):
        result = report(file, "--out", out)
        assert (result.exit_code, type(result.exception)) == (1, SystemExit)
        assert "directory" in result.stderr


def test_as_a_process(tmp_path):
    write(tmp_path)
    program = Path(sys.executable).with_name("hf-muon")
    words = [program, "report", tmp_path, "--out", tmp_path / "page.html"]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert f"{tmp_path / 'page.html'} (" in process.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
