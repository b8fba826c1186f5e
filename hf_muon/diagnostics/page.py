"""Show the metrics of one run, or compare those of several, on an HTML page."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from plotly.graph_objects import Figure

from hf_muon.diagnostics.charts import Band, Cells, Line, heat_map, line_chart, page
from hf_muon.diagnostics.findings import RULE_OF_THUMB, USUAL_ERROR, USUAL_UPDATE, diagnose, typical
from hf_muon.diagnostics.log import first_few
from hf_muon.diagnostics.run_file import Run


def render(runs: Mapping[str, Run], title: str) -> str:
    """Return the page, as HTML text.

    Args:
        runs: by name. Charts about whole runs have a line for each run; those about kinds of weights a panel.
        title: the heading of the page.
    """
    verdicts = "".join(_verdict(run, f" · {name}" if len(runs) > 1 else "") for name, run in runs.items())
    return page(title, _comparison(runs) + verdicts + _facts_table(runs), [*_of_whole_runs(runs), *_of_matrices(runs)])


def _by_kind(run: Run, measure: str) -> dict[str, Line]:
    """Return the mean of a measure over the parameters of each kind, by step."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for step, numbers in run.numbers(measure):
        groups: dict[str, list[float]] = {}
        for name, value in numbers:
            groups.setdefault(run.kinds[name][1], []).append(value)
        for kind, values in groups.items():
            lines.setdefault(kind, []).append((step, math.fsum(values) / len(values)))
    return dict(lines)


def _median(run: Run, measure: str) -> Line:
    """Return the median of a measure over all parameters, by step."""
    return [(step, statistics.median(value for _, value in numbers)) for step, numbers in run.numbers(measure)]


def _cells(run: Run) -> Cells:
    """Return the typical relative updates, by layer and kind."""
    values = ((run.kinds[name], value) for name, value in typical(run, "relative_update").items())
    return {(str(layer), kind): value for (layer, kind), value in values if layer is not None}


_USUAL = Band(*USUAL_UPDATE, "green: usual, 0.01 % to 1 % a step")
_RELATIVE = "rate x RMS of the update / RMS of the weights"


def _of_whole_runs(runs: Mapping[str, Run]) -> list[Figure | None]:
    """Return charts with one line for each run, or with all lines of the only one."""

    def lines(of: Callable[[Run], Mapping[str, Line]]) -> dict[str, Mapping[str, Line]]:
        drawn = {(label, name): line for name, run in runs.items() for label, line in of(run).items()}
        return {"": {_joined(label, name if len(runs) > 1 else ""): line for (label, name), line in drawn.items()}}

    def numbers(**labels: str) -> dict[str, Mapping[str, Line]]:
        return lines(lambda run: {label: sorted(run.traces.get(key, {}).items()) for key, label in labels.items()})

    medians = lines(lambda run: {"": _median(run, "relative_update")}) if len(runs) > 1 else {}
    return [
        line_chart("Loss", numbers(loss="loss", eval_loss="eval_loss"), unit="loss"),
        line_chart("Relative update", medians, unit="relative", log=True, note=_RELATIVE, band=_USUAL),
        line_chart(
            "Learning rates", numbers(muon_lr="Muon", adamw_lr="AdamW"), unit="rate", note="of Muon and AdamW groups"
        ),
        line_chart("Gradient norm", numbers(grad_norm="grad_norm"), unit="norm", log=True, note="before clipping"),
        line_chart("Time share of the optimizer", numbers(time_share="optimizer step"), unit="part of a training step"),
        line_chart(
            "Largest attention logit", numbers(max_logit="largest"), unit="logit", note="of all, since the step before"
        ),
    ]


def _of_matrices(runs: Mapping[str, Run]) -> list[Figure | None]:
    """Return the charts by kind and by layer, with a panel for each run."""
    ranks = sorted({run.ranks for run in runs.values()} - {1})
    of_rank = f"rank 0 of {' or '.join(map(str, ranks))}: matrices that it " if ranks else ""
    stored, owned = (of_rank + does if ranks else "" for does in ("stores", "orthogonalizes"))

    def chart(title: str, measure: str, unit: str, *notes: str, log: bool = False, band: Band | None = None) -> Any:
        panels = {name: _by_kind(run, measure) for name, run in runs.items()}
        return line_chart(title, panels, unit=unit, note=_joined(*notes), log=log, band=band)

    cells = {name: _cells(run) for name, run in runs.items()}
    when = "in % of the weights' RMS, median while the rate is at least half its maximum; blue: below the median"
    relative = ("relative update", _RELATIVE, stored)
    error = ("error", "RMS of (squared singular value - 1)", owned)
    five_steps = Band(*USUAL_ERROR, "green: usual after five steps")
    return [
        chart("Relative update by kind", "relative_update", *relative, log=True, band=_USUAL),
        heat_map("Relative update by layer and kind", cells, per=1e-2, note=_joined(when, stored)),
        chart("Relative update of AdamW", "adamw_relative_update", *relative, log=True, band=_USUAL),
        chart("RMS of weights by kind", "weight_rms", "RMS", stored, log=True),
        chart("Update RMS by kind", "update_rms", "RMS", "not multiplied by the learning rate", stored),
        chart("Momentum by kind", "momentum_rms", "RMS", stored, log=True),
        chart("Orthogonality error by kind", "orthogonality_error", *error, band=five_steps),
        chart("Stable rank by kind", "stable_rank", "stable rank", "of the updates", owned),
    ]


