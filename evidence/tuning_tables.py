"""Tables of what the searches have found."""

from __future__ import annotations

from collections.abc import Mapping

from evidence.agenda import Search, searches
from evidence.results import Row
from evidence.significance import spread
from evidence.study import Study
from evidence.tuning import vertex
from evidence.words import head_of, line_of, settings_text

Rows = Mapping[str, Row]


def tuning_table(study: Study, rows: Rows) -> str:
    """Return the best point of each search, with its number of trials."""
    heads = ["cell", "side", "trials", "best", "by a parabola", "validation loss", "search"]
    lines = head_of(heads)
    for cell in study.cells:
        for side, one in searches(study, cell, rows).items():
            if one.best is not None:
                texts = [cell, side, str(one.count), settings_text(one.best.values), _rate(one)]
                lines.append(line_of([*texts, spread(one.repeated[one.best.point]), one.state]))
    return (
        "Tuned on validation text; once the searches of a cell are done, its sides have equal trials, the last of "
        "which repeat the leading points with other seeds (their number is behind the loss). *By a parabola* is the "
        "first setting at the vertex of the parabola through the best one and its neighbours"
        f"{', which the final trials take' if study.between else ''}:\n\n" + "\n".join(lines)
    )


def rates_table(study: Study, rows: Rows) -> str:
    """Return the best rate of each side in each cell, and how far it is from that of the first cell."""
    heads = ["side", *study.cells]
    lines = head_of(heads)
    by_cell = [searches(study, cell, rows) for cell in study.cells]
    for side in study.sides:
        texts = []
        first: float | None = None
        for by_side in by_cell:
            one = by_side.get(side)
            rate = None if one is None or one.next is not None else _vertex(one)
            first = rate if first is None else first
            texts.append("" if rate is None or first is None else f"{rate:.2g} ({rate / first:.2f}x)")
        lines.append(line_of([side, *texts]))
    return (
        "The best rate of each side, at the vertex of the parabola through the best one and its neighbours, and its "
        "ratio to that of the first column. One seed: two rates closer than about 1.4x may not "
        "differ:\n\n" + "\n".join(lines)
    )


def _rate(one: Search) -> str:
    rate = _vertex(one)
    return "" if rate is None else f"{rate:.2g}"


def _vertex(one: Search) -> float | None:
    return None if one.best is None else vertex(one.ladders, one.repeated, one.best.point)
