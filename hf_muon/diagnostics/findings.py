"""What a run's metrics say: its learning rate, its loss, and the matrices that differ from others. Rules of thumb."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_muon.diagnostics.run_file import Run, Table

USUAL_UPDATE = (1e-4, 1e-2)
"""Relative updates that are usual: a factor of ten around the 1e-3 of Karpathy's makemore, part 3."""
RULES_OF_THUMB = (
    "These are rules of thumb, not measurements of this model. A relative update of 0.01 % to 1 % is a factor of ten "
    "around the 0.1 % that Karpathy (makemore, part 3) gives for any optimizer; no experiment with Muon is behind it. "
    "The limits for spikes, outliers, time and growth are hf_muon's own choice. Runs at other rates (hf-muon sweep) "
    "say more."
)
"""Where the limits come from, for people."""
USUAL_ERROR = (0.1, 0.3)
"""Orthogonality errors that are usual after five Newton-Schulz steps."""
MATCHED_UPDATE = (0.85, 1.15)
"""RMS of updates with `match_rms_adamw`, in units of `update_rms`: of directions with a usual orthogonality error."""

_WINDOW = 20
_MOST_STEPS = 500
_LARGE_SHARE = 0.15
_LARGE_FACTOR = 3.0


class Finding(NamedTuple):
    """A sentence about a run, whose level is `good`, `look` (worth a look) or `bad`."""

    level: str
    text: str


class Spike(NamedTuple):
    """The step and the value of the highest loss of a jump, the usual loss before it, and whether it came back."""

    step: int
    value: float
    usual: float
    is_over: bool


class Outlier(NamedTuple):
    """A matrix, its median relative update, and the median over the others of its kind."""

    name: str
    value: float
    usual: float


def spikes(losses: Sequence[tuple[int, float]]) -> list[Spike]:
    """Return the spikes of a loss.

    A loss is high if it is more than 6 standard deviations, estimated from the median absolute deviation, and more than
    3 % above the median of the last 20 losses that were not. High losses in a row are one spike. After 20 of them, the
    loss has not come back, and is compared with itself from there on.
    """
    before: deque[float] = deque(maxlen=_WINDOW)
    spike: list[tuple[int, float]] = []
    usual = 0.0
    result = []

    def end(*, is_over: bool) -> None:
        if spike:
            step, value = max(spike, key=lambda point: point[1])
            result.append(Spike(step, value, usual, is_over))
            spike.clear()

    for step, loss in losses:
        if len(before) >= _WINDOW // 2:
            usual = statistics.median(before)
            spread = 1.4826 * statistics.median([abs(value - usual) for value in before])
            if loss > usual + max(6 * spread, 0.03 * abs(usual)):
                spike.append((step, loss))
                if len(spike) >= _WINDOW:
                    values = [value for _, value in spike]
                    end(is_over=False)
                    before.clear()
                    before.extend(values)
                continue
        end(is_over=True)
        before.append(loss)
    end(is_over=False)
    return result


