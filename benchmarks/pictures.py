"""Draw a picture of each benchmark from its CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from tables import BENCHMARKS, Row, present, unique

mpl.use("Agg")

_OURS = ("hf_muon", "hf_muon, original")
# Ours are dark; markers differ, so that sides can be told apart without colour.
_COLORS = ("#0b3d91", "#5b8bd9", "#d1495b", "#edae49", "#66a182", "#8d6a9f", "#8c564b", "#7f7f7f")
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*")
_LABELS = {
    "parameters": "parameters stepped by Muon",
    "width": "rows of a square",
    "aspect": "columns over rows",
    "equal shapes": "matrices of one shape",
}


def draw(folder: Path) -> list[Path]:
    """Draw one PNG for each CSV file in the folder, and return their paths."""
    picture = dict(zip(BENCHMARKS, (_orthogonalization, _optimizer_step, _share, _growth), strict=True))
    paths = []
    for benchmark, rows in present(folder):
        path = folder / f"{benchmark}.png"
        picture[benchmark](rows).savefig(path, dpi=110, metadata={"Software": None})
        paths.append(path)
    return paths


def _style(sides: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {side: {"color": _COLORS[i % 8], "marker": _MARKERS[i % 8]} for i, side in enumerate(sides)}


def _errors(rows: Sequence[Row], name: str) -> list[list[float]]:
    """Return the lengths of error bars, down to the minimum and up to the maximum."""
    return [[row[name] - row[f"{name} min"] for row in rows], [row[f"{name} max"] - row[name] for row in rows]]


def _orthogonalization(rows: list[Row]) -> Figure:
    shapes = unique(sorted(rows, key=lambda row: row["aspect"]), "model", "layer", "shape")
    sides = unique(rows, "side")
    style = _style(sides)
    figure = Figure(figsize=(10, 1.6 + 0.55 * len(shapes)), layout="constrained")
    axes = figure.subplots()
    for i, side in enumerate(sides):
        own = {
            (row["model"], row["layer"], row["shape"]): row for row in rows if row["side"] == side and "speedup" in row
        }
        places = [(place, own[shape]) for place, shape in enumerate(shapes) if shape in own]
        lift = -0.35 + 0.7 * i / max(1, len(sides) - 1)
        rows_of_side = [row for _, row in places]
        axes.errorbar(
            [row["speedup"] for row in rows_of_side],
            [place + lift for place, _ in places],
            xerr=_errors(rows_of_side, "speedup"),
            linestyle="",
            markersize=7 if side in _OURS else 5,
            elinewidth=1,
            label=side,
            **style[side],
        )
    axes.axvline(1, color="black", linewidth=0.8)
    for place in range(1, len(shapes)):
        axes.axhline(place - 0.5, color="#dddddd", linewidth=0.6)
    axes.set_yticks(range(len(shapes)), [f"{model} {layer}\n{shape}" for model, layer, shape in shapes], fontsize=8)
    axes.set_ylim(len(shapes) - 0.5, -0.5)
    axes.set_xlabel("times as fast as torch.optim.Muon's (median, least and greatest of the rounds)")
    axes.set_title("Orthogonalization alone, squares first")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _optimizer_step(rows: list[Row]) -> Figure:
    models = unique(rows, "model")
    sides = unique((row for row in rows if "ms" in row), "side")
    style = _style([sides[0], "", *sides[1:]])
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(sides)
    for i, side in enumerate(sides):
        own = [(models.index(row["model"]), row) for row in rows if row["side"] == side and "ms" in row]
        rows_of_side = [row for _, row in own]
        axes.bar(
            [place + (i - (len(sides) - 1) / 2) * width for place, _ in own],
            [row["ms"] for row in rows_of_side],
            width * 0.95,
            yerr=_errors(rows_of_side, "ms"),
            color=style[side]["color"],
            error_kw={"elinewidth": 1},
            label=side,
        )
    axes.set_xticks(range(len(models)), models)
    axes.set_ylabel("ms (median, least and greatest)")
    axes.set_title("The whole optimizer step, models made smaller to fit (no bar: does not step that model)")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _share(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    measured = [row for row in rows if row["kind"] == "measured"]
    sides = unique(measured, "side")
    style = _style([sides[0], "", *sides[1:]])
    for side in sides:
        own = [row for row in measured if row["side"] == side]
        tokens = [row["tokens"] for row in own]
        shares = [100 * row["share"] for row in own]
        errors = [[100 * value for value in part] for part in _errors(own, "share")]
        left.errorbar(tokens, shares, yerr=errors, linestyle="", label=f"{side}, measured", **style[side])
        predicted = [100 * row["from smallest"] for row in own]
        left.plot(tokens, predicted, color=style[side]["color"], linewidth=1, label=f"{side}, from the smallest step")
        if "plan" in own[0]:
            planned = [100 * row["plan"] for row in own]
            left.plot(tokens, planned, color="black", linestyle=":", label="hf-muon plan, by FLOPs")
    left.set_title("A small Qwen3")
    left.set_ylabel("optimizer's part of a training step, %")
    modelled = [row for row in rows if row["kind"] == "modelled"]
    for i, model in enumerate(unique(modelled, "model")):
        own = [row for row in modelled if row["model"] == model]
        right.plot(
            [row["tokens"] for row in own],
            [100 * row["plan"] for row in own],
            color=_COLORS[i],
            marker=_MARKERS[i],
            markersize=4,
            label=model,
        )
    right.set_title("Published models, by hf-muon plan")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens a step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    return figure


def _growth(rows: list[Row]) -> Figure:
    kinds = unique(rows, "kind")
    sides = unique(rows, "side")
    style = _style([sides[0], "", *sides[1:]])
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    for axes, kind in zip(figure.subplots(2, 2).flat, kinds, strict=False):
        for side in sides:
            own = [row for row in rows if row["kind"] == kind and row["side"] == side]
            axes.errorbar(
                [row["x"] for row in own],
                [row["ms"] for row in own],
                yerr=_errors(own, "ms"),
                linewidth=1,
                label=side,
                **style[side],
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(_LABELS[kind])
        axes.set_ylabel("ms")
        what = [row["what"] for row in rows if row["kind"] == kind]
        axes.set_title(f"{kind}: {what[0]} to {what[-1]}", fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    return figure
