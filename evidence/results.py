"""The CSV file of a study: a row for each trial, sorted by id, replaced as a whole when a trial ends."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from evidence.study import Trial

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = (
    *("id", "cell", "side", "kind", "settings", "seed", "status", "loss", "part", "steps", "tokens_per_step"),
    *("parameters", "losses", "other_loss_before", "other_loss", "movement", "cpu_seconds", "seconds"),
    *("setup", "corpus", "machine", "versions", "source", "date", "reason"),
)
MEASURED = ("cpu_seconds", "seconds", "machine", "date")
"""Columns that a repeated trial does not repeat."""
DONE, DIVERGED, FAILED = "done", "diverged", "failed"

Row = Mapping[str, str]


def read_rows(path: Path) -> dict[str, Row]:
    """Return the rows of a CSV file by id; none if there is no file."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def write_rows(path: Path, rows: Iterable[Row], columns: Sequence[str] = COLUMNS) -> None:
    """Replace a CSV file, so that an interruption leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: row["id"]))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def add_row(path: Path, row: Row) -> None:
    """Add a row to a CSV file, or replace the row of the same id."""
    write_rows(path, {**read_rows(path), row["id"]: row}.values())


def loss_of(row: Row) -> float:
    """Return the final loss in nats a token; infinite if the trial diverged or failed."""
    return float(row["loss"]) if row["status"] == DONE else math.inf


def losses_of(row: Row) -> dict[int, float]:
    """Return the held-out losses by step."""
    pairs = (pair.split(":") for pair in row["losses"].split())
    return {int(step): float(loss) for step, loss in pairs}


def losses_text(losses: Mapping[int, float]) -> str:
    """Return losses by step as the column holds them."""
    return " ".join(f"{step}:{loss:.5f}" for step, loss in sorted(losses.items()))


def refuse_other_setups(rows: Mapping[str, Row], trials: Sequence[Trial], corpus: str, path: Path) -> None:
    """Check that the rows of trials were measured with the settings and the text of today.

    Raises:
        ValueError: a row was not; the message names it and says whether settings or text differ.
    """
    for trial in trials:
        row = rows.get(trial.id)
        if row is not None and row["setup"] != trial.setup(corpus):
            other_text = row["corpus"] != corpus
            cause = (
                f"other text ({row['corpus']}, not {corpus})" if other_text else "other settings than the YAML file has"
            )
            hint = "install the versions that the row names" if other_text else "remove its rows, or restore the file"
            raise ValueError(f"{path.name}: {trial.id} was trained with {cause}: {hint}, or write elsewhere with --out")
