"""CSV files of the benchmarks, and the tables and verdicts that follow from them."""

from __future__ import annotations

import csv
import functools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
BENCHMARKS = ("orthogonalization", "optimizer_step", "share", "growth")
OURS, TORCH = "hf_muon", "torch.optim.Muon"
# Aims: (on a CPU core with bf16, on an H200).
_ASPECTS = (
    ("square", 1.0, 1.01, 1.2, 1.5),
    ("aspect 1:3 to 1:4", 2.9, 4.1, 1.6, 2.0),
    ("aspect 1:5 and beyond", 4.9, 1e9, 2.0, 2.0),
)
_STEP = (1.4, 2.0)
_FRACTION = (0.8, 0.7)
_OUTSIDE = {"float32": 2e-3, "bfloat16": 6e-2, "float16": 2e-2}  # what rounding may add, by dtype


def write(folder: Path, benchmark: str, rows: Sequence[Row], machine: dict[str, Any]) -> None:
    """Write the rows as CSV, and the machine of the measurement into machine.json."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / f"{benchmark}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([[_text(row.get(name, "")) for name in names] for row in rows])
    path = folder / "machine.json"
    machines = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**machines, benchmark: machine}, indent=2) + "\n")


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read(folder: Path, benchmark: str) -> list[Row]:
    """Read the rows of a benchmark, with numbers as floats and without empty cells; none if there is no file."""
    path = folder / f"{benchmark}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: _value(text) for name, text in row.items() if text != ""} for row in csv.DictReader(file)]


def present(folder: Path) -> Iterator[tuple[str, list[Row]]]:
    """Yield each benchmark of which the folder has rows, with its rows."""
    for benchmark in BENCHMARKS:
        if rows := read(folder, benchmark):
            yield benchmark, rows


def _value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def unique(rows: Iterable[Row], *names: str) -> list[Any]:
    """Return the distinct values of a column, or of several columns together, in their order."""
    return list(dict.fromkeys(row[names[0]] if len(names) == 1 else tuple(row[name] for name in names) for row in rows))


def ranged(row: Row, name: str, text: Callable[[float], str]) -> str:
    """Return a figure as the text "median (minimum-maximum)"; its note or "-" if the row lacks it."""
    if name not in row:
        return row.get("note") or "-"
    return f"{text(row[name])} ({text(row[f'{name} min'])}-{text(row[f'{name} max'])})"


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)] + [""]


def _milli(x: float) -> str:
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def _ratio(x: float) -> str:
    return f"{x:.2f}"


def summary(folder: Path) -> Path:
    """Write tables.md from the CSV files of a folder, and return its path."""
    machines = json.loads((folder / "machine.json").read_text())
    lines = ["Made by `bench.py` from the CSV files beside it; see [benchmarks/README.md](../../README.md).", ""]
    write_tables = dict(zip(BENCHMARKS, (_orthogonalization, optimizer_step, _share, _growth), strict=True))
    for benchmark, rows in present(folder):
        lines += [f"## {benchmark}", "", _machine(machines[benchmark]), "", *write_tables[benchmark](rows)]
        lines += [f"Left out, {side}: {why}" for side, why in machines[benchmark]["left out"].items()] + [""]
    lines += ["## Targets", "", *_targets(folder, machines)]
    path = folder / "tables.md"
    path.write_text("\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n")
    return path


def _machine(m: dict[str, Any]) -> str:
    where = m["cpu"] if m["device"] == "cpu" else f"{m['device']}, {m['cpu']}"
    return (
        f"{m['date']}, {where}, torch {m['torch']}, hf_muon `{m['hf_muon']}`, {m['dtype']} products "
        f"({m['GEMM GFLOP/s']} GFLOP/s at {m['GEMM size']}), {m['threads per rank']} thread(s), {m['clock']}, "
        f"{m['rounds']} rounds, load {m['load before']:.1f} to {m['load']:.1f}. Medians (least-greatest)."
    )


def _orthogonalization(rows: list[Row]) -> list[str]:
    shapes = unique(rows, "model", "layer", "shape")
    names = unique(rows, "side")
    by = {(r["model"], r["layer"], r["shape"], r["side"]): r for r in rows}

    def matrix(title: str, column: str, text: Callable[[float], str]) -> list[str]:
        def cell(shape: Any, name: str) -> str:
            key = (*shape, name)
            row = by[key]
            if column not in row:
                return "-"
            return ranged(row, column, text) if name == OURS and f"{column} min" in row else text(row[column])

        body = [[" ".join(shape[:2]), shape[2], *(cell(shape, name) for name in names)] for shape in shapes]
        return [title, "", *table(["layer", "shape", *names], body)]

    lines = matrix("Milliseconds:", "ms", _milli)
    lines += matrix(f"Times as fast as {TORCH}'s:", "speedup", _ratio)
    lines += matrix("Fraction of the GEMM rate, of the FLOPs that a side executes:", "gemm fraction", _ratio)
    lines += matrix("GFLOP that a side executes:", "gflop", lambda x: f"{x:.3g}")
    lines += matrix("Extra memory at the peak, MB:", "peak mb", lambda x: f"{x:.3g}")
    lines += matrix("Launches on an accelerator, counted:", "launches", lambda x: f"{x:.0f}")
    lines += matrix(
        "Elementwise traffic on an accelerator, counted, bytes an element:", "traffic", lambda x: f"{x:.3g}"
    )
    lines += matrix("Milliseconds of the host, on meta tensors:", "host ms", _milli)
    body = []
    for name in names:
        own = [row for row in rows if row["side"] == name and "outside" in row]
        if own:
            low, high = min(row["sigma min"] for row in own), max(row["sigma max"] for row in own)
            worst = max(row["outside"] for row in own)
            band = f"{own[0]['band low']:.3f}-{own[0]['band high']:.3f}"
            body.append([name, str(own[0].get("version", "-")), band, f"{low:.3f}-{high:.3f}", f"{worst:.1e}"])
    lines += ["Singular values over all shapes:", ""]
    return lines + table(["side", "version", "band", "found", "farthest outside"], body)


def optimizer_step(rows: list[Row]) -> list[str]:
    """Return the lines of the table of whole steps."""
    body = [
        [
            row["model"],
            row["side"],
            ranged(row, "ms", _milli),
            ranged(row, "speedup", _ratio) if "speedup" in row else "-",
            ranged(row, "x adamw", _ratio) if "x adamw" in row else "-",
            f"{row['gflop']:.3g}" if "gflop" in row else "-",
            f"{row['gemm fraction']:.2f}" if "gemm fraction" in row else "-",
            f"{row['peak mb']:.3g}" if "peak mb" in row else "-",
            f"{row['parted']:.0e}" if "parted" in row else "-",
            f"{row['kernels']:.0f}" if "kernels" in row else "-",
            f"{row['launches']:.0f}" if "launches" in row else "-",
            f"{row['waits']:.0f}" if "waits" in row else "-",
            f"{row['traffic']:.3g}" if "traffic" in row else "-",
            _milli(row["host ms"]) if "host ms" in row else "-",
        ]
        for row in rows
    ]
    sizes = [
        f"{name}: {scaled}; {muon / 1e6:.3g} M weights by Muon, {adamw / 1e6:.3g} M by AdamW"
        for name, scaled, muon, adamw in unique(
            (row for row in rows if "muon weights" in row), "model", "scaled", "muon weights", "adamw weights"
        )
    ]
    head = [
        "model",
        "side",
        "ms",
        f"times as fast as {TORCH} + AdamW",
        "x fused AdamW",
        "GFLOP",
        "of GEMM rate",
        "peak extra MB",
        "parted",
        "kernels",
        "launches, counted",
        "waits, counted",
        "bytes a weight, counted",
        "host ms",
    ]
    return [*(f"- {size}" for size in sizes), "", *table(head, body)]


def _percent(x: float) -> str:
    return f"{100 * x:.3g} %"


def _share(rows: list[Row]) -> list[str]:
    measured = [row for row in rows if row["kind"] == "measured"]
    body = [
        [
            f"{row['tokens']:.0f}",
            row["side"],
            ranged(row, "share", _percent),
            _percent(row["from smallest"]),
            _percent(row["plan"]) if "plan" in row else "-",
        ]
        for row in measured
    ]
    head = ["tokens a step", "side", "share, measured", "from the smallest step", "`hf-muon plan`, by FLOPs"]
    lines = ["A small Qwen3:", "", *table(head, body)]
    modelled = [row for row in rows if row["kind"] == "modelled"]
    tokens = unique(modelled, "tokens")
    cells = {(row["model"], row["tokens"]): _percent(row["plan"]) for row in modelled}
    body = [[name, *(cells[name, n] for n in tokens)] for name in unique(modelled, "model")]
    return [
        *lines,
        "Modelled by `hf-muon plan`, by FLOPs, on one rank:",
        "",
        *table(["model", *(f"{n:.0f}" for n in tokens)], body),
    ]


def _growth(rows: list[Row]) -> list[str]:
    body = [
        [
            row["kind"],
            row["what"],
            row["side"],
            ranged(row, "ms", _milli),
            f"{row['gflop']:.3g}",
            _ratio(row["speedup"]),
            f"{row['exponent']:.2f}" if "exponent" in row else "-",
        ]
        for row in rows
    ]
    return table(["varied", "what", "side", "ms", "GFLOP", "times as fast as torch's", "exponent"], body)


def _targets(folder: Path, machines: dict[str, Any]) -> list[str]:
    any_machine = next(iter(machines.values()))
    on_cpu = any_machine["device"] == "cpu"
    column = 0 if on_cpu else 1
    body = []

    def verdict(name: str, aim: str, figures: Sequence[float], reached: Callable[[float], bool]) -> None:
        if not figures:
            body.append([name, aim, "not measured", "-"])
            return
        times = sum(map(reached, figures))
        answer = "reached" if times == len(figures) else f"missed in {len(figures) - times} of {len(figures)}"
        spread = f"{min(figures):.3g} to {max(figures):.3g}" if len(figures) > 1 else f"{figures[0]:.3g}"
        body.append([name, aim, spread, answer])

    rows = read(folder, "orthogonalization")
    own = [row for row in rows if row["side"] == OURS and "speedup" in row]
    for name, low, high, *aims in _ASPECTS:
        aim = aims[column]
        figures = [row["speedup"] for row in own if low <= row["aspect"] <= high]
        verdict(f"{name}, times as fast as {TORCH}'s", f">= {aim}", figures, functools.partial(operator.le, aim))
    steps = [row for row in read(folder, "optimizer_step") if row["side"] == OURS]
    figures = [row["speedup"] for row in steps if row["model"] == "Qwen3-0.6B" and "speedup" in row]
    aim = _STEP[column]
    verdict(f"whole step, Qwen3-0.6B, times as fast as {TORCH} + AdamW", f">= {aim}", figures, lambda x: x >= aim)
    fraction = _FRACTION[column]
    figures = [row["gemm fraction"] for row in own if "gemm fraction" in row]
    verdict("fraction of the GEMM rate", f">= {fraction}", figures, lambda x: x >= fraction)
    limit = _OUTSIDE[any_machine["dtype"]]
    figures = [row["outside"] for row in rows if row["side"].startswith(OURS) and "outside" in row]
    verdict("singular values outside of the band", f"none (<= {limit:g}, rounding)", figures, lambda x: x <= limit)
    bounded = [row for row in read(folder, "optimizer_step") if "max batch mb" in row]
    figures = [row["peak mb"] / row["max batch mb"] for row in bounded]
    verdict("extra peak memory of the step, of max_batch_bytes", "<= 1", figures, lambda x: x <= 1)
    lines = table(["target", "aim", "found, least to greatest", "verdict"], body)
    if on_cpu and any_machine["dtype"] != "bfloat16":
        lines.append(
            f"The aims are for hardware with bf16. All sides multiply in {any_machine['dtype']} here: a verdict "
            "says how the forms compare, not what bf16 would give. "
            "No GPU figure is in this folder."
        )
    return lines
