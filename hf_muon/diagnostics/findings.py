"""Diagnose a run from its metrics: learning rate, loss, and exactness of the steps."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from hf_muon.diagnostics.run_file import Run

USUAL_UPDATE = (1e-4, 1e-2)
"""Relative updates that are usual: a factor of ten around the 1e-3 of Karpathy's makemore, part 3."""
USUAL_ERROR = (0.1, 0.3)
"""Orthogonality errors that are usual after five Newton-Schulz steps."""
RULE_OF_THUMB = (
    "A relative update of 0.01 % to 1 % is a rule of thumb: a factor of ten around the 0.1 % that Karpathy (makemore, "
    "part 3) gives for any optimizer; no experiment with Muon is behind it. Runs at other rates (hf-muon sweep) say "
    "more."
)
"""The sources of the limits, shown on the page."""

# Medians are over so many steps at most, evenly spread, which bounds the time for a long run.
_MOST_STEPS = 500
# Tenths of fewer losses have no more than two, whose median says nothing.
_FEWEST_LOSSES = 30


class Finding(NamedTuple):
    """A sentence about a run, whose level is `good`, `look` (worth a look) or `bad`."""

    level: str
    text: str


def typical(run: Run, measure: str) -> dict[str, float]:
    """Return the median of a measure for each parameter, while the rate of Muon is at least half its maximum."""
    rates = run.traces.get("muon_lr", {})
    half = max(rates.values(), default=0.0) / 2
    steps = [pairs for step, pairs in run.numbers(measure) if step in rates and rates[step] >= half]
    values: dict[str, list[float]] = {}
    for pairs in steps[:: -(-len(steps) // _MOST_STEPS) or 1]:
        for name, value in pairs:
            values.setdefault(name, []).append(value)
    return {name: statistics.median(of_param) for name, of_param in values.items()}


def diagnose(run: Run) -> list[Finding]:
    """Return the findings about a run, those about its learning rate first."""
    findings = [_of_rate(run), *_of_loss(run)]
    errors = typical(run, "orthogonality_error").values()
    if errors and (middle := statistics.median(errors)) > USUAL_ERROR[1]:
        text = f"Orthogonality error {middle:.2f} in the median over matrices, above the usual {USUAL_ERROR[1]}: "
        text += "ns_steps is small, or updates have a low rank (few tokens a step; see the stable rank)."
        findings.append(Finding("look", text))
    return findings


def _of_rate(run: Run) -> Finding:
    """Return whether the learning rate is usual."""
    updates = typical(run, "relative_update").values()
    if not updates:
        return Finding("look", "Learning rate: no matrix has a relative update here.")
    size, (low, high) = statistics.median(updates), USUAL_UPDATE
    says = (
        f"a step moves a matrix by {_percent(size)} of its size (median, while the rate is at least half of the "
        f"highest); by rule of thumb, usual is {_percent(low)} to {_percent(high)}."
    )
    if size > high:
        advice = "Short runs of small models from random weights bear this; else divide learning_rate or muon_lr by 3."
        return Finding("look", f"The learning rate is high: {says} {advice}")
    if size < low:
        advice = "Reinforcement learning and careful fine-tuning are often there; else triple learning_rate or muon_lr."
        return Finding("look", f"The learning rate is low: {says} {advice}")
    return Finding("good", f"The learning rate is usual: {says}")


def _of_loss(run: Run) -> list[Finding]:
    """Return what is wrong with the loss."""
    findings = []
    if steps := sorted(run.traces.get("not_finite", {})):
        more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
        text = f"The loss was not finite at step {', '.join(f'{step:,}' for step in steps[:5])}{more}."
        findings.append(Finding("bad", text))
    losses = run.losses
    if len(losses) < _FEWEST_LOSSES:
        return findings
    tenth = len(losses) // 10
    tenths = [losses[i : i + tenth] for i in range(0, tenth * 10, tenth)]
    medians = [statistics.median(loss for _, loss in points) for points in tenths]
    first, best, last = medians[0], min(medians), medians[-1]
    # 1.4826 times the median absolute deviation is a normal distribution's standard deviation, whatever outliers do.
    noise = 1.4826 * statistics.median(abs(loss - last) for _, loss in tenths[-1])
    if last > best + max(2 * noise, 0.02 * abs(best)):
        where = tenths[medians.index(best)][tenth // 2][0]
        text = f"The loss rose from {best:.4g} around step {where:,} to {last:.4g}: look at the rates, warmup and data."
        findings.append(Finding("bad", text))
    elif first - last < 0.01 * abs(first):
        text = f"The loss has hardly fallen: {first:.4g} in the first tenth of the run, {last:.4g} in the last."
        findings.append(Finding("look", text))
    return findings


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:,.0f} %"
