"""What a study still has to train, in an order that gives useful tables early, from the rows that it has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evidence.results import FAILED, Row, loss_of
from evidence.study import FINAL, TUNE, Study, Trial
from evidence.tuning import Point, best_of_repeated, is_inside, next_point, point_to_repeat

_TYPICAL_MOVES = 2  # points beyond the best one and its neighbours that a search asks for
_RATE = 8e10  # FLOP/s of one core at a hidden size of 128, where nothing is measured; wider models are faster
_EAGER = 1.5  # how many times faster eager attention makes these short sequences, under autocast
_START_SECONDS = 15.0  # of a process and its evaluations


@dataclass
class Search:
    """The tuning of a side in a cell.

    Attributes:
        losses: of the points that have a row, with the seed by which the search moves.
        trials: all trials of these points, one for each seed.
        repeated: the losses of points, with one seed after another.
        complete: no neighbour of the best point is untried, or no more trials are allowed.
        next: the trial that the search asks for; None if it is complete, or waits for a running trial.
    """

    losses: dict[Point, float]
    trials: dict[Point, list[Trial]]
    repeated: dict[Point, list[float]]
    complete: bool
    next: Trial | None

    @property
    def count(self) -> int:
        """Number of trials that have a row."""
        return sum(map(len, self.trials.values()))

    @property
    def best(self) -> Trial | None:
        point = best_of_repeated(self.repeated)
        return None if point is None else self.trials[point][0]

    def add(self, trial: Trial, loss: float) -> None:
        """Enter the row of a trial."""
        self.trials.setdefault(trial.point, []).append(trial)
        self.repeated.setdefault(trial.point, []).append(loss)


def search(study: Study, cell: str, side: str, rows: Mapping[str, Row]) -> Search:
    """Repeat a side's search from its rows: each point follows from the losses of those before it."""
    ladders = list(study.ladders(side).values())
    one = Search({}, {}, {}, complete=False, next=None)
    while len(one.losses) < study.most and (point := next_point(ladders, one.losses)) is not None:
        trial = study.tuning(cell, side, point)
        if trial.id not in rows:
            one.next = trial
            return one
        one.losses[point] = loss_of(rows[trial.id])
        one.add(trial, one.losses[point])
    one.complete = True  # repetitions are asked for by `searches`, which knows how many trials the others have needed
    return one


def searches(study: Study, cell: str, rows: Mapping[str, Row]) -> dict[str, Search]:
    """Return the searches of all sides of a cell, which all get as many trials as the one that needs most."""
    by_side = {side: search(study, cell, side, rows) for side in study.sides_of(cell) if study.ladders(side)}
    if not all(one.complete for one in by_side.values()):
        return by_side
    target = max([study.least, *(one.count + study.repeats for one in by_side.values())])
    for side, one in by_side.items():
        while one.next is None and one.count < target:
            point = point_to_repeat(one.repeated)
            trial = study.tuning(cell, side, point, repetition=len(one.repeated[point]))
            if trial.id in rows:
                one.add(trial, loss_of(rows[trial.id]))
            else:
                one.next = trial
    return by_side


def is_tuned(by_side: Mapping[str, Search]) -> bool:
    """Return whether all sides of a cell are tuned with equally many trials."""
    return all(one.complete and one.next is None for one in by_side.values())


def has_best_inside(study: Study, side: str, one: Search) -> bool:
    """Return whether a finished search ended with its best point inside."""
    return is_inside(list(study.ladders(side).values()), one.losses)


def wanted(study: Study, rows: Mapping[str, Row]) -> Iterator[Trial]:
    """Yield the trials that can run now: cell by cell, each tuned and then trained with one seed after the other."""
    for cell in study.cells:
        by_side = searches(study, cell, rows)
        open_searches = [one.next for one in by_side.values() if one.next is not None]
        trials = sorted(
            open_searches, key=lambda trial: sum(row["side"] == trial.side for row in _tuning_rows(rows, cell))
        )
        if is_tuned(by_side):
            trials += [trial for seed in study.seeds for trial in finals(study, cell, by_side, seed)]
        for trial in trials:
            if start := study.cells[cell].get("start"):
                first = study.start(start, trial.seed)
                if first.id not in rows:
                    yield first
                    continue
            if trial.id not in rows:
                yield trial


