"""Results of a sweep's trials: losses, scores, and the rate with the lowest loss."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_STEPS = ("step", "current_steps", "global_step")
_FEWEST = 10  # steps in the last half, below which nothing is known of their swing
# The error with which Muon ends a run; other words of "not finite" may be a harmless line before another error.
_OWN_ERROR = re.compile(r"RuntimeError: .*has a gradient that is not finite")
_EVAL_LOSS = re.compile(r"eval_(\w+_)?loss")


@dataclass
class Trial:
    """A short run, and what came out of it.

    Attributes:
        optimizer: `muon` or `adamw`.
        rate: the learning rate.
        status: `finished`, `diverged` (a loss or gradient is not finite) or `failed`.
        reason: why it diverged or failed, or what is remarkable.
        losses: the training loss by step.
        eval_loss: of the last evaluation; the mean if there are several data sets; None without one.
        steps: the number of steps that were asked for.
        seconds: how long it took, the start of the command included.
        added: the rate is not the user's, but next to the best of the user's.
    """

    optimizer: str
    rate: float
    status: str = "finished"
    reason: str = ""
    losses: dict[int, float] = field(default_factory=dict)
    eval_loss: float | None = None
    steps: int = 0
    seconds: float = 0.0
    added: bool = False

    @property
    def name(self) -> str:
        """Optimizer and rate, for people."""
        return f"{NAMES[self.optimizer]} at {rate_text(self.rate)}"

    @property
    def last(self) -> dict[int, float]:
        """The losses of the last tenth of the steps."""
        return {step: loss for step, loss in self.losses.items() if step > self.steps - max(1, self.steps // 10)}

    @property
    def first(self) -> dict[int, float]:
        """The losses of the first tenth of the steps."""
        return {step: loss for step, loss in self.losses.items() if step <= max(min(self.losses), self.steps // 10)}

    @property
    def loss(self) -> float | None:
        """The mean loss of the last tenth of the steps; None unless the trial finished."""
        return statistics.fmean(self.last.values()) if self.status == "finished" else None

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold: losses that are not finite are None."""
        finite = {step: loss if math.isfinite(loss) else None for step, loss in self.losses.items()}
        return {**asdict(self), "losses": finite, "loss": self.loss}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Trial:
        """Return a trial of what `as_json` returned."""
        losses = {int(step): math.nan if loss is None else loss for step, loss in row["losses"].items()}
        return cls(**{**{key: value for key, value in row.items() if key != "loss"}, "losses": losses})


NAMES = {"muon": "Muon", "adamw": "AdamW"}


def rate_text(rate: float) -> str:
    """Return a rate as people write it: 0.002, 1e-4, 2.5e-5."""
    mantissa, exponent = f"{rate:.5e}".split("e")
    return f"{rate:g}" if rate >= 1e-3 else f"{float(mantissa):g}e{int(exponent)}"


# --- reading


def read_losses(*files: Path) -> tuple[dict[int, float], float | None]:
    """Return the training loss by step and the last evaluation loss, of the first file that has any.

    Args:
        files: JSON lines, or a `trainer_state.json`; they may not exist, and may end in half a line.
    """
    for file in files:
        losses: dict[int, float] = {}
        evaluation = None
        for line in _lines(file):
            step = next((line[key] for key in _STEPS if key in line), None)
            if isinstance(step, int) and isinstance(line.get("loss"), (int, float)):
                losses[step] = float(line["loss"])
            means = [value for key, value in line.items() if _EVAL_LOSS.fullmatch(key)]
            if means and all(isinstance(value, (int, float)) for value in means):
                evaluation = statistics.fmean(means)
        if losses:
            return losses, evaluation
    return {}, None