def _joined(*texts: str) -> str:
    return " · ".join(text for text in texts if text)


def _facts(run: Run) -> dict[str, str]:
    """Return the facts about a run for the top of the page, without the options."""
    muon, adamw = run.model.get("muon_weights", 0), run.model.get("adamw_weights", 0)
    kinds = (("training", "loss"), ("held out", "eval_loss"))
    losses = [(word, max(run.traces[key].items())) for word, key in kinds if run.traces.get(key)]
    runs = first_few("|".join(ids) for ids in run.in_file if ids != run.ids)
    return {
        "run in its file": runs and f"{run.in_file.index(run.ids) + 1} of {len(run.in_file)}; the others: {runs}",
        "model": _joined(run.model.get("class", ""), run.model.get("name", "")),
        "trained weights": f"{muon + adamw:,}, {muon / (muon + adamw):.1%} with Muon" if muon else "",
        "watched steps": f"{len(run.rows):,}, from {min(run.rows):,} to {max(run.rows):,}",
        "last loss": ", ".join(f"{word} {value:.4g} at step {step:,}" for word, (step, value) in losses),
        "ranks": str(run.ranks),
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
    }


def _text(value: Any) -> str:
    """Return the value of an option as optim_args write it."""
    if isinstance(value, list):
        return "|".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _facts_table(runs: Mapping[str, Run]) -> str:
    """Return the table of facts: a row for each fact, and a column for each run if they differ."""
    facts = [_facts(run) for run in runs.values()]
    rows = {"run": list(runs) if len(runs) > 1 else [""], **{key: [fact[key] for fact in facts] for key in facts[0]}}
    for title in ("Muon", "AdamW"):
        options = [run.options.get(title.lower(), {}) for run in runs.values()]
        names = dict.fromkeys(name for fact in options for name in fact)
        values = {name.removeprefix("adamw_"): [_text(fact.get(name, "")) for fact in options] for name in names}
        equal = [f"{name}={value[0]}" for name, value in values.items() if len(set(value)) == 1]
        rows |= {f"{title}: {name}": value for name, value in values.items() if len(set(value)) > 1}
        rows[f"options of {title}"] = [", ".join(equal)] * len(runs)
    lines = []
    for key, row in rows.items():
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in row)
        if len(set(row)) == 1:
            cells = f"<td colspan={len(row)}>{html.escape(row[0])}</td>"
        lines += [f"<tr><th>{html.escape(key)}</th>{cells}</tr>"] if any(row) else []
    return f'<section class="scroll"><table>{"".join(lines)}</table></section>'


def _comparison(runs: Mapping[str, Run]) -> str:
    """Return a sentence about which of several runs ends with the lowest loss; empty for one run."""
    ends = {name: points[-max(1, len(points) // 10) :] for name, run in runs.items() if (points := run.losses)}
    if len(ends) < 2:
        return ""
    medians = {name: statistics.median(loss for _, loss in points) for name, points in ends.items()}
    order = sorted(medians, key=lambda name: medians[name])
    text = ", ".join(f"{name} {medians[name]:.4g} at step {ends[name][-1][0]:,}" for name in order)
    return (
        f'<section><h2>Which run ends with the lowest loss</h2><ul><li class="good">{html.escape(text)} '
        "(median of the last tenth of its training losses).</li></ul></section>"
    )


def _verdict(run: Run, of_run: str) -> str:
    """Return the findings as HTML."""
    items = "".join(f'<li class="{finding.level}">{html.escape(finding.text)}</li>' for finding in diagnose(run))
    heading = f"<h2>What it says{html.escape(of_run)}</h2>"
    return f'<section>{heading}<ul>{items}</ul><p class="note">{html.escape(RULE_OF_THUMB)}</p></section>'
