"""`hf-muon report`: the data of its pictures, read from the page as text."""

from __future__ import annotations

import argparse
import json
import math
import sys
from html.parser import HTMLParser

import pytest

from hf_muon.cli.report import PAGE, add_parser
from hf_muon.diagnostics.log import FILE

NAMES = [f"model.layers.{layer}.{kind}.weight" for layer in range(2) for kind in ("q_proj", "k_proj", "o_proj")]
OTHERS = ["</script><b>pooler</b>.weight", "model.norm.weight"]
START = {"event": "start", "after": 0}


def lines_of_step(step, scale=1.0):
    """Return the lines of a step: updates grow from name to name, one matrix is zero, another is on other ranks."""
    values = [scale * value for value in (1e-4, 1e-3, 1e-2, 2e-3, 4e-3)]
    measured = {
        "relative_update": [*values, 0.0, 5e-3, None],
        "update_rms": [0.1, 0.2, 0.3, 0.2, 0.1, 0.2, 0.2, None],
        "weight_rms": [*[2.0] * 6, None, None],
        "momentum_rms": [*[1e-3] * 6, None, None],
        "orthogonality_error": [0.2, *[None] * 7],
        "adamw_update_rms": [*[None] * 7, 0.7],
        "adamw_weight_rms": [*[None] * 7, 1.0],
        "adamw_relative_update": [*[None] * 7, 5e-5],
    }
    log = {"event": "log", "step": step, "loss": 10 / step, "grad_norm": 1.5, "learning_rate": 1e-3}
    return [{"event": "step", "step": step, "muon_lr": 1e-3 / step, "adamw_lr": 2e-3 / step, **measured}, log]


def lines_of_run(steps=(10, 20, 30), scale=1.0, after=0):
    lines = [line for step in steps for line in lines_of_step(step, scale)]
    if lines:
        lines[0] |= {"parameters": {name: [] if name == OTHERS[1] else [4, 6] for name in NAMES + OTHERS}}
    return [{**START, "after": after}, *lines]


def write(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / FILE


def report(*words):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["report", *map(str, words)])
    return arguments.run(arguments)


class Page(HTMLParser):
    """The data and layouts of a page's pictures; its tags, and every address that it would load."""

    def __init__(self, file):
        super().__init__()
        self.pictures, self.links, self.tags = [], [], []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for key, value in attributes if key in ("src", "href", "srcset", "data")]

    def handle_data(self, data):
        if self.lasttag == "script" and "Plotly.newPlot(" in data and "PlotlyConfig" not in data[:2000]:
            decoder, start = json.JSONDecoder(), data.index("[", data.index("Plotly.newPlot("))
            traces, end = decoder.raw_decode(data, start)
            layout, _ = decoder.raw_decode(data, data.index("{", end))
            self.pictures.append((traces, layout))

    def lines(self, number):
        """Return the lines of a picture by name, as points."""
        return {trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in self.pictures[number][0]}


def page_of(folder):
    assert report(folder) == 0
    return Page(folder / PAGE)


