"""One run's metrics, or those of several runs side by side, as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hf_muon.diagnostics.charts import Band, Cells, Chart, Line, heat_map, line_chart, page, share_axis
from hf_muon.diagnostics.findings import (
    MATCHED_UPDATE,
    USUAL_ERROR,
    USUAL_UPDATE,
    diagnose,
    outliers,
    spikes,
    typical,
)
from hf_muon.diagnostics.head import comparison, facts_table, joined, line_of, losses_of, verdict
from hf_muon.diagnostics.run_file import Run

_MOST_LAYERS = 8
Group = int | str | None


def _means(run: Run, measure: str, group_of: Callable[[str], Group]) -> dict[Group, list[tuple[int, float]]]:
    """Return the mean of a measure over the parameters of each group, by step."""
    table = run.table(measure)
    columns: dict[Group, list[int]] = {}
    for i, name in enumerate(table.names):
        columns.setdefault(group_of(name), []).append(i)
    lines = {group: torch.nanmean(table.values[:, own], dim=1).tolist() for group, own in columns.items()}
    return {
        group: [(step, mean) for step, mean in zip(table.steps, means, strict=True) if not math.isnan(mean)]
        for group, means in lines.items()
    }


def _by_kind(run: Run, measure: str) -> dict[str, Line]:
    return {str(kind): line for kind, line in _means(run, measure, lambda name: run.kinds[name][1]).items()}


def _by_layer(run: Run, measure: str) -> dict[str, Line]:
    """Return the means of at most eight layers, evenly spaced."""
    means = _means(run, measure, lambda name: run.kinds[name][0])
    layers = _spaced(sorted(layer for layer in means if isinstance(layer, int)))
    return {f"layer {layer}": means[layer] for layer in layers}


def _logits(run: Run) -> dict[str, Line]:
    """Return the largest logits of at most eight attentions, evenly spaced."""
    return {name: line_of(run.logits[name]) for name in _spaced(list(run.logits))}


def _spaced(items: list[Any]) -> list[Any]:
    """Return at most eight of some items, evenly spaced."""
    if len(items) <= _MOST_LAYERS:
        return items
    return [items[round(i * (len(items) - 1) / (_MOST_LAYERS - 1))] for i in range(_MOST_LAYERS)]


def _over_all(run: Run, measure: str) -> Line:
    """Return the median of a measure over all parameters, by step."""
    table = run.table(measure)
    if not table.names:
        return []
    medians = torch.nanquantile(table.values, 0.5, dim=1).tolist()
    return [(step, value) for step, value in zip(table.steps, medians, strict=True) if not math.isnan(value)]


def _cells(run: Run, measure: str) -> Cells:
    """Return the typical values of a measure, by layer and kind."""
    values = {
        (str(run.kinds[name][0]), run.kinds[name][1]): value
        for name, value in typical(run, measure).items()
        if run.kinds[name][0] is not None
    }
    rows = sorted({layer for layer, _ in values}, key=int)
    return Cells(rows, list(dict.fromkeys(kind for _, kind in values)), values)


def render(runs: Mapping[str, Run], title: str) -> str:
    """Return the page, as HTML text.

    Args:
        runs: by name. Charts about whole runs have a line for each; those about kinds and layers come once for each.
        title: of the page.
    """
    head = "".join(verdict(run, name if len(runs) > 1 else "") for name, run in runs.items())
    head = comparison(runs) + head + facts_table(runs)
    every_cell = [_cells(run, _heat_of(run)) for run in runs.values()]
    apart = [
        _of_matrices(run, f" · {name}" if len(runs) > 1 else "", every_cell if len(runs) > 1 else ())
        for name, run in runs.items()
    ]
    grids = [_of_whole_runs(runs)]
    if len(runs) == 1:
        grids[0] += apart[0]
    else:  # the same chart of each run, side by side
        grids += [list(same) for same in zip(*apart, strict=True)]
        for same in grids[1:]:
            share_axis(same)
    return page(title, head, grids)


def _of_whole_runs(runs: Mapping[str, Run]) -> list[Chart]:
    """Return charts with one line for each run, or with all lines of the only one."""

    def lines(of: Callable[[Run], Mapping[str, Line]]) -> dict[str, Line]:
        return {
            " · ".join(filter(None, (label, name if len(runs) > 1 else ""))): line
            for name, run in runs.items()
            for label, line in of(run).items()
        }

    def logs(*keys: str) -> Callable[[Run], dict[str, Line]]:
        return lambda run: {key: line_of(run.logs[key]) for key in keys if key in run.logs}

    def rates(run: Run) -> dict[str, Line]:
        return {name: line_of(run.traces.get(f"{key}_lr", {})) for name, key in (("Muon", "muon"), ("AdamW", "adamw"))}

    def shares(run: Run) -> dict[str, Line]:
        return {"optimizer step": [(step, 100 * v) for step, v in line_of(run.traces.get("time_share", {}))]}

    def marks(run: Run) -> dict[str, Line]:
        return {"spikes": [(spike.step, spike.value) for spike in spikes(losses_of(run))]}

    figures = [
        line_chart("Loss", lines(logs("loss", "eval_loss")), unit="loss", marks=lines(marks)),
        line_chart(
            "Learning rates", lines(rates), unit="learning rate", note="of the Muon groups and of the AdamW groups"
        ),
        line_chart("Gradient norm", lines(logs("grad_norm")), unit="norm", log=True, note="before clipping"),
        line_chart("Time share of the optimizer", lines(shares), unit="% of a training step"),
    ]
    if any(run.logits for run in runs.values()):
        note = "of all heads, since the step before; on all ranks"
        figures.append(line_chart("Largest attention logit", lines(_logits), unit="logit", note=note))
    if len(runs) > 1:
        medians = {name: _over_all(run, "relative_update") for name, run in runs.items()}
        note = "rate x RMS of the update / RMS of the weights, median over matrices"
        figures.insert(1, line_chart("Relative update", medians, unit="relative", log=True, note=note, band=_USUAL))
    return figures


_USUAL = Band(*USUAL_UPDATE, "green: usual, 0.01 % to 1 % a step")


def _heat_of(run: Run) -> str:
    """Return the measure of the heat map; files of older versions have no relative updates."""
    return "relative_update" if run.table("relative_update").names else "update_rms"


def _of_matrices(run: Run, of_run: str, others: Sequence[Cells]) -> list[Chart]:
    """Return the charts of one run by kind and by layer, always the same number of them."""
    ranks = run.start.get("ranks", 1)
    several = isinstance(ranks, int) and ranks > 1
    stored = f"rank 0 of {ranks}: matrices as it stores them" if several else ""
    owned = f"rank 0 of {ranks}: matrices that it orthogonalizes" if several else ""
    unscaled = joined("not multiplied by the learning rate", stored)
    relative = joined("rate x RMS of the update / RMS of the weights", stored)
    options = run.start.get("options") or {}
    muon = options.get("muon") or {}
    unit = float(muon.get("update_rms", 0.2))  # which older versions did not write
    least, most = (unit * bound for bound in MATCHED_UPDATE)
    usual_rms = Band(least, most, f"green: about {unit:g}, as match_rms_adamw has it")
    matched = usual_rms if muon.get("adjust_lr_fn") == _MATCHED else None
    is_old = _heat_of(run) == "update_rms"
    cells = _cells(run, _heat_of(run))
    heat = f"{'Update RMS' if is_old else 'Relative update'} by layer and kind{of_run}"
    when = ("" if is_old else "in % of the weights' RMS, ") + "median while the rate is at least half its maximum"
    adamw = "adamw_update_rms" if is_old else "adamw_relative_update"

    def chart(title: str, lines: Mapping[str, Line], **options: Any) -> Chart:
        return line_chart(title + of_run, lines, **options)

    usual: dict[str, Any] = {"unit": "relative update", "log": True, "note": relative, "band": _USUAL}
    rms: dict[str, Any] = {"unit": "RMS", "note": unscaled}
    return [
        chart("Relative update by kind", _by_kind(run, "relative_update"), **usual),
        chart("Relative update by layer", _by_layer(run, "relative_update"), **usual),
        heat_map(heat, cells, per=1.0 if is_old else 1e-2, note=joined(when, stored), others=others),
        chart("RMS of weights by kind", _by_kind(run, "weight_rms"), unit="RMS", note=stored, log=True),
        chart(
            "Update RMS of AdamW" if is_old else "Relative update of AdamW",
            _by_kind(run, adamw),
            **(rms if is_old else usual),
        ),
        chart("Update RMS by kind", _by_kind(run, "update_rms"), **rms, band=matched),
        chart("Update RMS by layer", _by_layer(run, "update_rms"), **rms, band=matched),
        chart(
            "Orthogonality error by kind",
            _by_kind(run, "orthogonality_error"),
            unit="error",
            note=joined("RMS of (squared singular value - 1)", owned),
            band=Band(*USUAL_ERROR, "green: usual after five steps"),
        ),
        chart("Momentum by kind", _by_kind(run, "momentum_rms"), unit="RMS", note=stored, log=True),
        chart(
            "Stable rank by kind",
            _by_kind(run, "stable_rank"),
            unit="stable rank",
            note=joined("of the updates", owned),
        ),
    ]


_MATCHED = "match_rms_adamw"


def summary(run: Run) -> dict[str, Any]:
    """Return the last number of each trace, of each measure the last mean over matrices, and what they say."""

    def last(points: Iterable[tuple[float, float]]) -> float | None:
        values = list(points)
        return values[-1][1] if values else None

    measures = dict.fromkeys(measure for _, own in run.rows.values() for measure in own)
    return {
        "steps": run.steps,
        "start": run.start,
        "logs": {key: last(line_of(points)) for key, points in run.logs.items()},
        **{key: last(line_of(points)) for key, points in run.traces.items()},
        **({"max_logit": {name: last(line_of(points)) for name, points in run.logits.items()}} if run.logits else {}),
        **{measure: last(_means(run, measure, lambda name: "").get("", [])) for measure in measures},
        "findings": [finding._asdict() for finding in diagnose(run)],
        "outliers": [outlier._asdict() for outlier in outliers(run)],
        "spikes": [spike._asdict() for spike in spikes(losses_of(run))],
    }
