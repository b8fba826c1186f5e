"""Tables of all studies from their CSV files, in Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from evidence.agenda import Search, has_best_inside, remaining, searches
from evidence.budgets import budgets_table
from evidence.conclusions import conclusion, verdict
from evidence.pictures import curves_picture, rates_picture
from evidence.results import DONE, Row, loss_of, losses_of, read_rows
from evidence.significance import Difference, mean_curve, paired, speed_up, spread
from evidence.study import FINAL, TUNE, Study

Rows = Mapping[str, Row]
_HEAD = """# Evidence: the tables

Written by `make evidence` from the CSV files beside this one; [how it is measured](../README.md). Losses are in nats a
token, of text that no tuning has seen. "±" is the standard deviation over seeds, with the number of seeds behind it.
*Beside the reference* is the mean difference of pairs with the same seed, with its standard deviation, and *p* that of
Student's t-test of these pairs; in `rival` the reference is the side of the same scale. *Fewer steps* is how many times
fewer steps a side takes to the reference's final loss (below 1: the reference is faster to the side's), *less time* the
same in processor time. The models are small and the runs short: a table speaks for its own sizes only.
"""


def draw(studies: Sequence[Study], out: Path) -> None:
    """Write `tables.md` and the pictures of all studies that have rows."""
    sections = [_HEAD]
    for study in studies:
        rows = read_rows(out / f"{study.name}.csv")
        sections.append(section(study, rows))
        for name, picture in pictures(study, rows).items():
            (out / f"{name}.svg").write_text(picture, encoding="utf-8")
            sections.append(f"![{study.name}: {name}]({name}.svg)\n")
    out.mkdir(parents=True, exist_ok=True)
    (out / "tables.md").write_text("\n".join(sections), encoding="utf-8")


def section(study: Study, rows: Rows) -> str:
    """Return a study's heading, state and tables."""
    lines = [f"## {study.name}", "", study.question, "", _state(study, rows), ""]
    if not rows:
        return "\n".join(lines)
    if finals := [row for row in rows.values() if row["kind"] == FINAL]:
        lines += [finals_table(study, rows, finals), ""]
        if budgets := budgets_table(study, rows):
            lines += [budgets, ""]
    if any(row["kind"] == TUNE for row in rows.values()):
        lines += [tuning_table(study, rows), ""]
    if bad := [row for row in rows.values() if row["status"] != DONE]:
        lines += [
            "Trials that did not end:",
            "",
            *(f"- `{row['id']}`: {row['status']} {row['reason']}" for row in bad),
            "",
        ]
    return "\n".join(lines)


def _state(study: Study, rows: Rows) -> str:
    count, seconds = remaining(study, rows)
    if not rows:
        return f"Not begun: about {count} trials, {seconds / 3600:.1f} core-hours."
    done = f"{len(rows)} trials"
    state = (
        f"{done}, complete." if not count else f"{done}; about {count} are missing, {seconds / 3600:.1f} core-hours."
    )
    where = "; ".join(
        sorted(
            {f"{row['machine']}, {row['versions'].replace('==', ' ')}, text {row['corpus']}" for row in rows.values()}
        )
    )
    return f"{state} Measured on {where}."


# --- final trials


