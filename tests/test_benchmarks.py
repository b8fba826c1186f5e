"""The benchmarks run, on shapes so small that their numbers mean nothing, and write what can be read."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_muon.math.precision import compute_dtype

BENCH = Path(__file__).parent.parent / "benchmarks" / "bench.py"
# Columns that hold a number wherever a side runs.
NUMBERS = {
    "orthogonalization": ("ms", "speedup", "gflop", "gemm fraction", "peak mb", "sigma min", "sigma max"),
    "optimizer_step": ("ms", "speedup", "x adamw", "peak mb"),
    "share": ("share", "from smallest"),
    "growth": ("ms", "speedup", "gflop"),
}


def bench(*options):
    return subprocess.run([sys.executable, str(BENCH), *options], capture_output=True, text=True, timeout=300)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_benchmark_runs_and_writes_a_csv(tmp_path):
    done = bench("--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    machine = json.loads((tmp_path / "machine.json").read_text())
    for benchmark, numbers in NUMBERS.items():
        found = rows(tmp_path / f"{benchmark}.csv")
        measured = [row for row in found if row[numbers[0]]]
        assert {"hf_muon", "torch.optim.Muon"} <= {row["side"].removesuffix(" + AdamW") for row in measured}
        assert all(math.isfinite(float(row[name])) for row in measured for name in numbers), benchmark
        # Those that did not run say so; models that are only modelled are not measured.
        assert all(row.get("note") or row.get("kind") == "modelled" for row in found if not row[numbers[0]])
        assert machine[benchmark]["torch"]
        assert machine[benchmark]["quick"] is True
    # The sides do the same: orthogonal to their bands, and weights of the same step as ours.
    orthogonal = rows(tmp_path / "orthogonalization.csv")
    assert all(float(row["outside"]) < 0.07 for row in orthogonal if row["ms"])
    # Where the CPU multiplies bf16 the sides do, too, and both are as far from exact numbers as
    # tests/math/test_newton_schulz.py lets bf16 be; another scale or another matrix is off by half and more.
    bound = 4 * 3e-2 if compute_dtype("auto", "cpu") is torch.bfloat16 else 1e-3
    assert all(float(row["parted"]) < bound for row in rows(tmp_path / "optimizer_step.csv") if row["parted"])
    assert "| square, times as fast as torch.optim.Muon's |" in (tmp_path / "tables.md").read_text()
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert pictures == set(NUMBERS) or ("no pictures: " in done.stdout and not pictures)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "sped"], "invalid choice: 'sped'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--rounds", "0"], "'0' is not an integer of at least 1"),
        (["--dion", os.devnull], "not a checkout of microsoft/dion"),
        (["--redraw", "--out", os.devnull], "holds no CSV of orthogonalization"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_not_valid_is_said_at_once(options, message):
    done = bench(*options)
    assert done.returncode == 2
    assert message in done.stderr
