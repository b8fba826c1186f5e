"""A file of metrics, `hf-muon report` of it, and its page as text."""

from __future__ import annotations

import json
from html.parser import HTMLParser

from hf_muon.diagnostics.metrics import FILE
from tests.cli.calls import call

KINDS = ("self_attn.q_proj", "mlp.up_proj</script><b>")
NAMES = [f"model.layers.{layer}.{kind}.weight" for layer in range(3) for kind in KINDS]
PARAMETERS = {**{name: [4, 6] for name in NAMES}, "model.norm.weight": []}


def step_line(step, scale=1.0):
    values = [scale * (1 + i) / 10 for i in range(len(NAMES))]
    return {
        "event": "step",
        "run": "a",
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
    "run": "a",
    "after": 0,
    "versions": {"hf_muon": "1", "torch": "2"},
    "ranks": 4,
    "every": 10,
    "model": {"class": "Llama", "muon_weights": 900, "adamw_weights": 100},
}


def lines_of_run(steps=(10, 20, 30), scale=1.0, options=OPTIONS, **start):
    """Return the lines of a run or of a part of one, with a loss of each step."""
    lines = [{**START, **start}]
    for step in steps:
        lines += [step_line(step, scale), {"event": "log", "step": step, "loss": 10 / step, "grad_norm": 1.0}]
    if steps:
        lines[1] |= {"options": options, "parameters": PARAMETERS}
    return [{**line, "run": lines[0]["run"]} for line in lines]


def write(folder, *args, **kwargs):
    return write_lines(folder, lines_of_run(*args, **kwargs))


def write_lines(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / FILE


def report(*arguments):
    return call("report", *arguments)


class Page(HTMLParser):
    """A page as text: its words, the lines and cells of its charts; and every address that it would load."""

    def __init__(self, file):
        super().__init__()
        self.titles, self.charts, self.links, self.tags, self.shown = [], {}, [], [], []
        self._tag = ""
        self.feed(file.read_text())

    @property
    def text(self):
        return "\n".join(self.shown)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._tag = tag
        self.links += [value for key, value in attributes if key in ("src", "href", "srcset", "data")]

    def handle_data(self, data):
        if self._tag == "script" and "Plotly.newPlot(" in data and self.titles:
            start = data.index("[", data.index("Plotly.newPlot("))
            traces, _ = json.JSONDecoder().raw_decode(data, start)
            self.charts[self.titles[-1]] = traces
            for trace in traces:
                self.shown += _trace(trace)
        elif self._tag not in ("script", "style") and data.strip():
            self.titles += [data] if self._tag == "h2" else []
            self.shown.append({"h1": f"# {data}", "h2": f"\n## {data}", "th": f"{data}:"}.get(self._tag, data))

    def handle_endtag(self, tag):
        self._tag = ""

    def line(self, title, name):
        """Return the points of a line of a chart."""
        (trace,) = (trace for trace in self.charts[title] if trace["name"] == name)
        return dict(zip(trace["x"], trace["y"], strict=True))


def _trace(trace):
    """Return a line of a chart with its points, or the rows of a table with their cells and colours."""
    if trace["type"] != "heatmap":
        points = " ".join(f"{x}:{y}" for x, y in zip(trace["x"], trace["y"], strict=True))
        return [f"{trace.get('xaxis', 'x')} {trace['name']}  {points}"]
    shown = [f"{trace.get('xaxis', 'x')} {trace['coloraxis']} {', '.join(trace['x'])}"]
    for row, texts, values in zip(trace["y"], trace["text"], trace["z"], strict=True):
        shown.append(f"{row}: {', '.join(f'{text} ({z:.3f})' for text, z in zip(texts, values, strict=True))}")
    return shown
