"""What fine-tuning does to the loss of the text that the start was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from evidence.agenda import searches
from evidence.budgets import Finals
from evidence.results import DONE, Row, loss_of
from evidence.significance import paired, spread
from evidence.study import Study
from evidence.words import head_of, line_of, probability

HEADS = ("old text before", "change on old text", "minus the reference", "p", "movement")
_Measure = Callable[[Row], float]


def forgotten(row: Row) -> float:
    """Return how far the loss of the old text has risen."""
    return float(row["other_loss"]) - float(row["other_loss_before"])


def forgetting_cells(own: Sequence[Row], reference: Sequence[Row]) -> list[str]:
    """Return the cells of `HEADS`.

    Args:
        own: rows of a side.
        reference: those of the reference; empty for itself.
    """
    finished = [row for row in own if row["status"] == DONE]
    compared = ["", ""]
    if _by_seed(own, forgotten).keys() & _by_seed(reference, forgotten).keys():
        test = paired(_by_seed(own, forgotten), _by_seed(reference, forgotten))
        compared = [test.text(), probability(test.p)]
    before = f"{fmean(float(row['other_loss_before']) for row in finished):.4f}"
    movement = f"{fmean(float(row['movement']) for row in finished):.3f}"
    return [before, spread([forgotten(row) for row in finished], sign=True), *compared, movement]


def starts_table(study: Study, finals: Finals) -> str:
    """Return how the lead of each side over the reference depends on the start; empty without two starts.

    A side's difference from the reference is taken in each cell, and the cells' differences are compared by seed.
    """
    cells = [cell for cell, content in study.cells.items() if "start" in content]
    if len(cells) != 2:
        return ""
    lines = []
    for side in study.sides:
        if side == study.reference_of(side):
            continue
        texts = [side]
        for measure in (loss_of, forgotten):
            differences = [_differences(finals, cell, side, study.reference_of(side), measure) for cell in cells]
            if not differences[0].keys() & differences[1].keys():
                break
            test = paired(differences[1], differences[0])
            texts += [test.text(), probability(test.p)]
        else:
            lines.append(line_of(texts))
    if not lines:
        return ""
    heads = ["side", "test loss", "p", "change on old text", "p"]
    about = (
        "Does the start matter more to a side than to the reference? Its difference from the reference in "
        f"*{cells[1]}* minus that in *{cells[0]}*, in pairs of the same seed:"
    )
    return "\n".join([about, "", *head_of(heads), *lines])


def forgetting_panels(study: Study, rows: Mapping[str, Row]) -> dict[str, dict[str, dict[float, float]]]:
    """Return validation losses by the change on old text, a point for each setting that was tried, by cell and side."""
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for cell in study.cells:
        for side, one in searches(study, cell, rows).items():
            for trials in one.trials.values():
                done = [row for trial in trials if (row := rows[trial.id])["status"] == DONE and row["other_loss"]]
                if done:
                    line = panels.setdefault(cell, {}).setdefault(side, {})
                    line[fmean(map(forgotten, done))] = fmean(map(loss_of, done))
    return panels


def _differences(finals: Finals, cell: str, side: str, reference: str, measure: _Measure) -> dict[str, float]:
    own, other = (_by_seed(finals.get((cell, name), []), measure) for name in (side, reference))
    return {seed: own[seed] - other[seed] for seed in own.keys() & other.keys()}


def _by_seed(rows: Sequence[Row], measure: _Measure) -> Mapping[str, float]:
    return {row["seed"]: measure(row) for row in rows if row["status"] == DONE}
