"""Find each optimizer's learning rate for the demo: its YAML file as it is, once per learning rate.

    python examples/demo/sweep.py [adamw] [muon]

Two runs at a time on one thread each. Every finished one adds a row to examples/demo/sweep.csv, and a row that
is there is not run again. As long as an optimizer's best learning rate is its smallest or largest, the next one
beyond is tried as well.
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
    """The ladder 1, 2, 5, 10, 20, 50, ... in both directions; rung 0 is 1."""
    return float(f"{(1, 2, 5)[rung % 3]}e{rung // 3}")


def sweep(name: str, content: str) -> None:
    """Fill the table for one optimizer until its best learning rate has a neighbour on either side."""
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
    """What all rows to be compared share: data, model, and all else in the YAML file that can change the result."""
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
    """Held-out loss by learning rate; a run that diverged counts as infinitely bad."""
    rows = [row for row in read_table() if row["optimizer"] == name and row["setup"] == setup]
    found = {float(row["learning_rate"]): float(row["held_out_loss"]) for row in rows}
    return {key: math.inf if math.isnan(loss) else loss for key, loss in found.items()}


def add(row: Row) -> None:
    rows = sorted([*read_table(), row], key=lambda row: (row["optimizer"], row["setup"], float(row["learning_rate"])))
    partial = TABLE.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row.keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(TABLE)


def report(name: str, content: str) -> None:
    found = losses(name, setup_of(name, content))
    best = min(found, key=lambda key: found[key])
    used = float(read_config(name)["learning_rate"])
    print(f"{name}: " + ", ".join(f"{key:g} {found[key]:.4f}" for key in sorted(found)))
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
