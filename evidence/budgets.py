"""How many times fewer tokens a side needs, from runs of several budgets that all end with a decayed rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from evidence.results import Row, loss_of
from evidence.study import Study

Losses = Mapping[float, float]
"""Mean final test loss by tokens."""
Finals = Mapping[tuple[str, str], list[Row]]
"""Rows of final trials by cell and side."""


def budgets_table(study: Study, finals: Finals) -> str:
    """Return a table of cells that differ only in their token budgets; empty if there are none."""
    lines = []
    for series, cells in _series(study):
        losses = {side: _losses(study, finals, cells, side) for side in study.sides}
        for side, own in losses.items():
            reference = losses.get(study.reference_of(side), {})
            if side != study.reference_of(side) and len(own) > 1 and own.keys() == reference.keys():
                lines.append(
                    f"| {series} | {side} | {_texts(own)} | {_texts(reference)} | {fewer_tokens(own, reference)} |"
                )
    if not lines:
        return ""
    head = [
        "| model and batch | side | its losses by tokens | the reference's | fewer tokens |",
        "| --- | --- | --- | --- | --- |",
    ]
    about = (
        "Tokens to the reference's final loss with its largest budget, interpolated between mean final losses of runs "
        "that were tuned for their budgets, against the logarithm of tokens. The line between two budgets lies above a "
        "curve that flattens, so that a ratio is rather too near to 1 than too far:"
    )
    return "\n".join([about, "", *head, *lines])


def fewer_tokens(own: Losses, reference: Losses) -> str:
    """Return how many times fewer tokens a side takes to the reference's last loss, or a bound where no run is near.

    Below 1 the reference takes fewer to the side's.
    """
    most = max(reference)
    text, tokens = _tokens_to(own, reference[most])
    if tokens is not None:
        return f"{text} {most / tokens:.2f}x".strip()
    text, tokens = _tokens_to(reference, own[most])
    if tokens is None:
        return ""
    return f"{'less than' if text else ''} {tokens / most:.2f}x".strip()


def _tokens_to(losses: Losses, target: float) -> tuple[str, float | None]:
    """Return the tokens to a loss, "more than" if the smallest budget is enough; None if the largest is not."""
    budgets = sorted(losses)
    if losses[budgets[0]] <= target:
        return ("more than" if losses[budgets[0]] < target else ""), budgets[0]
    for low, high in pairwise(budgets):
        if losses[high] <= target:
            share = (losses[low] - target) / (losses[low] - losses[high])
            return "", low * (high / low) ** share
    return "", None


def _series(study: Study) -> Iterator[tuple[str, list[str]]]:
    """Yield a label and the cells of each model and batch that differ in nothing but their budgets."""
    alike: dict[str, list[str]] = {}
    for cell, content in study.cells.items():
        alike.setdefault(
            repr([content.get(name) for name in ("model", "batch", "start", "training", "text")]), []
        ).append(cell)
    for cells in alike.values():
        first = study.cells[cells[0]]
        yield f"{first['model']}, batch {first['batch']}", cells


def _losses(study: Study, finals: Finals, cells: Sequence[str], side: str) -> dict[float, float]:
    """Return the mean losses by tokens, of budgets that all seeds have finished."""
    losses: dict[float, float] = {}
    for cell in cells:
        own = [loss_of(row) for row in finals.get((cell, side), ())]
        if len(own) == len(study.seeds) and all(map(math.isfinite, own)):
            losses[float(study.cells[cell]["tokens"])] = fmean(own)
    return losses


def _texts(losses: Losses) -> str:
    return ", ".join(f"{tokens / 1e6:g}M {loss:.3f}" for tokens, loss in sorted(losses.items()))
