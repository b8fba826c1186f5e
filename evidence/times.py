"""How long a step takes: the sides of a cell in turn, step by step, in one CSV file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from statistics import median

from evidence.corpus import Corpus
from evidence.processes import launch, locked, machine, new_folder, source, terminated_as_interrupted, versions
from evidence.results import Row, read_rows, write_rows
from evidence.study import Study, Trial

FILE = "times.csv"
COLUMNS = (
    *("id", "study", "cell", "side", "tokens_per_step", "milliseconds"),
    *("setup", "machine", "versions", "source", "date"),
)
TURNS, WARM_UP = 33, 3
"""Steps of each side, and how many of the first ones do not count."""
PROGRAM = ("-m", "evidence.time_steps")

Times = Mapping[tuple[str, str], list[float]]
"""Processor milliseconds of steps by cell and side; the sides of a cell have taken them in turn."""


def measure(study: Study, out: Path, corpus: Corpus, core: int | None) -> None:
    """Measure the cells of a study with final trials that the file does not have as the YAML file has them.

    Args:
        study: whose sides are compared.
        out: folder of the file.
        corpus: the text.
        core: to pin the processes to; None for no pinning.

    Raises:
        RuntimeError: a side fails, or another process measures.
    """
    path = out / FILE
    with locked(path), terminated_as_interrupted():
        for cell in study.cells if study.seeds else ():
            trials = {side: _trial(study, cell, side) for side in study.sides_of(cell)}
            setups = {side: trial.setup(corpus.name) for side, trial in trials.items()}
            known = {row["side"]: row for row in _rows_of(study, path) if row["cell"] == cell}
            if all(side in known and known[side]["setup"] == setup for side, setup in setups.items()):
                continue
            print(f"{time.strftime('%H:%M:%S')} {study.name}, {cell}: a step of each side", flush=True)
            found = _measure_cell(study.name, cell, trials, corpus, core)
            rows = [row for row in read_rows(path).values() if (row["study"], row["cell"]) != (study.name, cell)]
            for side, steps in found.items():
                row = {
                    "id": f"{study.name}/{cell}/{side}",
                    "study": study.name,
                    "cell": cell,
                    "side": side,
                    "tokens_per_step": str(trials[side].spec["batch"] * trials[side].spec["context"]),
                    "milliseconds": " ".join(f"{value:.2f}" for value in steps),
                    "setup": setups[side],
                    "machine": machine(),
                    "versions": versions(),
                    "source": source(),
                    "date": date.today().isoformat(),
                }
                rows.append(row)
            write_rows(path, rows, COLUMNS)


def _trial(study: Study, cell: str, side: str) -> Trial:
    """Return a trial at the first settings of the search: a step takes as long at any rate."""
    values = study.values(cell, side, (0,) * len(study.ladders(cell, side)))
    return study.final(cell, side, values, study.seeds[0])


def _measure_cell(
    name: str, cell: str, trials: Mapping[str, Trial], corpus: Corpus, core: int | None
) -> dict[str, list[float]]:
    folder = new_folder("times", f"{name}-{cell.replace('/', ' ')}")
    specs = {side: trial.spec for side, trial in trials.items()}
    process = launch(PROGRAM, {"sides": specs, "turns": TURNS, "warm_up": WARM_UP}, corpus, folder, core)
    try:
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    if status:
        raise RuntimeError(
            f"measuring the steps of {name}, {cell} failed: see {folder / 'output.log'}. Repair it and run the study "
            "again; the tables of what is there come from python -m evidence draw"
        )
    found: dict[str, list[float]] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def _rows_of(study: Study, path: Path) -> list[Row]:
    return [row for row in read_rows(path).values() if row["study"] == study.name]


def read_times(study: Study, out: Path) -> Times:
    """Return what the file says of a study; nothing if there is no file."""
    return {
        (row["cell"], row["side"]): [float(value) for value in row["milliseconds"].split()]
        for row in _rows_of(study, out / FILE)
    }


def quicker(own: list[float], reference: list[float]) -> float:
    """Return how many times quicker than the reference's a side's step is: the median over turns."""
    return median(other / one for one, other in zip(own, reference, strict=True))
