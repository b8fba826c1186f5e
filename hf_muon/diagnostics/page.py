"""A run's metrics as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hf_muon.diagnostics.charts import Line, heat_map, line_chart, page
from hf_muon.diagnostics.run_file import Run


def _line(points: Mapping[int, float]) -> Line:
    return sorted(points.items())


def _means(run: Run, measure: str, group_of: Callable[[str], Any]) -> dict[Any, Line]:
    """Return the mean of a measure over the parameters of each group, by step."""
    by_group: dict[Any, dict[int, list[float]]] = {}
    for name, points in run.measures.get(measure, {}).items():
        by_step = by_group.setdefault(group_of(name), {})
        for step, value in points.items():
            by_step.setdefault(step, []).append(value)
    return {
        group: _line({step: math.fsum(values) / len(values) for step, values in by_step.items()})
        for group, by_step in by_group.items()
    }


def _by_kind(run: Run, measure: str) -> dict[str, Line]:
    return _means(run, measure, lambda name: run.kinds[name][1])


def _by_layer(run: Run, measure: str) -> dict[str, Line]:
    """Return the means of at most eight layers, evenly spaced."""
    means = _means(run, measure, lambda name: run.kinds[name][0])
    layers = sorted(layer for layer in means if layer is not None)
    shown = layers if len(layers) <= 8 else [layers[round(i * (len(layers) - 1) / 7)] for i in range(8)]
    return {f"layer {layer}": means[layer] for layer in shown}


def _last(run: Run, measure: str) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """Return layers, kinds, and the values of the last watched step."""
    step = run.steps[-1]
    values = {
        (str(run.kinds[name][0]), run.kinds[name][1]): points[step]
        for name, points in run.measures.get(measure, {}).items()
        if step in points and run.kinds[name][0] is not None
    }
    rows = sorted({layer for layer, _ in values}, key=int)
    return rows, list(dict.fromkeys(kind for _, kind in values)), values


def render(run: Run, title: str) -> str:
    """Return the page, as HTML text.

    Raises:
        RuntimeError: plotly is not installed.
    """
    steps = run.steps
    ranks = run.start.get("ranks", 1)
    several = isinstance(ranks, int) and ranks > 1
    stored = f"rank 0 of {ranks}: matrices as it stores them" if several else ""
    owned = f"rank 0 of {ranks}: matrices that it orthogonalizes" if several else ""
    share = {step: 100 * value for step, value in run.traces.get("time_share", {}).items()}
    facts = {
        "watched steps": f"{len(steps)}, from {steps[0]} to {steps[-1]}",
        "versions": f"hf_muon {run.start.get('hf_muon')}, torch {run.start.get('torch')}",
        "ranks": str(ranks),
        "matrices with Muon": str(len(run.measures.get("update_rms", {}))),
    }
    losses = {key: _line(points) for key, points in run.logs.items() if key in ("loss", "eval_loss")}
    gradients = {key: _line(points) for key, points in run.logs.items() if key == "grad_norm"}
    rates = {name: _line(run.traces.get(f"{key}_lr", {})) for name, key in (("Muon", "muon"), ("AdamW", "adamw"))}
    unscaled = _joined("not multiplied by the learning rate", stored)
    figures = [
        line_chart("Loss", losses),
        line_chart("Learning rates", rates, note="of the Muon groups and of the AdamW groups"),
        line_chart("Update RMS by kind", _by_kind(run, "update_rms"), note=unscaled),
        line_chart("Update RMS by layer", _by_layer(run, "update_rms"), note=unscaled),
        line_chart("Update RMS of AdamW", _by_kind(run, "adamw_update_rms"), note=unscaled),
        line_chart(
            "Orthogonality error by kind",
            _by_kind(run, "orthogonality_error"),
            note=_joined("RMS of (squared singular value - 1)", owned),
        ),
        line_chart("Momentum by kind", _by_kind(run, "momentum_rms"), unit="RMS", note=stored, log=True),
        line_chart("Stable rank by kind", _by_kind(run, "stable_rank"), note=_joined("of the updates", owned)),
        line_chart("Time share of the optimizer", {"optimizer step": _line(share)}, unit="% of a training step"),
        line_chart("Gradient norm", gradients, log=True),
        heat_map("Update RMS by layer and kind", *_last(run, "update_rms"), note=_joined(stored, f"step {steps[-1]}")),
    ]
    return page(title, facts, figures)


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def summary(run: Run) -> dict[str, Any]:
    """Return the last number of each trace, and of each measure the last mean over matrices."""

    def last(points: Iterable[tuple[float, float]]) -> float | None:
        values = list(points)
        return values[-1][1] if values else None

    return {
        "steps": run.steps,
        "start": run.start,
        "logs": {key: last(_line(points)) for key, points in run.logs.items()},
        **{key: last(_line(points)) for key, points in run.traces.items()},
        **{measure: last(_means(run, measure, lambda name: "")[""]) for measure in run.measures},
    }
