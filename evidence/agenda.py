"""What a study still has to train, in an order that gives useful tables early, from the rows that it has."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from evidence.results import FAILED, Row, loss_of
from evidence.study import TUNE, Study, Trial
from evidence.tuning import Ladder, Point, best_of_repeated, next_point, point_to_repeat, untried_neighbour, vertex

_ROUNDS = 4  # of repetitions
_MORE_REPEATS = 2  # trials a round after the first
_TYPICAL_MOVES = 2  # points beyond the best one and its neighbours that a search asks for
_RATE = 8e10  # FLOP/s of one core at a hidden size of 128, where nothing is measured; wider models are faster
_EAGER = 1.5  # how many times faster eager attention makes these short sequences, under autocast
_START_SECONDS = 15.0  # of a process and its evaluations


@dataclass
class Search:
    """The tuning of a side in a cell.

    Attributes:
        ladders: of the settings that are tuned.
        losses: of the points that have a row, with the seed by which the search moves.
        trials: all trials of these points, one for each seed.
        repeated: the losses of points, with one seed after another.
        complete: no neighbour of the best point is untried, or no more trials are allowed.
        next: the trial that the search asks for; None if it is complete, or waits for a running trial.
    """

    ladders: list[Ladder]
    losses: dict[Point, float] = field(default_factory=dict)
    trials: dict[Point, list[Trial]] = field(default_factory=dict)
    repeated: dict[Point, list[float]] = field(default_factory=dict)
    complete: bool = False
    next: Trial | None = None

    @property
    def count(self) -> int:
        """Number of trials that have a row."""
        return sum(map(len, self.trials.values()))

    @property
    def best(self) -> Trial | None:
        point = best_of_repeated(self.repeated)
        return None if point is None else self.trials[point][0]

    @property
    def state(self) -> str:
        """What can be said of the best point, in words."""
        best = best_of_repeated(self.repeated)
        if best is None or not self.complete or self.next is not None:
            return "not done"
        if untried_neighbour(self.ladders, self.losses, best) or not math.isfinite(self.losses[best]):
            return "best at an edge, no more trials allowed"
        if any(ladder.ends_at(rung) for ladder, rung in zip(self.ladders, best, strict=True)):
            return "best at the end of a list"
        return "best inside"

    def add(self, trial: Trial, rows: Mapping[str, Row]) -> bool:
        """Enter the row of a trial; without one, ask for the trial and return False."""
        if trial.id not in rows:
            self.next = trial
            return False
        loss = loss_of(rows[trial.id])
        self.losses.setdefault(trial.point, loss)
        self.trials.setdefault(trial.point, []).append(trial)
        self.repeated.setdefault(trial.point, []).append(loss)
        return True


def search(study: Study, cell: str, side: str, rows: Mapping[str, Row]) -> Search:
    """Repeat a side's search from its rows: each point follows from the losses of those before it."""
    one = Search(list(study.ladders(cell, side).values()))
    while len(one.losses) < study.most and (point := next_point(one.ladders, one.losses)) is not None:
        if not one.add(study.tuning(cell, side, point), rows):
            return one
    one.complete = True  # repetitions are asked for by `searches`, which knows how many trials the others have needed
    return one


def searches(study: Study, cell: str, rows: Mapping[str, Row]) -> dict[str, Search]:
    """Return the searches of all sides of a cell, which all get as many trials as the one that needs most.

    Leading points are repeated with other seeds. Where another point wins by them and has neighbours that were not
    tried, these are tried, and a round of repetitions follows.
    """
    by_side = {side: search(study, cell, side, rows) for side in study.sides_of(cell) if study.ladders(cell, side)}
    if not all(one.complete for one in by_side.values()):
        return by_side
    repeats = study.repeats(cell)
    for last in (*[False] * (_ROUNDS - 1), True):
        target = max([study.least, *(len(one.losses) + repeats for one in by_side.values())])
        for side, one in by_side.items():
            _repeat(study, cell, side, one, rows, target)
        if last or any(one.next for one in by_side.values()):
            break  # the last round ends with equal trials
        grown = [_extend(study, cell, side, one, rows) for side, one in by_side.items()]
        if not any(grown) or any(one.next for one in by_side.values()):
            break
        repeats += min(study.repeats(cell), _MORE_REPEATS)
    if not any(one.next for one in by_side.values()):
        for side, one in by_side.items():
            if _add_others(study, cell, side, one, rows):
                _extend(study, cell, side, one, rows)
    return by_side


def _repeat(study: Study, cell: str, side: str, one: Search, rows: Mapping[str, Row], target: int) -> None:
    while one.count < target:
        point = point_to_repeat(one.repeated)
        if not one.add(study.tuning(cell, side, point, repetition=len(one.repeated[point])), rows):
            return


def _add_others(study: Study, cell: str, side: str, one: Search, rows: Mapping[str, Row]) -> bool:
    """Enter repetitions that a search with another beginning has left; return whether there are any.

    They are beyond the equal trials, and may change which point is the best.
    """
    count = one.count
    for point in list(one.losses):
        while (trial := study.tuning(cell, side, point, repetition=len(one.repeated[point]))).id in rows:
            one.add(trial, rows)
    return one.count > count


def _extend(study: Study, cell: str, side: str, one: Search, rows: Mapping[str, Row]) -> bool:
    """Try the neighbours of the point that leads by its mean; return whether there is one that the search had not."""
    grown = False
    while len(one.losses) < study.most and (best := best_of_repeated(one.repeated)) is not None:
        point = untried_neighbour(one.ladders, one.losses, best)
        if point is None:
            break
        grown = True
        if not one.add(study.tuning(cell, side, point), rows):
            break
    return grown


def is_tuned(by_side: Mapping[str, Search]) -> bool:
    """Return whether all sides of a cell are tuned with equally many trials."""
    return all(one.complete and one.next is None for one in by_side.values())


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
            if (start := study.start_of(trial)) is not None and start.id not in rows:
                yield start
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
        elif (values := best_values(study, cell, side, by_side[side])) is not None:
            trials.append(study.final(cell, side, values, seed))
    return trials


def best_values(study: Study, cell: str, side: str, one: Search) -> dict[str, Any] | None:
    """Return the settings of a side's final trials: those of the best point, or of the parabola's vertex near it."""
    if one.best is None:
        return None
    point = one.best.point
    return study.values(cell, side, point, vertex(one.ladders, one.repeated, point) if study.between else None)


def final_rows(study: Study, rows: Mapping[str, Row]) -> dict[tuple[str, str], list[Row]]:
    """Return the rows of final trials by cell and side, without those of settings that are the best no longer."""
    result: dict[tuple[str, str], list[Row]] = {}
    for cell in study.cells:
        by_side = searches(study, cell, rows)
        for seed in study.seeds:
            for trial in finals(study, cell, by_side, seed):
                if trial.id in rows:
                    result.setdefault((cell, trial.side), []).append(rows[trial.id])
    return result


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
    finished = final_rows(study, rows)
    for cell in study.cells:
        by_side = searches(study, cell, rows)
        each = seconds_of(study, cell, rows)
        missing = 0
        for side, one in by_side.items():
            least = max(study.least, 1 + 2 * len(study.ladders(cell, side)) + _TYPICAL_MOVES)
            if not is_tuned(by_side):
                missing += max(least + study.repeats(cell) - one.count, int(one.next is not None))
        done = sum(len(finished[cell, side]) for side in study.sides_of(cell) if (cell, side) in finished)
        missing += len(study.seeds) * len(study.sides_of(cell)) - done
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
