"""Find each optimizer's best learning rate for the demo: run its YAML file once for each learning rate.

    python examples/demo/sweep.py [adamw] [muon]

Two runs at a time use one thread each. Every finished run adds a row to examples/demo/sweep.csv, and learning rates
that already have a row are skipped. While the best learning rate of an optimizer is the smallest or largest one, the
sweep tries the next one beyond it.
"""

from __future__ import annotations

import csv
import math
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path

from prepare import BUILD, ROOT, prepare
from training import (
    CONFIGS,
    fingerprint,
    held_out_loss,
    read_config,
    tokens_per_step,
    train_command,
    train_environment,
    versions,
)

TABLE = ROOT / "examples" / "demo" / "sweep.csv"
FIRST_RUNGS = range(-8, -5)  # 2e-3 to 1e-2
NOT_THE_SETUP = {
    *("optim", "learning_rate", "output_dir"),
    *("logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit"),
}

Row = dict[str, str]


def rate(rung: int) -> float:
    """Return a rung of the ladder 1, 2, 5, 10, 20, 50, ..., which continues below 1; rung 0 is 1."""
    return float(f"{(1, 2, 5)[rung % 3]}e{rung // 3}")


def sweep(name: str, content: str) -> None:
    """Add rows for one optimizer until its best learning rate has a neighbour on each side."""
    setup = setup_of(name, content)
    rungs = list(FIRST_RUNGS)
    while True:
        known = losses(name, setup)
        missing = [rung for rung in rungs if rate(rung) not in known]
        with ThreadPoolExecutor(max_workers=2) as pool:
            for future in as_completed([pool.submit(measure, name, setup, rate(rung)) for rung in missing]):
                add(future.result())
        known = losses(name, setup)
        best = min(rungs, key=lambda rung: known[rate(rung)])
        if best == rungs[0]:
            rungs.insert(0, best - 1)
        elif best == rungs[-1]:
            rungs.append(best + 1)
        else:
            return


def setup_of(name: str, content: str) -> str:
    """Return a fingerprint of what comparable rows share: data, model, and the settings that can change the result."""
    return fingerprint(content, {k: v for k, v in read_config(name).items() if k not in NOT_THE_SETUP})


def measure(name: str, setup: str, learning_rate: float) -> Row:
    folder = BUILD / "sweep" / f"{name}_{learning_rate:g}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = train_command(
        name,
        learning_rate=learning_rate,
        output_dir=folder.relative_to(ROOT),
        eval_strategy='"no"',
        save_strategy='"no"',
    )
    print(f"{name} at {learning_rate:g}", flush=True)
    with (folder / "output.log").open("w") as log:
        code = subprocess.call(command, cwd=ROOT, env=train_environment(threads=1), stdout=log, stderr=log)
    loss = held_out_loss(folder)
    if code or loss is None:
        sys.exit(f"{' '.join(command)} failed, see {folder / 'output.log'}")
    print(f"{name} at {learning_rate:g}: {loss:.4f}", flush=True)
    config = read_config(name)
    return {
        "optimizer": name,
        "learning_rate": f"{learning_rate:g}",
        "held_out_loss": f"{loss:.4f}",
        "steps": str(config["max_steps"]),
        "tokens_per_step": str(tokens_per_step(config)),
        "setup": setup,
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": " ".join(f"{package}=={number}" for package, number in versions().items()),
    }


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {model}"


def read_table() -> list[Row]:
    if not TABLE.is_file():
        return []
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def losses(name: str, setup: str) -> dict[float, float]:
    """Return the held-out loss for each learning rate; it is infinite for a run that diverged."""
    rows = [row for row in read_table() if row["optimizer"] == name and row["setup"] == setup]
    by_rate = {float(row["learning_rate"]): float(row["held_out_loss"]) for row in rows}
    return {key: math.inf if math.isnan(loss) else loss for key, loss in by_rate.items()}


def add(row: Row) -> None:
    rows = sorted([*read_table(), row], key=lambda row: (row["optimizer"], row["setup"], float(row["learning_rate"])))
    partial = TABLE.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row.keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(TABLE)


def report(name: str, content: str) -> None:
    by_rate = losses(name, setup_of(name, content))
    best = min(by_rate, key=lambda key: by_rate[key])
    used = float(read_config(name)["learning_rate"])
    print(f"{name}: " + ", ".join(f"{key:g} {by_rate[key]:.4f}" for key in sorted(by_rate)))
    print(f"  best {best:g}" + ("" if used == best else f", while {CONFIGS[name].relative_to(ROOT)} says {used:g}"))


def main(names: list[str]) -> None:
    if unknown := set(names) - set(CONFIGS):
        sys.exit(f"unknown optimizer {', '.join(unknown)}; there are {', '.join(CONFIGS)}")
    content = str(prepare()["content"])
    for name in names or CONFIGS:
        sweep(name, content)
        report(name, content)


if __name__ == "__main__":
    main(sys.argv[1:])
