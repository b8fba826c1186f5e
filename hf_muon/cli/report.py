"""`hf-muon report`: write a page of a run's metrics."""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_muon.diagnostics.log import FILE
from hf_muon.integrations.archives import complete_or_absent

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PAGE = "muon_report.html"
# Measures in the picture of norms, and their names there.
_RMS = {
    "weight_rms": "weights",
    "momentum_rms": "momentum",
    "update_rms": "update",
    "adamw_weight_rms": "weights of AdamW",
    "adamw_update_rms": "update of AdamW",
}


class Metrics(NamedTuple):
    """The metrics of a run, by step."""

    logs: dict[int, dict[str, Any]]
    """What the Trainer logged; None for a number that was not finite."""
    steps: dict[int, dict[str, Any]]
    """Numbers of the measured steps, and each measure as a mapping by the names of parameters."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `hf-muon`."""
    about = "Write one HTML page of a run's metrics: loss and rates, relative updates by layer, norms."
    parser = commands.add_parser("report", help="write a page of a run's metrics", description=about)
    parser.add_argument("path", metavar="RUN", type=Path, help=f"output directory of a run, or its {FILE}")
    parser.add_argument("--out", type=Path, help=f"file of the page (default: {PAGE} beside the metrics)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        ValueError: no metrics of a run are there.
        RuntimeError: plotly is not installed.
        OSError: the page cannot be written.
    """
    path: Path = arguments.path
    metrics = read(path)
    try:
        text = render(metrics, f"Muon: {path.resolve().name if path.is_dir() else path.resolve().parent.name}")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"hf-muon report needs {error.name}, which is not installed here. Run: pip install 'hf_muon[report]' "
            "[package-missing]"
        ) from error
    target = arguments.out or (path if path.is_dir() else path.parent) / PAGE
    with complete_or_absent(target) as file:
        file.write_text(text, encoding="utf-8")
    print(f"{target} ({len(metrics.steps):,} measured steps)")
    return 0


def read(path: Path) -> Metrics:
    """Return the last run in a file of metrics, with the parts that it has resumed.

    Args:
        path: the run's output directory, or the file.

    Raises:
        ValueError: there is no file, or the run has no measured step.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path} is no folder with a {FILE}, and no such file. A run with Muon writes it with "
            'HF_MUON_DIAGNOSTICS_EVERY=50 in its environment, or with optim_args: "diagnostics_every=50" [no-metrics]'
        )
    metrics = Metrics({}, {})
    names: list[str] = []
    for text in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:  # half a line, left by a killed run
            continue
        event = line.pop("event", None) if isinstance(line, dict) else None
        if event == "start":
            # The steps after that one are made again.
            after = line["after"]
            metrics = Metrics(*({k: own for k, own in of.items() if after and k <= after} for of in metrics))
        elif event == "log":
            metrics.logs.setdefault(line.pop("step"), {}).update(line)
        elif event == "step":
            names = list(line.pop("parameters", names))
            for measure in [key for key, value in line.items() if isinstance(value, list)]:
                pairs = zip(names, line[measure], strict=False)
                line[measure] = {name: value for name, value in pairs if value is not None}
            metrics.steps[line.pop("step")] = line
    if not metrics.steps:
        raise ValueError(
            f"{file} holds no watched step of its last run. The first comes after as many steps as diagnostics_every "
            "says (HF_MUON_DIAGNOSTICS_EVERY): wait, or train with a smaller number [no-watched-step]"
        )
    return metrics


def render(metrics: Metrics, title: str) -> str:
    """Return the page, as HTML text: about 5 MB, most of it plotly's script, so that it needs no network."""
    pictures = _loss_and_rates(metrics), _relative_updates(metrics), _norms(metrics)
    charts = (picture.to_html(full_html=False, include_plotlyjs=k == 0) for k, picture in enumerate(pictures))
    about = f"{len(metrics.steps):,} measured steps, from {min(metrics.steps):,} to {max(metrics.steps):,}. "
    about += "Where matrices are sharded, relative updates and RMS are those of the parts that rank 0 stores."
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<title>{html.escape(title)}</title></head><body style="font-family:sans-serif;margin:2rem">'
        f"<h1>{html.escape(title)}</h1><p>{about}</p>{''.join(charts)}</body></html>\n"
    )


