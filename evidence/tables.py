"""Tables of all studies from their CSV files, in Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from evidence.agenda import final_rows, remaining, searches
from evidence.budgets import Finals, budgets_table
from evidence.conclusions import conclusion, verdict
from evidence.forgetting import HEADS, forgetting_cells, forgetting_panels, starts_table
from evidence.pictures import curves_picture, forgetting_picture, rates_picture
from evidence.results import DONE, Row, loss_of, losses_of, read_rows
from evidence.significance import Difference, mean_curve, paired, speed_up, spread
from evidence.study import FINAL, TUNE, Study
from evidence.times import Times, quicker, read_times
from evidence.tuning_tables import rates_table, tuning_table
from evidence.words import head_of, line_of, probability, settings_text

Rows = Mapping[str, Row]
_HEAD = """# Evidence: the tables

Written by `make evidence` from the CSV files in this folder; [how it is measured](../README.md). Losses are in nats per
token, of text that tuning has not seen. "±" is the standard deviation over seeds, followed by the number of seeds.
*Minus the reference* is the mean difference of pairs with the same seed, with its standard deviation, and *p* that of
Student's t-test of these pairs; in `rival` the reference is the side of the same scale. *Fewer steps* is how many times
fewer steps a side takes to reach the reference's final loss (below 1: the reference reaches the side's loss faster).
*Less time* is the same in processor time: sides took steps in turn, and the median of the ratios within a turn counts
(*ms a step* has the medians of the steps, whose ratio differs a little). It is good to about 6 %. The models are small
and the runs short: results hold only for these sizes.
"""


def draw(studies: Sequence[Study], out: Path) -> None:
    """Write `tables.md` and the pictures of all studies that have rows."""
    sections = [_HEAD]
    for study in studies:
        rows = read_rows(out / f"{study.name}.csv")
        sections.append(section(study, rows, read_times(study, out)))
        for name, picture in pictures(study, rows).items():
            (out / f"{name}.svg").write_text(picture, encoding="utf-8")
            sections.append(f"![{study.name}: {name}]({name}.svg)\n")
    out.mkdir(parents=True, exist_ok=True)
    (out / "tables.md").write_text("\n".join(sections), encoding="utf-8")


def section(study: Study, rows: Rows, times: Times) -> str:
    """Return a study's heading, state and tables."""
    lines = [f"## {study.name}", "", study.question, "", _state(study, rows), ""]
    if not rows:
        return "\n".join(lines)
    if finals := final_rows(study, rows):
        lines += [finals_table(study, finals, times), ""]
        for more in (budgets_table(study, finals), starts_table(study, finals)):
            lines += [more, ""] if more else []
    if any(row["kind"] == TUNE for row in rows.values()):
        lines += [] if study.seeds else [rates_table(study, rows), ""]
        lines += [tuning_table(study, rows), ""]
    others = sum(row["kind"] == FINAL for row in rows.values()) - sum(map(len, finals.values()))
    if others:
        lines += [f"{others} rows of final trials are left out: their settings are not the best, or not yet.", ""]
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


def finals_table(study: Study, finals: Finals, times: Times) -> str:
    """Return the means of all cells and sides, compared with the reference side of each cell.

    Args:
        study: the study.
        finals: rows of final trials by cell and side.
        times: milliseconds of steps; without them nothing is said about time.
    """
    forgets = any(row["other_loss"] for own in finals.values() for row in own)
    heads = ["cell", "side", "settings", "test loss", "minus the reference", "p", "fewer steps", "less time"]
    heads += ["ms a step", *(HEADS if forgets else ()), "what it shows"]
    lines = head_of(heads)
    sentences = []
    for cell in study.cells:
        tests = {}
        for side in study.sides_of(cell):
            if own := finals.get((cell, side)):
                reference = finals.get((cell, study.reference_of(side)), [])
                test = None if side == study.reference_of(side) else _difference(own, reference)
                if test is not None:
                    tests[side] = test
                lines.append(line_of(_final_cells(study, cell, side, own, reference, test, forgets, times)))
        sentences.append(conclusion(cell, tests))
    return "\n".join([*lines, *(f"\n{sentence}" for sentence in sentences if sentence)])


def _difference(own: Sequence[Row], reference: Sequence[Row]) -> Difference | None:
    """Return the difference of two sides; None where a trial has diverged, or they have no seed in common."""
    if any(row["status"] != DONE for row in (*own, *reference)):
        return None
    losses = [{row["seed"]: loss_of(row) for row in rows} for rows in (own, reference)]
    return paired(*losses) if losses[0].keys() & losses[1].keys() else None


def _final_cells(
    study: Study,
    cell: str,
    side: str,
    own: Sequence[Row],
    reference: Sequence[Row],
    test: Difference | None,
    forgets: bool,
    times: Times,
) -> list[str]:
    finished = [row for row in own if row["status"] == DONE]
    cells = [cell, side, settings_text(json.loads(own[0]["settings"])) or "as in the YAML file"]
    blank = [""] * len(HEADS) if forgets else []
    if not finished:
        return [*cells, f"{own[0]['status']} ({len(own)})", *[""] * 5, *blank, "does not train"]
    losses = [loss_of(row) for row in finished]
    others = [row for row in reference if row["status"] == DONE]
    compared = ["", "", "", ""]
    shows = "the reference" if side == study.reference_of(side) else "the reference is missing"
    if others and side != study.reference_of(side):
        shows = "no seed in common with the reference" if len(others) == len(reference) else "the reference diverged"
    if test is not None:
        fewer = speed_up([losses_of(row) for row in finished], [losses_of(row) for row in others])
        measured = [times.get((cell, one)) for one in (side, study.reference_of(side))]
        quick = quicker(*measured) if all(measured) else None
        compared = [test.text(), probability(test.p), "" if fewer is None else f"{fewer:.2f}x"]
        compared.append("" if fewer is None or quick is None else f"{fewer * quick:.2f}x")
        shows = verdict(test)
    if len(finished) < len(own):
        shows = f"{len(own) - len(finished)} of {len(own)} did not end"
    old = forgetting_cells(own, [] if side == study.reference_of(side) else reference) if forgets else []
    step = f"{median(times[cell, side]):.0f}" if (cell, side) in times else ""
    return [*cells, spread(losses), *compared, step, *old, shows]


# --- pictures


def pictures(study: Study, rows: Rows) -> dict[str, str]:
    """Return the pictures of a study by file name without its ending."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for (cell, side), own in final_rows(study, rows).items():
        if curves := [losses_of(row) for row in own if row["status"] == DONE]:
            panels.setdefault(cell, {})[side] = mean_curve(curves)
    rates: dict[str, dict[str, dict[float, float]]] = {}
    for cell in study.cells:
        for side, one in searches(study, cell, rows).items():
            line = rates.setdefault(cell, {}).setdefault(side, {})
            for point, losses in one.repeated.items():
                rate = float(one.ladders[0].value(point[0]))
                line[rate] = min(fmean(losses), line.get(rate, math.inf))
    rates = {
        cell: {side: {rate: loss for rate, loss in line.items() if math.isfinite(loss)} for side, line in panel.items()}
        for cell, panel in rates.items()
        if any(panel.values())
    }
    drawn = {}
    if panels:
        drawn[f"{study.name}-curves"] = curves_picture(panels, list(study.sides))
    if any(len(line) > 1 for panel in rates.values() for line in panel.values()):
        drawn[f"{study.name}-rates"] = rates_picture(rates, list(study.sides))
    if changes := forgetting_panels(study, rows):
        drawn[f"{study.name}-forgetting"] = forgetting_picture(changes, list(study.sides))
    return drawn