def _lines(file: Path) -> Iterable[Mapping[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    if file.suffix == ".json":
        try:
            yield from json.loads(text).get("log_history", [])
        except ValueError:
            return
    for line in text.split("\n") if file.suffix == ".jsonl" else ():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            yield content


def judge(trial: Trial, code: int, output: Sequence[str]) -> None:
    """Set the status and the reason of a trial that has ended.

    Args:
        trial: with its losses.
        code: the exit status of the command.
        output: the last lines that it printed.
    """
    broken = next((step for step, loss in sorted(trial.losses.items()) if not math.isfinite(loss)), None)
    complaint = next((line for line in reversed(output) if _OWN_ERROR.search(line)), None)
    last = max(trial.losses, default=0)
    if broken is not None:
        trial.status, trial.reason = "diverged", f"the loss is {trial.losses[broken]} at step {broken}"
    elif trial.eval_loss is not None and not math.isfinite(trial.eval_loss):
        trial.status, trial.reason, trial.eval_loss = "diverged", "the evaluation loss is not finite", None
    elif code and complaint:
        trial.status, trial.reason = "diverged", f"step {last + 1}: {complaint.strip()[:200]}"
    elif code:
        words = output[-1].strip()[:200] if output else "no output"
        trial.status, trial.reason = "failed", f"exit status {code}: {words}"
    elif not trial.losses:
        trial.status = "failed"
        trial.reason = (
            "no loss was logged: neither through transformers' Trainer with hf_muon installed, nor in a "
            "trainer_state.json or trainer_log.jsonl in its output_dir"
        )
    elif not trial.last:
        trial.status, trial.reason = "failed", f"the last loss is of step {last} of {trial.steps}"
    elif (loss := trial.loss) is not None and loss > (first := statistics.fmean(trial.first.values())):
        trial.reason = f"the loss rose from {first:.4g}"


# --- comparing


def scores(trials: Iterable[Trial]) -> dict[float, tuple[float, Trial]]:
    """Return score and trial by rate, of finished trials of one optimizer, ascending.

    The score is the evaluation loss if all of them have one, else the mean loss of the last tenth of the steps.
    """
    finished = sorted((trial for trial in trials if trial.status == "finished"), key=lambda trial: trial.rate)
    evaluated = evaluates(finished)
    by_rate = {}
    for trial in finished:
        score = trial.eval_loss if evaluated else trial.loss
        assert score is not None
        by_rate[trial.rate] = (score, trial)
    return by_rate


def evaluates(trials: Iterable[Trial]) -> bool:
    """Return whether all finished trials have an evaluation loss."""
    return all(trial.eval_loss is not None for trial in trials if trial.status == "finished")


def best_of(trials: Iterable[Trial]) -> Trial | None:
    """Return the finished trial with the lowest score; None without one."""
    by_rate = scores(trials)
    return min(by_rate.values(), key=lambda pair: pair[0])[1] if by_rate else None


def is_close(a: Trial, b: Trial) -> bool:
    """Return whether two trials are too close to tell apart: their gap is no larger than it swings from step to step.

    Trials see the same batches, so that differences at equal steps are compared: their mean over the last tenth of the
    steps with twice their standard deviation over the last half. The gap between two curves drifts, so that
    neighbouring steps are no independent observations, and more of them make a mean no surer.
    """
    gaps = {step: a.losses[step] - b.losses[step] for step in a.losses.keys() & b.losses.keys() if step > a.steps // 2}
    last = [gap for step, gap in gaps.items() if step in a.last]
    if not last or len(gaps) < _FEWEST:
        return True
    return abs(statistics.fmean(last)) <= 2 * statistics.stdev(gaps.values())


def recommendation(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the rate with the lowest score of Muon's trials: `rate`, `score`, `close`, `edge` and the text for people.

    `close` are the rates that are too close to it to tell; `edge` says whether no lower or no higher rate was tried.
    Without a finished trial of Muon, `rate` is None.
    """
    muon = [trial for trial in trials if trial.optimizer == "muon"]
    best = best_of(muon)
    if best is None:
        return {"rate": None, "text": "No trial with Muon finished."}
    by_rate = scores(muon)
    close = [rate for rate, (_, trial) in by_rate.items() if rate != best.rate and is_close(best, trial)]
    score = by_rate[best.rate][0]
    tried = [trial.rate for trial in muon if trial.status != "failed"]
    edge = best.rate in (min(tried), max(tried))
    measure = "evaluation loss" if evaluates(muon) else "loss"
    text = f"Lowest {measure}: {score:.4g} at learning_rate {rate_text(best.rate)}{_gaps(best, muon)}"
    text += f"; too close to tell from it: {_listed(close)}" if close else ""
    caveats = ["short runs favour higher rates than long ones", "this is one seed"]
    if edge:
        caveats.insert(0, f"no {'higher' if best.rate == max(tried) else 'lower'} rate was tried")
    if best.reason:
        caveats.insert(0, "even here " + best.reason)
    text += f"; but {', '.join(caveats[:-1])}, and {caveats[-1]}."
    adamw = [trial for trial in trials if trial.optimizer == "adamw"]
    if rival := best_of(adamw):
        same = evaluates([*muon, *adamw])
        theirs = rival.eval_loss if same else rival.loss
        ours = best.eval_loss if same else best.loss
        assert theirs is not None
        assert ours is not None
        near = ", too close to tell" if is_close(best, rival) else ""
        side = "above" if theirs >= ours else "below"
        gap = f"{abs(theirs - ours):.2g} {side} Muon's{near}"
        text += f" AdamW's lowest is {theirs:.4g} at {rate_text(rival.rate)}, {gap}."
    return {"rate": best.rate, "score": score, "close": close, "edge": edge, "text": text}


def _gaps(best: Trial, trials: Sequence[Trial]) -> str:
    """Say how much lower a score is than those of the neighbouring rates, or that these diverged."""
    by_rate = scores(trials)
    rates = sorted(trial.rate for trial in trials if trial.status != "failed")
    k = rates.index(best.rate)
    words = [""]
    for rate in (rates[i] for i in (k - 1, k + 1) if 0 <= i < len(rates)):
        gap = f"{by_rate[rate][0] - by_rate[best.rate][0]:.2g} below that at " if rate in by_rate else ""
        words.append(f"{gap}{rate_text(rate)}{'' if gap else ' diverged'}")
    return ", ".join(words)


def _listed(rates: Sequence[float]) -> str:
    words = [rate_text(rate) for rate in rates]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