def _loss_and_rates(metrics: Metrics) -> Figure:
    """Draw the losses above the learning rates."""
    from plotly.subplots import make_subplots

    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.05)
    losses = {key: key for own in metrics.logs.values() for key in own if re.fullmatch("loss|eval.*_loss", key)}
    _add_lines(figure, metrics.logs, losses, row=1, col=1)
    _add_lines(figure, metrics.steps, {"muon_lr": "rate of Muon", "adamw_lr": "rate of AdamW"}, row=2, col=1)
    figure.update_layout(title="Loss and learning rates", height=560, hovermode="x unified")
    figure.update_yaxes(title="loss", row=1).update_yaxes(title="rate", row=2).update_xaxes(title="step", row=2)
    return figure


def _relative_updates(metrics: Metrics) -> Figure:
    """Draw a heat map of the relative updates of matrices by layer and step, on a logarithmic scale."""
    from plotly.graph_objects import Figure

    rows: dict[str, dict[int, list[float]]] = {}
    for step, own in metrics.steps.items():
        for name, value in own.get("relative_update", {}).items():
            if value:
                layer = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
                rows.setdefault(layer[0] if layer else name, {}).setdefault(step, []).append(math.log10(value))
    medians = [[statistics.median(own[s]) if s in own else None for s in metrics.steps] for own in rows.values()]
    present = [median for row in medians for median in row if median is not None]
    # Over a factor of four at least, so that noise stays pale.
    low, high = min(present, default=0.0), max(present, default=0.0)
    margin = max(0.0, math.log10(4) - (high - low)) / 2
    marks = [digit * 10.0**power for power in range(math.floor(low) - 1, math.ceil(high) + 1) for digit in (1, 2, 5)]
    figure = Figure()
    figure.add_heatmap(
        x=list(metrics.steps),
        y=list(map(html.escape, rows)),
        z=medians,
        text=[["" if median is None else f"{10**median:.3g}" for median in row] for row in medians],
        hovertemplate="step %{x}, %{y}: %{text}<extra></extra>",
        zmin=low - margin,
        zmax=high + margin,
        colorscale="Viridis",
        colorbar={"tickvals": list(map(math.log10, marks)), "ticktext": [f"{mark:.0e}" for mark in marks]},
    )
    figure.update_layout(title="Relative update: rate x RMS of the update / RMS of the weights, median of a layer")
    figure.update_layout(height=320 + 18 * len(rows))
    figure.update_xaxes(title="step").update_yaxes(autorange="reversed", type="category", automargin=True)
    return figure


def _norms(metrics: Metrics) -> Figure:
    """Draw the gradient's norm, and medians of RMS over matrices or parameters."""
    from plotly.graph_objects import Figure

    figure = Figure()
    _add_lines(figure, metrics.logs, {"grad_norm": "norm of the gradient, before clipping"})
    for measure, name in _RMS.items():
        values = {step: list(own.get(measure, {}).values()) for step, own in metrics.steps.items()}
        medians = {step: {measure: statistics.median(own)} for step, own in values.items() if own}
        _add_lines(figure, medians, {measure: f"RMS of {name}"})
    figure.update_layout(title="Norms: of the gradient, and medians over matrices and parameters", height=420)
    figure.update_xaxes(title="step").update_yaxes(type="log", exponentformat="power")
    return figure


def _add_lines(
    figure: Figure, by_step: Mapping[int, Mapping[str, Any]], names: Mapping[str, str], **place: int
) -> None:
    """Draw a line for each number that has a name, if it is there."""
    for key, name in names.items():
        points = {step: own[key] for step, own in by_step.items() if key in own}
        if points:
            mode = "lines" if len(points) > 1 else "markers"
            figure.add_scatter(x=list(points), y=list(points.values()), name=html.escape(name), mode=mode, **place)
