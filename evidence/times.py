"""How long a step takes: the sides of a cell in turn, step by step, in one CSV file."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from statistics import median

from evidence.corpus import BUILD, Corpus
from evidence.processes import launch, machine, source, versions
from evidence.results import read_rows, write_rows
from evidence.study import Study

FILE = "times.csv"
COLUMNS = ("id", "study", "cell", "side", "tokens_per_step", "milliseconds", "machine", "versions", "source", "date")
TURNS, WARM_UP = 33, 3
"""Steps of each side, and how many of the first ones do not count."""
PROGRAM = ("-m", "evidence.time_steps")

Times = Mapping[tuple[str, str], list[float]]
"""Processor milliseconds of steps by cell and side; the sides of a cell have taken them in turn."""


def measure(study: Study, out: Path, corpus: Corpus, core: int | None) -> None:
    """Measure the cells of a study with final trials whose sides are not all in the file yet.

    Args:
        study: whose sides are compared.
        out: folder of the file.
        corpus: the text.
        core: to pin the process to; None for no pinning.

    Raises:
        RuntimeError: a process fails.
    """
    known = read_times(study, out)
    cells = [cell for cell in study.cells if any((cell, side) not in known for side in study.sides_of(cell))]
    for cell in cells if study.seeds else ():
        print(f"{time.strftime('%H:%M:%S')} {study.name}, {cell}: a step of each side", flush=True)
        found = _measure_cell(study, cell, corpus, core)
        rows = dict(read_rows(out / FILE))
        for side, steps in found.items():
            name = f"{study.name}/{cell}/{side}"
            rows[name] = {
                "id": name,
                "study": study.name,
                "cell": cell,
                "side": side,
                "tokens_per_step": str(study.cells[cell]["batch"] * study.content["context"]),
                "milliseconds": " ".join(f"{value:.2f}" for value in steps),
                "machine": machine(),
                "versions": versions(),
                "source": source(),
                "date": date.today().isoformat(),
            }
        write_rows(out / FILE, rows.values(), COLUMNS)


def _measure_cell(study: Study, cell: str, corpus: Corpus, core: int | None) -> dict[str, list[float]]:
    specs = {}
    for side in study.sides_of(cell):
        values = study.values(cell, side, (0,) * len(study.ladders(cell, side)))
        specs[side] = study.final(cell, side, values, study.seeds[0]).spec
    folder = BUILD / "times" / study.name / cell.replace("/", " ")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    process = launch(PROGRAM, {"sides": specs, "turns": TURNS, "warm_up": WARM_UP}, corpus, folder, core)
    try:
        status = process.wait()
    finally:
        process.kill()
    if status:
        raise RuntimeError(f"measuring {study.name}, {cell} failed: see {folder / 'output.log'}")
    found: dict[str, list[float]] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def read_times(study: Study, out: Path) -> Times:
    """Return what the file says of a study; nothing if there is no file."""
    return {
        (row["cell"], row["side"]): [float(value) for value in row["milliseconds"].split()]
        for row in read_rows(out / FILE).values()
        if row["study"] == study.name
    }


def quicker(own: list[float], reference: list[float]) -> float:
    """Return how many times quicker than the reference's a side's step is: the median over turns."""
    return median(other / one for one, other in zip(own, reference, strict=True))
