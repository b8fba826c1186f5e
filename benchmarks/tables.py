"""CSV files of the benchmarks, and the Markdown tables that follow from them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
BENCHMARKS = ("orthogonalization", "optimizer_step")
OURS, TORCH = "hf_muon", "torch.optim.Muon"


def write(folder: Path, benchmark: str, rows: Sequence[Row], machine: Row) -> None:
    """Write the rows as CSV, and the machine of the measurement into machine.json."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / f"{benchmark}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            values = (row.get(name, "") for name in names)
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])
    path = folder / "machine.json"
    machines = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**machines, benchmark: machine}, indent=2) + "\n")


def read(folder: Path, benchmark: str) -> list[Row]:
    """Read the rows of a benchmark, with numbers as floats and without empty entries; none if there is no file."""
    path = folder / f"{benchmark}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: _value(text) for name, text in row.items() if text != ""} for row in csv.DictReader(file)]


def _value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)] + [""]


# --- text of figures


def _milli(x: float) -> str:
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def _ratio(x: float) -> str:
    return f"{x:.2f}"


def _three(x: float) -> str:
    return f"{x:.3g}"


def _whole(x: float) -> str:
    return f"{x:.0f}"


def _figure(row: Row, column: str, text: Callable[[float], str], *, ranged: bool = True) -> str:
    """Return a figure with its range, "median (least-greatest)", if the row has one; "-" without the figure."""
    if column not in row:
        return "-"
    if not ranged or f"{column} min" not in row:
        return text(row[column])
    return f"{text(row[column])} ({text(row[f'{column} min'])}-{text(row[f'{column} max'])})"


# Headings: the column of the CSV, and how it is written.
_STEP: dict[str, tuple[str, Callable[[Any], str]]] = {
    "model": ("model", str),
    "optimizer": ("side", str),
    "ms": ("ms", _milli),
    f"times as fast as {TORCH} + AdamW": ("speedup", _ratio),
    "x fused AdamW": ("x adamw", _ratio),
    "GFLOP": ("gflop", _three),
    "of GEMM rate": ("gemm fraction", _ratio),
    "peak extra MB": ("peak mb", _three),
    "parted": ("parted", lambda x: f"{x:.0e}"),
    "kernels": ("kernels", _whole),
    "launches, counted": ("launches", _whole),
    "waits, counted": ("waits", _whole),
    "bytes a weight, counted": ("traffic", _three),
    "host ms": ("host ms", _milli),
    "note": ("note", str),
}
_PIVOTS = {
    "Milliseconds": ("ms", _milli),
    f"Times as fast as {TORCH}'s": ("speedup", _ratio),
    "Fraction of the GEMM rate, of the FLOPs that are executed": ("gemm fraction", _ratio),
    "GFLOP": ("gflop", _three),
    "Extra memory at the peak, MB": ("peak mb", _three),
    "Launches on an accelerator, counted": ("launches", _whole),
    "Elementwise traffic on an accelerator, counted, bytes an element": ("traffic", _three),
    "Milliseconds of the host, on meta tensors": ("host ms", _milli),
}


# --- the page


def summary(folder: Path) -> Path:
    """Write tables.md from the CSV files of a folder, and return its path."""
    machines = json.loads((folder / "machine.json").read_text())
    lines = ["Written by `make bench` from the CSV files of this folder; [how](../../README.md).", ""]
    for benchmark, of in zip(BENCHMARKS, (_orthogonalization, optimizer_step), strict=True):
        if rows := read(folder, benchmark):
            machine = machines[benchmark]
            lines += [f"## {benchmark}", "", _machine(machine), "", *of(rows)]
            left_out = [f"Left out, {package}: {why}" for package, why in machine["left out"].items()]
            lines += [line for line in left_out if line not in lines] + [""]
    path = folder / "tables.md"
    path.write_text("\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n")
    return path


def _machine(m: Row) -> str:
    where = m["cpu"] if m["device"] == "cpu" else f"{m['device']}, {m['cpu']}"
    return (
        f"{m['date']}, {where}, torch {m['torch']}, hf_muon `{m['hf_muon']}`, {m['dtype']} products "
        f"({m['GEMM GFLOP/s']} GFLOP/s at {m['GEMM size']}), {m['threads per rank']} thread(s), {m['clock']}, "
        f"{m['rounds']} rounds, load {m['load before']:.1f} to {m['load']:.1f}. Medians (least-greatest)."
    )


def _orthogonalization(rows: list[Row]) -> list[str]:
    names = list(dict.fromkeys(row["side"] for row in rows))
    shapes: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        shapes.setdefault((f"{row['model']} {row['layer']}", row["shape"]), {})[row["side"]] = row
    lines = []
    for title, spec in _PIVOTS.items():
        body = [
            [*shape, *(_figure(by[name], *spec, ranged=name == OURS) for name in names)] for shape, by in shapes.items()
        ]
        lines += [f"{title}:", "", *table(["layer", "shape", *names], body)]
    body = []
    for name in names:
        if own := [row for row in rows if row["side"] == name and "outside" in row]:
            low, high = min(row["sigma min"] for row in own), max(row["sigma max"] for row in own)
            band = f"{own[0]['band low']:.3f}-{own[0]['band high']:.3f}"
            worst = max(row["outside"] for row in own)
            body.append([name, str(own[0].get("version", "-")), band, f"{low:.3f}-{high:.3f}", f"{worst:.1e}"])
    lines += ["Singular values over all shapes:", ""]
    return lines + table(["function", "version", "range of its coefficients", "found", "farthest outside"], body)


def optimizer_step(rows: list[Row]) -> list[str]:
    """Return the lines of the table of whole steps, without the columns that no row has."""
    models = {row["model"]: row for row in rows if "muon weights" in row}
    sizes = [
        f"- {name}: {row['scaled']}; {row['muon weights'] / 1e6:.3g} M weights by Muon, "
        f"{row['adamw weights'] / 1e6:.3g} M by AdamW"
        for name, row in models.items()
    ]
    shown = {head: spec for head, spec in _STEP.items() if any(spec[0] in row for row in rows)}
    return [*sizes, "", *table(list(shown), [[_figure(row, *spec) for spec in shown.values()] for row in rows])]
