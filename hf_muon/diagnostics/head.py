"""The head of a page: what the metrics of a run say, and the facts of the run."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hf_muon.diagnostics.findings import RULES_OF_THUMB, Outlier, diagnose, outliers
from hf_muon.diagnostics.run_file import Run

_MOST_OUTLIERS = 10


def line_of(points: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return steps and values, ascending."""
    return sorted(points.items())


def joined(*parts: str) -> str:
    """Return the parts of a note that are not empty, with dots between them."""
    return " · ".join(part for part in parts if part)


def _facts(run: Run) -> dict[str, str]:
    """Return what the head of the page says of a run, the options aside."""
    start, steps = run.start, run.steps
    model = start.get("model") or {}
    versions = {"hf_muon": start.get("hf_muon"), "torch": start.get("torch"), **(start.get("versions") or {})}
    return {
        "model": joined(model.get("class", ""), model.get("name", "")),
        "trained weights": _weights(model),
        "matrices with Muon": f"{len(run.table('update_rms').names):,}",
        "steps": f"{max(steps[-1], *(max(points) for points in run.logs.values()), 0):,}",
        "watched steps": f"{len(steps):,}, from {steps[0]:,} to {steps[-1]:,}",
        "tokens a step": _tokens_a_step(run),
        "last loss": _last_loss(run),
        "machine": str(start.get("machine", "")),
        "ranks": str(start.get("ranks", 1)),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }


def _options(run: Run) -> dict[str, dict[str, str]]:
    """Return the options of each side, as text."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return "|".join(map(text, value))
        if isinstance(value, bool):
            return str(value).lower()
        return f"{value:g}" if isinstance(value, float) else str(value)

    options = run.start.get("options") or {}
    return {
        side: {name.removeprefix("adamw_"): text(value) for name, value in (options.get(key) or {}).items()}
        for side, key in (("Muon", "muon"), ("AdamW", "adamw"))
    }


def _weights(model: Mapping[str, Any]) -> str:
    muon, adamw = int(model.get("muon_weights", 0)), int(model.get("adamw_weights", 0))
    return f"{muon + adamw:,}, {muon / (muon + adamw):.1%} with Muon" if muon else ""


def _tokens_a_step(run: Run) -> str:
    """Return the mean over the run, padding among them."""
    for key in ("num_input_tokens_seen", "tokens"):
        points = line_of(run.logs.get(key, {}))
        if points and points[-1][1]:
            first, last = points[0] if len(points) > 1 else (0, 0.0), points[-1]
            return f"{(last[1] - first[1]) / (last[0] - first[0]):,.0f}" if last[0] > first[0] else ""
    return ""


def _last_loss(run: Run) -> str:
    kinds = (("training", "loss"), ("held out", "eval_loss"))
    lasts = {name: line_of(run.logs[key])[-1] for name, key in kinds if run.logs.get(key)}
    return ", ".join(f"{name} {value:.4g} at step {step:,}" for name, (step, value) in lasts.items())


def facts_table(runs: Mapping[str, Run]) -> str:
    """Return the table of facts: a row for each that a run has; a column for each run where the runs differ."""
    facts = [_facts(run) for run in runs.values()]
    rows = {key: [own[key] for own in facts] for key in facts[0]}
    for side in ("Muon", "AdamW"):
        options = [_options(run)[side] for run in runs.values()]
        names = dict.fromkeys(name for own in options for name in own)
        values = {name: [own.get(name, "") for own in options] for name in names}
        equal = [f"{name}={value[0]}" for name, value in values.items() if len(set(value)) == 1]
        rows |= {f"{side}: {name}": value for name, value in values.items() if len(set(value)) > 1}
        rows[f"options of {side}"] = [", ".join(equal)] * len(runs)
    lines = []
    for key, row in {**({"run": list(runs)} if len(runs) > 1 else {}), **rows}.items():
        if any(row):
            cells = "".join(f"<td>{html.escape(value)}</td>" for value in row)
            if len(set(row)) == 1:
                cells = f"<td colspan={len(row)}>{html.escape(row[0])}</td>"
            lines.append(f"<tr><th>{html.escape(key)}</th>{cells}</tr>")
    one = " one" if len(runs) == 1 else ""
    return f'<section class="scroll"><table class="facts{one}">{"".join(lines)}</table></section>'


def comparison(runs: Mapping[str, Run]) -> str:
    """Return which of several runs ends with the lowest loss; nothing for one run."""
    ends = {name: points[-max(1, len(points) // 10) :] for name, run in runs.items() if (points := losses_of(run))}
    if len(runs) < 2 or len(ends) < 2:
        return ""
    medians = {name: statistics.median(loss for _, loss in points) for name, points in ends.items()}
    order = sorted(medians, key=lambda name: medians[name])
    text = ", ".join(f"{name} {medians[name]:.4g} at step {ends[name][-1][0]:,}" for name in order)
    return (
        f'<section><h2>Which run ends with the lowest loss</h2><ul><li class="good">{html.escape(text)} '
        "(median of the last tenth of its training losses).</li></ul></section>"
    )


def losses_of(run: Run) -> list[tuple[int, float]]:
    """Return the training losses that the Trainer logged, by step."""
    return line_of(run.logs.get("loss", {}))


def verdict(run: Run, name: str) -> str:
    """Return what the metrics say, and the table of outliers."""
    heading = f"What it says{f' · {html.escape(name)}' if name else ''}"
    items = "".join(f'<li class="{finding.level}">{html.escape(finding.text)}</li>' for finding in diagnose(run))
    note = f'<p class="note">{html.escape(RULES_OF_THUMB)}</p>'
    return f"<section><h2>{heading}</h2><ul>{items}</ul>{note}{_outliers(outliers(run))}</section>"


def _outliers(own: Sequence[Outlier]) -> str:
    if not own:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(one.name)}</td><td class=number>{one.value:.2g}</td>"
        f"<td class=number>{one.usual:.2g}</td><td class=number>{_factor(one.value / one.usual)}</td></tr>"
        for one in own[:_MOST_OUTLIERS]
    )
    more = f"<p class=note>and {len(own) - _MOST_OUTLIERS} more</p>" if len(own) > _MOST_OUTLIERS else ""
    return (
        '<p class="note">Relative updates that differ from those of their kind, while the rate is at least half its '
        "maximum:</p>"
        '<div class="scroll"><table><tr><th>parameter</th><th>update</th><th>of its kind</th><th>ratio</th></tr>'
        f"{rows}</table></div>{more}"
    )


def _factor(ratio: float) -> str:
    return f"{ratio:.3g} x" if ratio >= 1 else f"1/{1 / ratio:.3g} x"