def _tuning_rows(rows: Mapping[str, Row], cell: str) -> list[Row]:
    return [row for row in rows.values() if row["cell"] == cell and row["kind"] == TUNE]


def finals(study: Study, cell: str, by_side: Mapping[str, Search], seed: int) -> list[Trial]:
    """Return the final trials of a cell with one seed, at the best settings of each side."""
    trials = []
    for side in study.sides_of(cell):
        if side not in by_side:
            trials.append(study.final(cell, side, {}, seed))
        elif (best := by_side[side].best) is not None:
            trials.append(study.final(cell, side, best.values, seed))
    return trials


def all_trials(study: Study, rows: Mapping[str, Row]) -> list[Trial]:
    """Return the trials of a study that its rows belong to or that can run now, without repetitions."""
    trials = list(wanted(study, rows))
    for cell in study.cells:
        by_side = searches(study, cell, rows)
        trials += [
            trial for one in by_side.values() for trials_of_point in one.trials.values() for trial in trials_of_point
        ]
        if is_tuned(by_side):
            trials += [trial for seed in study.seeds for trial in finals(study, cell, by_side, seed)]
    trials += [study.start(name, seed) for name in study.starts for seed in (study.tuning_seed, *study.seeds)]
    return list({trial.id: trial for trial in trials}.values())


def failed_rows(rows: Mapping[str, Row]) -> list[str]:
    """Return the ids of trials that ended with an error."""
    return [name for name, row in rows.items() if row["status"] == FAILED]


# --- time


def remaining(study: Study, rows: Mapping[str, Row]) -> tuple[int, float]:
    """Estimate how many trials a study still needs, and their seconds on one core.

    The number of trials that a search will take is not known: what is typical is taken.
    """
    count, seconds = 0, 0.0
    for cell in study.cells:
        by_side = searches(study, cell, rows)
        each = seconds_of(study, cell, rows)
        missing = 0
        for side, one in by_side.items():
            least = max(study.least, 1 + 2 * len(study.ladders(side)) + _TYPICAL_MOVES)
            if not is_tuned(by_side):
                missing += max(least + study.repeats - one.count, int(one.next is not None))
        kinds = [row for row in rows.values() if row["cell"] == cell and row["kind"] == FINAL]
        missing += max(0, len(study.seeds) * len(study.sides_of(cell)) - len(kinds))
        count, seconds = count + missing, seconds + missing * each
    for name, start in study.starts.items():
        missing = sum(study.start(name, seed).id not in rows for seed in (study.tuning_seed, *study.seeds))
        count, seconds = count + missing, seconds + missing * _guess(study, start)
    return count, seconds


def seconds_of(study: Study, cell: str, rows: Mapping[str, Row]) -> float:
    """Return the mean seconds of a cell's trials, or a guess by FLOPs scaled by the study's other cells."""
    own = [_seconds(row) for row in rows.values() if row["cell"] == cell and row["cpu_seconds"]]
    if own:
        return sum(own) / len(own)
    others = [row for row in rows.values() if row["cpu_seconds"] and row["cell"] in study.cells]
    ratios = [_seconds(row) / _guess(study, study.cells[row["cell"]]) for row in others]
    return _guess(study, study.cells[cell]) * (sum(ratios) / len(ratios) if ratios else 1.0)


def _seconds(row: Row) -> float:
    """Return the processor seconds of a trial: on a busy machine it takes longer."""
    return float(row["cpu_seconds"]) + _START_SECONDS


def _guess(study: Study, cell: Mapping[str, Any]) -> float:
    from evidence.models import parameters_of

    sizes = study.model_sizes[str(cell["model"])]
    settings = {**study.content["training"], **cell.get("training", {})}
    rate = _RATE * (_EAGER if settings.get("attention") == "eager" else 1.0)
    flops = 6 * parameters_of(sizes) * float(str(cell["tokens"]))
    return float(flops / (rate * (sizes["hidden"] / 128) ** 0.6) + _START_SECONDS)


def without_running(trials: Iterator[Trial], running: Collection[str]) -> Trial | None:
    """Return the first trial that is not running; None if there is none."""
    return next((trial for trial in trials if trial.id not in running), None)
