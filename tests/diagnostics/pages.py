"""A file of metrics, `hf-muon report` of it, and its page as text."""

from __future__ import annotations

import json
from html.parser import HTMLParser

from typer.testing import CliRunner

from hf_muon.cli.app import app
from hf_muon.diagnostics.metrics import FILE

KINDS = ("self_attn.q_proj", "mlp.up_proj</script><b>")
NAMES = [f"model.layers.{layer}.{kind}.weight" for layer in range(3) for kind in KINDS]
PARAMETERS = [
    *({"name": n, "layer": i // 2, "kind": KINDS[i % 2], "shape": [4, 6]} for i, n in enumerate(NAMES)),
    {"name": "model.norm.weight", "layer": None, "kind": "model.norm", "shape": []},
]


TITLES = [
    "Loss",
    "Learning rates",
    "Gradient norm",
    "Time share of the optimizer",
    "Relative update by kind",
    "Relative update by layer and kind",
    "Relative update of AdamW",
    "RMS of weights by kind",
    "Update RMS by kind",
    "Momentum by kind",
    "Orthogonality error by kind",
    "Stable rank by kind",
]


def step_line(step, scale=1.0):
    values = [scale * (1 + i) / 10 for i in range(len(NAMES))]
    return {
        "event": "step",
        "step": step,
        "muon_lr": 1e-3 / step,
        "adamw_lr": 2e-3 / step,
        "step_ms": 100.0,
        "optimizer_ms": 5.0,
        "time_share": 0.05,
        **{measure: [*values, None] for measure in ("update_rms", "momentum_rms")},
        "orthogonality_error": [*values[:2], *[None] * 5],
        "stable_rank": [*values[:2], *[None] * 5],
        "adamw_update_rms": [*[None] * 6, 0.7],
        "weight_rms": [*[2.0] * 6, None],
        "relative_update": [*(1e-3 * value for value in values), None],
        "adamw_relative_update": [*[None] * 6, 5e-5],
    }


OPTIONS = {
    "muon": {"lr": 1e-3, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"},
    "adamw": {"adamw_betas": [0.9, 1]},
}
START = {
    "event": "start",
    "versions": {"hf_muon": "1", "torch": "2"},
    "ranks": 4,
    "every": 10,
    "model": {"class": "Llama", "muon_weights": 900, "adamw_weights": 100},
    "options": OPTIONS,
    "parameters": PARAMETERS,
}


def write(folder, steps=(10, 20, 30), extra=(), start=START, scale=1.0):
    lines = [start]
    for step in steps:
        log = {"event": "log", "step": step, "loss": 10 / step, "grad_norm": 1.0}
        lines += [step_line(step, scale), log]
    folder.mkdir(exist_ok=True)
    file = folder / FILE
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *extra]))
    return file


def report(*arguments):
    return CliRunner().invoke(app, ["report", *(str(argument) for argument in arguments)])


class Page(HTMLParser):
    """The headings and charts of a page, and every address that it would load."""

    def __init__(self, text):
        super().__init__()
        self.titles, self.charts, self.links, self.tags, self.words = [], {}, [], [], []
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._tag = tag
        self.links += [value for key, value in attributes if key in ("src", "href", "srcset", "data")]

    def handle_data(self, data):
        if self._tag in ("li", "th", "td"):
            self.words.append(data)
        if self._tag == "h2" and data.strip():
            self.titles.append(data)
        elif self._tag == "script" and "Plotly.newPlot(" in data and self.titles:
            start = data.index("[", data.index("Plotly.newPlot("))
            self.charts[self.titles[-1]], _ = json.JSONDecoder().raw_decode(data, start)

    def handle_endtag(self, tag):
        self._tag = ""

    @property
    def lines(self):
        """The points of each line of each chart of a single panel."""
        return {
            title: {line["name"]: dict(zip(line["x"], line["y"], strict=True)) for line in chart}
            for title, chart in self.charts.items()
            if chart[0]["type"] == "scatter"
        }

    def panels(self, title):
        """The points of the lines of each panel of a chart, by the panel's axis."""
        found = {}
        for line in self.charts[title]:
            points = dict(zip(line["x"], line["y"], strict=True))
            found.setdefault(line.get("xaxis", "x"), {})[line["name"]] = points
        return list(found.values())