def while_rate_is_high(run: Run, table: Table) -> Tensor:
    """Return the rows of a table at which the rate of Muon is at least half its maximum, at most 500 of them."""
    rates = run.traces.get("muon_lr", {})
    half = max(rates.values(), default=0.0) / 2
    rows = [i for i, step in enumerate(table.steps) if rates.get(step, 0.0) >= half] or list(range(len(table.steps)))
    return table.values[rows[:: -(-len(rows) // _MOST_STEPS) or 1]]


def typical(run: Run, measure: str) -> dict[str, float]:
    """Return the median of a measure for each parameter, while the rate is at least half its maximum."""
    table = run.table(measure)
    if not table.names:
        return {}
    medians = torch.nanquantile(while_rate_is_high(run, table), 0.5, dim=0).tolist()
    return {name: value for name, value in zip(table.names, medians, strict=True) if math.isfinite(value)}


def outliers(run: Run) -> list[Outlier]:
    """Return the parameters whose relative update is at least 3 times larger or smaller than usual, the farthest first.

    Usual is the median over parameters of the same kind, or over all matrices for a kind with fewer than three. The
    factor must be five times the median absolute deviation, too, in logarithms.
    """
    result: list[tuple[float, Outlier]] = []
    for measure in ("relative_update", "adamw_relative_update"):
        values = {name: value for name, value in typical(run, measure).items() if value > 0}
        by_kind: dict[str, list[str]] = {}
        for name in values:
            by_kind.setdefault(run.kinds[name][1], []).append(name)
        for names in by_kind.values():
            peers = names if len(names) >= 3 else list(values) if measure == "relative_update" else []
            if len(peers) < 3:
                continue
            logs = [math.log(values[name]) for name in peers]
            middle = statistics.median(logs)
            spread = 1.4826 * statistics.median([abs(value - middle) for value in logs])
            for name in names:
                distance = abs(math.log(values[name]) - middle)
                if distance > max(math.log(_LARGE_FACTOR), 5 * spread):
                    result.append((distance, Outlier(name, values[name], math.exp(middle))))
    return [outlier for _, outlier in sorted(result, key=lambda pair: -pair[0])]


def diagnose(run: Run) -> list[Finding]:
    """Return what the metrics of a run say, its learning rate first."""
    losses = run.losses
    trouble = _trouble(run, losses)
    findings = [_of_rate(run, losses, trouble)]
    errors = list(typical(run, "orthogonality_error").values())
    shares = list(run.traces.get("time_share", {}).values())
    table = run.table("weight_rms")
    ratios = table.values[-1] / table.values[len(table.steps) // 2] if len(table.steps) > _WINDOW else torch.zeros(0)
    growth = torch.nanquantile(ratios, 0.5).item() if len(ratios) else 0.0
    if errors and (middle := statistics.median(errors)) > USUAL_ERROR[1]:
        text = f"Orthogonality error {middle:.2f} in the median over matrices, above the usual {USUAL_ERROR[1]}: "
        text += "ns_steps is small, or updates have a low rank (few tokens a step; see the stable rank)."
        findings.append(Finding("look", text))
    if shares and (share := statistics.median(shares)) > _LARGE_SHARE:
        text = f"The optimizer takes {share:.0%} of a training step. More tokens a step (batch, gradient accumulation) "
        findings.append(Finding("look", text + "make that less."))
    if growth > 1.5:
        text = f"Weights have grown {growth:.1f} times in the second half of the run (median over matrices), "
        text += "which makes updates smaller relative to them. Weight decay bounds it (Moonlight uses 0.1)."
        findings.append(Finding("look", text))
    return findings


def _trouble(run: Run, losses: Sequence[tuple[int, float]]) -> list[str]:
    """Return what is wrong with the loss, in words."""
    words = []
    if run.not_finite:
        words.append(f"the loss was not finite at step {_listed(sorted(set(run.not_finite)))}")
    own = spikes(losses)
    if len(own) > 2 or any(not spike.is_over for spike in own):
        words.append(f"the loss spiked at step {_listed([spike.step for spike in own])}")
    tenth = len(losses) // 10
    if tenth >= 3:
        parts = [losses[i : i + tenth] for i in range(0, tenth * 10, tenth)]
        medians = [statistics.median(loss for _, loss in part) for part in parts]
        best = min(range(10), key=lambda i: medians[i])
        last = [loss for _, loss in parts[-1]]
        noise = 1.4826 * statistics.median([abs(loss - medians[-1]) for loss in last])
        if medians[-1] > medians[best] + max(2 * noise, 0.02 * abs(medians[best])):
            words.append(
                f"the loss rose from {medians[best]:.4g} around step {parts[best][tenth // 2][0]} to {medians[-1]:.4g}"
            )
    return words


def _of_rate(run: Run, losses: Sequence[tuple[int, float]], trouble: Sequence[str]) -> Finding:
    """Return whether the learning rate looks too high or too low, and why."""
    medians = list(typical(run, "relative_update").values())
    harm = " and ".join(trouble)
    if not medians:
        text = "Learning rate: no matrix has a relative update here."
        return Finding("bad", f"{text} {_sentence(harm)}") if harm else Finding("look", text)
    calm = "The loss shows no harm." if losses else "The file has no loss."
    size, low, high = statistics.median(medians), *USUAL_UPDATE
    rate = max(run.traces["muon_lr"].values())
    when = f"median, while the rate is at least half of {rate:.3g}"
    moves = f"a step moves a matrix by {_percent(size)} of its size ({when})"
    usual = f"by rule of thumb, usual is {_percent(low)} to {_percent(high)}"
    if size > high:
        if harm:
            advice = f"Try {rate / 3:.2g}, or a longer warmup."
            return Finding("bad", f"The learning rate looks too high: {moves}; {usual}; {harm}. {advice}")
        return Finding(
            "look",
            f"The learning rate is high: {moves}; {usual}. {calm} Short runs of small models from random weights bear "
            f"this; for a long run try {rate / 3:.2g}, too.",
        )
    if size < low:
        steps = max(run.steps)
        total = f"all {steps:,} steps together by at most {_percent(size * steps)}"
        if (fall := _fall(losses)) is not None and fall < 0.01 and not harm:
            advice = f"The loss has hardly fallen. Try {rate * 3:.2g}."
            return Finding("bad", f"The learning rate looks too low: {moves}, {total}; {usual}. {advice}")
        note = "Reinforcement learning and careful fine-tuning are often there; in pretraining it is too low."
        return Finding("look", f"The learning rate is low: {moves}, {total}; {usual}. {note} {_sentence(harm)}".strip())
    if harm:
        hint = f"Try {rate / 3:.2g}" if size > high / 3 else "Muon's updates are no reason for it"
        adamw = list(typical(run, "adamw_relative_update").values())
        other = f" (AdamW's relative updates: {_percent(statistics.median(adamw))})" if adamw else ""
        return Finding(
            "bad",
            f"{_sentence(harm)} {hint}; else look at warmup, adamw_lr{other}, clipping and data. The rate is usual: "
            f"{moves}; {usual}.",
        )
    return Finding("good", f"The learning rate is usual: {moves}; {usual}. {calm}")


def _fall(losses: Sequence[tuple[int, float]]) -> float | None:
    """Return by which part the loss has fallen from its first tenth to its last; None with fewer than 20 losses."""
    if len(losses) < 20:
        return None
    tenth = len(losses) // 10
    first, last = (statistics.median(loss for _, loss in part) for part in (losses[:tenth], losses[-tenth:]))
    return (first - last) / abs(first) if first else None


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _listed(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return ", ".join(f"{step:,}" for step in steps[:5]) + more


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:,.0f} %"