@pytest.mark.promise("report")
def test_three_pictures_have_the_numbers_of_the_file(tmp_path, capsys):
    evaluation = {"event": "log", "step": 30, "eval_b_loss": 4.0, "eval_runtime": 2.0}
    write(tmp_path / "run", [*lines_of_run(), evaluation, {"event": "log", "step": 30, "train_loss": 5.0}])
    assert report(tmp_path / "run", "--out", tmp_path / "page.html") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'} (3 measured steps)\n"
    page = Page(tmp_path / "page.html")
    # It needs nothing else, and names cannot break out.
    assert (page.links, "b" in page.tags, len(page.pictures)) == ([], False, 3)

    assert page.lines(0) == {
        "loss": {10: 1, 20: 0.5, 30: pytest.approx(1 / 3)},
        "eval_b_loss": {30: 4},
        "rate of Muon": {step: pytest.approx(1e-3 / step) for step in (10, 20, 30)},
        "rate of AdamW": {step: pytest.approx(2e-3 / step) for step in (10, 20, 30)},
    }
    assert [trace["yaxis"] for trace in page.pictures[0][0]] == ["y", "y", "y2", "y2"]

    ((table,), _) = page.pictures[1]
    assert table["x"] == [10, 20, 30]
    assert table["y"] == ["model.layers.0", "model.layers.1", "&lt;/script&gt;&lt;b&gt;pooler&lt;/b&gt;.weight"]
    medians = [-3, math.log10(math.sqrt(2e-3 * 4e-3)), math.log10(5e-3)]
    assert table["z"] == [[pytest.approx(value)] * 3 for value in medians]
    assert [row[0] for row in table["text"]] == ["0.001", "0.00283", "0.005"]
    assert (table["zmin"], table["zmax"]) == (pytest.approx(-3), pytest.approx(medians[2]))
    bar = table["colorbar"]
    ticks = dict(zip(bar["ticktext"], bar["tickvals"], strict=True))
    assert {"1e-03", "2e-03", "5e-03"} < ticks.keys()
    assert all(math.log10(float(text)) == pytest.approx(value) for text, value in ticks.items())

    at_all = dict.fromkeys((10, 20, 30))
    assert page.lines(2) == {
        "norm of the gradient, before clipping": dict.fromkeys(at_all, 1.5),
        "RMS of weights": dict.fromkeys(at_all, 2),
        "RMS of momentum": dict.fromkeys(at_all, 1e-3),
        "RMS of update": dict.fromkeys(at_all, 0.2),
        "RMS of weights of AdamW": dict.fromkeys(at_all, 1),
        "RMS of update of AdamW": dict.fromkeys(at_all, 0.7),
    }
    assert page.pictures[2][1]["yaxis"]["type"] == "log"


def test_noise_stays_pale(tmp_path):
    """Expect the scale to span a factor of four."""
    start, step, *_ = lines_of_run((10,))
    write(tmp_path, [start, {**step, "relative_update": [1e-3] * 6 + [None] * 2}])
    ((table,), _) = page_of(tmp_path).pictures[1]
    assert (table["zmin"], table["zmax"]) == (pytest.approx(-3 - math.log10(2)), pytest.approx(-3 + math.log10(2)))


def test_a_resumed_run_is_one_and_half_a_line_is_no_error(tmp_path):
    """Report a run that was killed after step 30 in the midst of a line, and has come from step 10 to step 20."""
    not_finite = {"event": "log", "step": 30, "loss": None}
    file = write(tmp_path, [*lines_of_run(), not_finite, *lines_of_run((20,), scale=2.0, after=10)])
    page = page_of(tmp_path)
    assert page.lines(0)["loss"] == {10: 1, 20: 0.5}
    assert page.pictures[1][0][0]["z"][0] == [pytest.approx(-3), pytest.approx(-3 + math.log10(2))]
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([first, '{"event":"step","st\n', *rest, '{"event":"lo']))
    again = page_of(tmp_path)
    assert again.lines(0) == page.lines(0)
    assert again.pictures[1][0] == page.pictures[1][0]


def test_of_several_runs_in_a_file_the_last_is_shown_and_a_loss_that_is_not_finite_is_a_gap(tmp_path):
    early = {"event": "log", "step": 5, "loss": None}
    start, *steps = lines_of_run()
    write(tmp_path, [*lines_of_run((10, 20, 300), scale=9.0), start, early, *steps])
    assert page_of(tmp_path).lines(0)["loss"] == {5: None, 10: 1, 20: 0.5, 30: pytest.approx(1 / 3)}


def test_runs_without_metrics(tmp_path, monkeypatch):
    for path in (tmp_path, tmp_path / "lost"):
        with pytest.raises(ValueError, match=r"HF_MUON_DIAGNOSTICS_EVERY=50.*\[no-metrics\]"):
            report(path)
    file = write(tmp_path, [*lines_of_run(), START, {"event": "log", "step": 5, "loss": 2.0}])
    for text in (file.read_text(), "", "[]\nno metrics\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"\[no-watched-step\]"):
            report(tmp_path)
    write(tmp_path, lines_of_run())
    monkeypatch.setitem(sys.modules, "plotly.subplots", None)
    with pytest.raises(RuntimeError, match=r"needs plotly.*'hf_muon\[report\]' \[package-missing\]"):
        report(tmp_path)


@pytest.mark.parametrize("out", ["no/page.html", "run", "."])
def test_a_page_that_cannot_be_written(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", lines_of_run())
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="directory"):
        report("run", "--out", out)
    assert sorted(tmp_path.rglob("*")) == files
