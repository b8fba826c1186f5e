"""One run's metrics, or those of several runs side by side, as one HTML page."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from plotly.graph_objects import Figure

from hf_muon.diagnostics.charts import Band, Cells, Line, heat_map, line_chart, page
from hf_muon.diagnostics.findings import (
    MATCHED_UPDATE,
    RULES_OF_THUMB,
    USUAL_ERROR,
    USUAL_UPDATE,
    diagnose,
    outliers,
    spikes,
    typical,
)
from hf_muon.diagnostics.run_file import Run

_MOST_LAYERS = 8
_MOST_OUTLIERS = 10


def render(runs: Mapping[str, Run], title: str) -> str:
    """Return the page, as HTML text.

    Args:
        runs: by name. Charts about whole runs have a line for each; those about kinds and layers a panel for each.
        title: of the page.
    """
    verdicts = "".join(_verdict(run, f" · {name}" if len(runs) > 1 else "") for name, run in runs.items())
    return page(title, _comparison(runs) + verdicts + _facts_table(runs), [*_of_whole_runs(runs), *_of_matrices(runs)])


def _line(points: Mapping[int, float]) -> list[tuple[int, float]]:
    return sorted(points.items())


def _means(run: Run, measure: str, group_of: Callable[[str], Any]) -> dict[Any, Line]:
    """Return the mean of a measure over the parameters of each group, by step."""
    table = run.table(measure)
    columns: dict[Any, list[int]] = {}
    for i, name in enumerate(table.names):
        columns.setdefault(group_of(name), []).append(i)
    lines = {group: torch.nanmean(table.values[:, own], dim=1).tolist() for group, own in columns.items()}
    return {
        group: [(step, mean) for step, mean in zip(table.steps, means, strict=True) if not math.isnan(mean)]
        for group, means in lines.items()
    }


def _by_kind(run: Run, measure: str) -> dict[str, Line]:
    return _means(run, measure, lambda name: run.kinds[name][1])


def _by_layer(run: Run, measure: str) -> dict[str, Line]:
    means = _means(run, measure, lambda name: run.kinds[name][0])
    return {f"layer {layer}": means[layer] for layer in _spaced(sorted(layer for layer in means if layer is not None))}


def _spaced(items: list[Any]) -> list[Any]:
    """Return at most eight of some items, evenly spaced."""
    if len(items) <= _MOST_LAYERS:
        return items
    return [items[round(i * (len(items) - 1) / (_MOST_LAYERS - 1))] for i in range(_MOST_LAYERS)]


def _median(run: Run, measure: str) -> Line:
    """Return the median of a measure over all parameters, by step."""
    table = run.table(measure)
    medians = torch.nanquantile(table.values, 0.5, dim=1).tolist() if table.names else []
    return [(step, value) for step, value in zip(table.steps, medians, strict=False) if not math.isnan(value)]


def _cells(run: Run, measure: str) -> Cells:
    """Return the typical values of a measure, by layer and kind."""
    values = typical(run, measure).items()
    kinds = run.kinds
    return {(str(kinds[name][0]), kinds[name][1]): value for name, value in values if kinds[name][0] is not None}


_USUAL = Band(*USUAL_UPDATE, "green: usual, 0.01 % to 1 % a step")


def _of_whole_runs(runs: Mapping[str, Run]) -> list[Figure | None]:
    """Return charts with one line for each run, or with all lines of the only one."""

    def lines(of: Callable[[Run], Mapping[str, Line]]) -> dict[str, Mapping[str, Line]]:
        drawn = {(label, name): line for name, run in runs.items() for label, line in of(run).items()}
        return {"": {_joined(label, name if len(runs) > 1 else ""): line for (label, name), line in drawn.items()}}

    def logs(*keys: str) -> dict[str, Mapping[str, Line]]:
        return lines(lambda run: {key: _line(run.logs[key]) for key in keys if key in run.logs})

    def rates(run: Run) -> dict[str, Line]:
        return {name: _line(run.traces.get(f"{name.lower()}_lr", {})) for name in ("Muon", "AdamW")}

    def shares(run: Run) -> dict[str, Line]:
        return {"optimizer step": [(step, 100 * value) for step, value in _line(run.traces.get("time_share", {}))]}

    def logits(run: Run) -> dict[str, Line]:
        return {name: _line(run.logits[name]) for name in _spaced(list(run.logits))}

    marks = [(spike.step, spike.value) for run in runs.values() for spike in spikes(run.losses)]
    medians = lines(lambda run: {"": _median(run, "relative_update")}) if len(runs) > 1 else {}
    return [
        line_chart("Loss", logs("loss", "eval_loss"), unit="loss", marks=marks),
        line_chart("Relative update", medians, unit="relative", log=True, note=_RELATIVE, band=_USUAL),
        line_chart("Learning rates", lines(rates), unit="learning rate", note="of the Muon and the AdamW groups"),
        line_chart("Gradient norm", logs("grad_norm"), unit="norm", log=True, note="before clipping"),
        line_chart("Time share of the optimizer", lines(shares), unit="% of a training step"),
        line_chart("Largest attention logit", lines(logits), unit="logit", note="of all heads, since the step before"),
    ]


_RELATIVE = "rate x RMS of the update / RMS of the weights"


def _of_matrices(runs: Mapping[str, Run]) -> list[Figure | None]:
    """Return the charts by kind and by layer, with a panel for each run."""
    ranks = {run.start.get("ranks", 1) for run in runs.values()} - {1}
    of_rank = f"rank 0 of {' or '.join(map(str, ranks))}: matrices that it " if ranks else ""
    stored, owned = (of_rank + does if ranks else "" for does in ("stores", "orthogonalizes"))
    updates = {_matched_update(run) for run in runs.values()}
    update = updates.pop() if len(updates) == 1 else None
    matched = None
    if update:
        least, most = (update * bound for bound in MATCHED_UPDATE)
        matched = Band(least, most, f"green: about {update:g}, as match_rms_adamw has it")

    def kinds(measure: str) -> dict[str, dict[str, Line]]:
        return {name: _by_kind(run, measure) for name, run in runs.items()}

    def layers(measure: str) -> dict[str, dict[str, Line]]:
        return {name: _by_layer(run, measure) for name, run in runs.items()}

    usual: dict[str, Any] = {"unit": "relative update", "log": True, "note": _joined(_RELATIVE, stored), "band": _USUAL}
    note = _joined("not multiplied by the learning rate", stored)
    rms: dict[str, Any] = {"unit": "RMS", "note": note, "band": matched}
    cells = {name: _cells(run, "relative_update") for name, run in runs.items()}
    when = "in % of the weights' RMS, median while the rate is at least half its maximum"
    error = Band(*USUAL_ERROR, "green: usual after five steps")
    of_error = _joined("RMS of (squared singular value - 1)", owned)
    of_updates = _joined("of the updates", owned)
    return [
        line_chart("Relative update by kind", kinds("relative_update"), **usual),
        line_chart("Relative update by layer", layers("relative_update"), **usual),
        heat_map("Relative update by layer and kind", cells, per=1e-2, note=_joined(when, stored)),
        line_chart("RMS of weights by kind", kinds("weight_rms"), unit="RMS", note=stored, log=True),
        line_chart("Relative update of AdamW", kinds("adamw_relative_update"), **usual),
        line_chart("Update RMS by kind", kinds("update_rms"), **rms),
        line_chart("Update RMS by layer", layers("update_rms"), **rms),
        line_chart(
            "Orthogonality error by kind", kinds("orthogonality_error"), unit="error", note=of_error, band=error
        ),
        line_chart("Momentum by kind", kinds("momentum_rms"), unit="RMS", note=stored, log=True),
        line_chart("Stable rank by kind", kinds("stable_rank"), unit="stable rank", note=of_updates),
    ]


def _matched_update(run: Run) -> float | None:
    """Return the RMS that updates have with `match_rms_adamw`; None with another scale."""
    muon = run.start.get("options", {}).get("muon", {})
    return muon.get("update_rms", 0.2) if muon.get("adjust_lr_fn") == "match_rms_adamw" else None


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def _facts(run: Run) -> dict[str, str]:
    """Return what the head of the page says of a run, the options aside."""
    start, steps = run.start, run.steps
    model = start.get("model", {})
    muon, adamw = model.get("muon_weights", 0), model.get("adamw_weights", 0)
    versions = start.get("versions", {})
    tokens = _line(run.logs.get("num_input_tokens_seen") or run.logs.get("tokens", {}))
    first, last = tokens[0] if len(tokens) > 1 else (0, 0.0), tokens[-1] if tokens else (0, 0.0)
    kinds = (("training", "loss"), ("held out", "eval_loss"))
    losses = {name: _line(run.logs[key])[-1] for name, key in kinds if run.logs.get(key)}
    return {
        "model": _joined(model.get("class", ""), model.get("name", "")),
        "trained weights": f"{muon + adamw:,}, {muon / (muon + adamw):.1%} with Muon" if muon else "",
        "matrices with Muon": f"{len(run.table('update_rms').names):,}",
        "steps": f"{max(steps[-1], *(max(points) for points in run.logs.values()), 0):,}",
        "watched steps": f"{len(steps):,}, from {steps[0]:,} to {steps[-1]:,}",
        "tokens a step": f"{(last[1] - first[1]) / (last[0] - first[0]):,.0f}" if last[0] > first[0] else "",
        "last loss": ", ".join(f"{name} {value:.4g} at step {step:,}" for name, (step, value) in losses.items()),
        "ranks": str(start.get("ranks", 1)),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }


def _text(value: Any) -> str:
    """Return the value of an option as optim_args have it."""
    if isinstance(value, list):
        return "|".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _facts_table(runs: Mapping[str, Run]) -> str:
    """Return the table of facts: a row for each that a run has; a column for each run where the runs differ."""
    facts = [_facts(run) for run in runs.values()]
    rows = {"run": list(runs) if len(runs) > 1 else [""], **{key: [own[key] for own in facts] for key in facts[0]}}
    for title in ("Muon", "AdamW"):
        options = [run.start.get("options", {}).get(title.lower(), {}) for run in runs.values()]
        names = dict.fromkeys(name for own in options for name in own)
        values = {name.removeprefix("adamw_"): [_text(own.get(name, "")) for own in options] for name in names}
        equal = [f"{name}={value[0]}" for name, value in values.items() if len(set(value)) == 1]
        rows |= {f"{title}: {name}": value for name, value in values.items() if len(set(value)) > 1}
        rows[f"options of {title}"] = [", ".join(equal)] * len(runs)
    lines = []
    for key, row in rows.items():
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in row)
        if len(set(row)) == 1:
            cells = f"<td colspan={len(row)}>{html.escape(row[0])}</td>"
        lines += [f"<tr><th>{html.escape(key)}</th>{cells}</tr>"] if any(row) else []
    one = " one" if len(runs) == 1 else ""
    return f'<section class="scroll"><table class="facts{one}">{"".join(lines)}</table></section>'


def _comparison(runs: Mapping[str, Run]) -> str:
    """Return which of several runs ends with the lowest loss; nothing for one run."""
    ends = {name: points[-max(1, len(points) // 10) :] for name, run in runs.items() if (points := run.losses)}
    if len(runs) < 2 or len(ends) < 2:
        return ""
    medians = {name: statistics.median(loss for _, loss in points) for name, points in ends.items()}
    order = sorted(medians, key=lambda name: medians[name])
    text = ", ".join(f"{name} {medians[name]:.4g} at step {ends[name][-1][0]:,}" for name in order)
    return (
        f'<section><h2>Which run ends with the lowest loss</h2><ul><li class="good">{html.escape(text)} '
        "(median of the last tenth of its training losses).</li></ul></section>"
    )


def _verdict(run: Run, of_run: str) -> str:
    """Return what the metrics say, and the table of outliers."""
    items = "".join(f'<li class="{finding.level}">{html.escape(finding.text)}</li>' for finding in diagnose(run))
    own = outliers(run)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td class=number>{value:.2g}</td><td class=number>{usual:.2g}</td>"
        f"<td class=number>{f'{value / usual:.3g}' if value >= usual else f'1/{usual / value:.3g}'} x</td></tr>"
        for name, value, usual in own[:_MOST_OUTLIERS]
    )
    table = (
        '<p class="note">Relative updates that differ from those of their kind, while the rate is at least half its '
        'maximum:</p><div class="scroll"><table><tr><th>parameter</th><th>update</th><th>of its kind</th>'
        f"<th>ratio</th></tr>{rows}</table></div>"
    )
    more = f"<p class=note>and {len(own) - _MOST_OUTLIERS} more</p>" if len(own) > _MOST_OUTLIERS else ""
    note = f'<p class="note">{html.escape(RULES_OF_THUMB)}</p>'
    heading = f"<h2>What it says{html.escape(of_run)}</h2>"
    return f"<section>{heading}<ul>{items}</ul>{note}{table if own else ''}{more}</section>"


def summary(run: Run) -> dict[str, Any]:
    """Return the last number of each trace, of each measure the last mean over matrices, and what they say."""

    def last(points: Mapping[int, float]) -> float:
        return points[max(points)]

    means = {measure: _means(run, measure, lambda name: "").get("", []) for measure in run.measures}
    logits: Iterable[tuple[str, float]] = ((name, last(points)) for name, points in run.logits.items())
    return {
        "steps": run.steps,
        "start": run.start,
        "logs": {key: last(points) for key, points in run.logs.items()},
        **{key: last(points) for key, points in run.traces.items()},
        **({"max_logit": dict(logits)} if run.logits else {}),
        **{measure: line[-1][1] for measure, line in means.items() if line},
        "findings": [finding._asdict() for finding in diagnose(run)],
        "outliers": [outlier._asdict() for outlier in outliers(run)],
        "spikes": [spike._asdict() for spike in spikes(run.losses)],
    }