def finals_table(study: Study, rows: Rows, finals: Iterable[Row]) -> str:
    """Return the means of all cells and sides, each beside the reference side of its cell."""
    by_side: dict[tuple[str, str], list[Row]] = {}
    for row in finals:
        by_side.setdefault((row["cell"], row["side"]), []).append(row)
    forgets = any(row["other_loss"] for row in rows.values())
    heads = [
        "cell",
        "side",
        "settings",
        "test loss",
        "beside the reference",
        "p",
        "fewer steps",
        "less time",
        "ms a step",
    ]
    heads += ["loss on the old text", "change", "movement"] if forgets else []
    heads += ["what it shows"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    sentences = []
    for cell in study.cells:
        tests = {}
        for side in study.sides_of(cell):
            if own := by_side.get((cell, side)):
                reference = by_side.get((cell, study.reference_of(side)), [])
                test = None if side == study.reference_of(side) else _difference(own, reference)
                if test is not None:
                    tests[side] = test
                lines.append(_line(_final_cells(study, cell, side, own, reference, test, forgets)))
        sentences.append(conclusion(cell, tests))
    return "\n".join([*lines, *(f"\n{sentence}" for sentence in sentences if sentence)])


def _difference(own: Sequence[Row], reference: Sequence[Row]) -> Difference | None:
    """Return the difference of two sides; None where they have no seed in common."""
    losses = [{row["seed"]: loss_of(row) for row in rows if row["status"] == DONE} for rows in (own, reference)]
    return paired(*losses) if losses[0].keys() & losses[1].keys() else None


def _final_cells(
    study: Study,
    cell: str,
    side: str,
    own: Sequence[Row],
    reference: Sequence[Row],
    test: Difference | None,
    forgets: bool,
) -> list[str]:
    finished = [row for row in own if row["status"] == DONE]
    values = " ".join(
        f"{key} {value:g}" if isinstance(value, float | int) else f"{key} {value}"
        for key, value in json.loads(own[0]["settings"]).items()
    )
    cells = [cell, side, values or "as in the YAML file"]
    if not finished:
        return [*cells, f"{own[0]['status']} ({len(own)})", *[""] * (8 if forgets else 5), "does not train"]
    losses = [loss_of(row) for row in finished]
    milliseconds = fmean(1000 * float(row["cpu_seconds"]) / int(row["steps"]) for row in finished)
    others = [row for row in reference if row["status"] == DONE]
    compared = ["", "", "", ""]
    shows = "the reference" if side == study.reference_of(side) else "the reference is missing"
    if test is None and others and side != study.reference_of(side):
        shows = "no seed in common with the reference"
    if test is not None:
        times = speed_up([losses_of(row) for row in finished], [losses_of(row) for row in others])
        other_ms = fmean(1000 * float(row["cpu_seconds"]) / int(row["steps"]) for row in others)
        compared = [test.text(), _probability(test.p)]
        compared += ["", ""] if times is None else [f"{times:.2f}x", f"{times * other_ms / milliseconds:.2f}x"]
        shows = verdict(test)
    old = []
    if forgets:
        change = [float(row["other_loss"]) - float(row["other_loss_before"]) for row in finished]
        old = [spread([float(row["other_loss"]) for row in finished]), f"{fmean(change):+.4f}"]
        old += [f"{fmean(float(row['movement']) for row in finished):.3f}"]
    return [*cells, spread(losses), *compared, f"{milliseconds:.0f}", *old, shows]


def _probability(p: float) -> str:
    return "" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


# --- tuning trials


def tuning_table(study: Study, rows: Rows) -> str:
    """Return what the searches have found, with their numbers of trials."""
    heads = ["cell", "side", "trials", "best", "by a parabola", "validation loss", "search"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for cell in study.cells:
        for side, one in searches(study, cell, rows).items():
            if one.best is not None:
                values = " ".join(f"{key} {value:g}" for key, value in one.best.values.items())
                losses = one.repeated[one.best.point]
                lines.append(
                    _line(
                        [
                            cell,
                            side,
                            str(one.count),
                            values,
                            _vertex(study, side, one),
                            spread(losses),
                            _search_state(study, side, one),
                        ]
                    )
                )
    return (
        "Tuned on validation text; once the searches of a cell are done, its sides have equal trials, the last of "
        "which repeat the leading points with other seeds (their number is behind the loss):\n\n" + "\n".join(lines)
    )


def _vertex(study: Study, side: str, one: Search) -> str:
    """Return the rate at the vertex of the parabola through the best rung and its neighbours; nothing at an edge."""
    ladder = next(iter(study.ladders(side).values()))
    best = min(one.losses, key=one.losses.__getitem__)
    low, middle, high = (one.losses.get((best[0] + step, *best[1:]), math.inf) for step in (-1, 0, 1))
    bend = low - 2 * middle + high
    if ladder.choices or not math.isfinite(bend) or bend <= 0:
        return ""
    return f"{float(ladder.start) * ladder.factor ** (float(best[0]) + (low - high) / (2 * bend)):.2g}"


def _search_state(study: Study, side: str, one: Search) -> str:
    if not one.complete:
        return "not done"
    return "best inside" if has_best_inside(study, side, one) else "best at an edge, no more trials allowed"


# --- pictures


def pictures(study: Study, rows: Rows) -> dict[str, str]:
    """Return the pictures of a study by file name without its ending."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for cell in study.cells:
        for side in study.sides_of(cell):
            finals = [row for row in rows.values() if (row["cell"], row["side"], row["kind"]) == (cell, side, FINAL)]
            if curves := [losses_of(row) for row in finals if row["status"] == DONE]:
                panels.setdefault(cell, {})[side] = mean_curve(curves)
    rates: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows.values():
        if row["kind"] == TUNE and row["status"] == DONE:
            line = rates.setdefault(row["cell"], {}).setdefault(row["side"], {})
            rate = float(next(iter(json.loads(row["settings"]).values())))  # the first ladder is that of the rate
            line[rate] = min(loss_of(row), line.get(rate, math.inf))
    drawn = {}
    if panels:
        drawn[f"{study.name}-curves"] = curves_picture(panels, list(study.sides))
    if any(len(line) > 1 for panel in rates.values() for line in panel.values()):
        drawn[f"{study.name}-rates"] = rates_picture(
            {cell: rates[cell] for cell in study.cells if cell in rates}, list(study.sides)
        )
    return drawn


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
