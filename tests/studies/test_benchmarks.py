"""The benchmarks run and write readable files, on shapes so small that their numbers mean nothing."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import gpu, gpu_layouts
from hf_muon.math.elementwise import Elementwise
from hf_muon.math.precision import compute_dtype
from hf_muon.storage.tensors import local_of
from tests.one_card import layouts
from tests.one_card.compiled import Twins

ROOT = Path(__file__).parents[2]
# Columns that hold a number in every row of a side that ran.
NUMBERS = {
    "orthogonalization": (
        *("ms", "speedup", "gflop", "gemm fraction", "peak mb", "sigma min", "sigma max"),
        *("launches", "waits", "traffic", "host ms"),
    ),
    "optimizer_step": ("ms", "speedup", "x adamw", "peak mb"),
}


def program(*words, **changed):
    """Run a program of this folder and return its process."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **changed}
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=ROOT, env=environment)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_benchmark_runs_and_writes_a_csv(tmp_path):
    process = program("-m", "benchmarks.bench", "--quick", "--out", str(tmp_path))
    assert process.returncode == 0, process.stderr
    machine = json.loads((tmp_path / "machine.json").read_text())
    for benchmark, numbers in NUMBERS.items():
        table = rows(tmp_path / f"{benchmark}.csv")
        measured = [row for row in table if row[numbers[0]]]
        assert {"hf_muon", "torch.optim.Muon"} <= {row["side"].removesuffix(" + AdamW") for row in measured}
        assert all(math.isfinite(float(row[name])) for row in measured for name in numbers), benchmark
        assert all(row["note"] for row in table if not row[numbers[0]])  # of sides that did not run
        assert machine[benchmark]["torch"]
        assert machine[benchmark]["quick"] is True
    # One step of a tiny Qwen3, on an accelerator.
    counted = {row["side"]: row for row in rows(tmp_path / "optimizer_step.csv") if row["launches"]}
    assert {"hf_muon", "torch.optim.Muon + AdamW", "fused AdamW"} <= counted.keys()
    assert float(counted["hf_muon"]["launches"]) < float(counted["torch.optim.Muon + AdamW"]["launches"])
    assert float(counted["hf_muon"]["waits"]) == 1
    assert all(float(row["traffic"]) > 20 and float(row["host ms"]) > 0 for row in counted.values())
    # All sides compute the same: singular values inside their ranges, and the weights of our step.
    orthogonal = rows(tmp_path / "orthogonalization.csv")
    assert all(float(row["outside"]) < 0.07 for row in orthogonal if row["ms"])
    # Where the CPU multiplies bf16, all sides use it, and all are as far from exact numbers as
    # tests/math/test_newton_schulz.py allows for bf16. A wrong scale or matrix differs by half or more.
    bound = 4 * 3e-2 if compute_dtype("auto", "cpu") is torch.bfloat16 else 1e-3
    assert all(float(row["parted"]) < bound for row in rows(tmp_path / "optimizer_step.csv") if row["parted"])
    tables = (tmp_path / "tables.md").read_text()
    assert [line[3:] for line in tables.splitlines() if line.startswith("## ")] == list(NUMBERS)
    assert "Times as fast as torch.optim.Muon's:" in tables


def on_cpu(*options, **changed):
    return program("-m", "benchmarks.gpu", "--device", "cpu", *options, **changed)


def sections(page):
    """Return the sections of a page by title."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def titles(call):
    return [part.title for part in gpu.PARTS.values() if part.call == call]


@pytest.mark.extended
def test_all_answers_at_once_at_small_sizes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# hf_muon on another card\n\n## Rates of this card\n\nfound there\n")  # which does not stay
    process = on_cpu("--answers", "--budget", "900", "--out", str(page))  # others may be busy
    assert process.returncode == 0, process.stdout + process.stderr
    by_title = sections(page)
    assert list(by_title) == [part.title for part in gpu.PARTS.values()]
    machine, layouts, tests, compiled, trainer, llamafactory, deepspeed, waits, *times = by_title.values()
    assert all(text.strip() == "Not run." for text in times)
    assert f"| torch | {torch.__version__}" in machine
    assert re.search(r"^\*\*[1-9]\d* skipped\*\*$", tests, re.MULTILINE)
    assert "no CUDA device" in tests
    assert "**62 cases, all equal**" in layouts
    assert layouts.count("| 6: = |") == 8
    assert "Not called" not in compiled
    assert "Nothing is compiled." in compiled
    assert len(re.findall(r"\| 0 \| 0 \| = \|$", compiled, re.MULTILINE)) == compiled.count("| `") > 25
    assert "**5 ways to train, all equal**" in trainer
    assert re.search("2 kinds of training, all equal|LLaMA-Factory is not here", llamafactory)
    assert re.search("6 cases, all equal; from one process at most 0|DeepSpeed is not here", deepspeed)
    assert "**6 cases: waits are not counted, and no byte more**" in waits
    printed = process.stdout.splitlines()
    assert re.match(r"layouts +done +\d+ +62 cases, all equal", printed[-8])
    assert printed[-1] == f"written: {page}, {tmp_path}/page.log"
    assert "===== llamafactory\n" in (tmp_path / "page.log").read_text()


@pytest.mark.extended
def test_times_one_by_one_at_small_sizes(tmp_path):
    page = tmp_path / "page.md"
    found = "\n\n2026-11-26 10:00, hf_muon `1234567`, 9 s: done.\n\n**9 cases, all equal**\n"
    page.write_text(f"# hf_muon on a CPU, at small sizes\n\n## Trainer{found}")
    process = on_cpu("--times", "--budget", "900", "--out", str(page))
    assert process.returncode == 0, process.stdout + process.stderr
    assert sections(page)["Trainer"] == f"{found}\n"  # of an earlier run
    rates, newton_schulz, step, memory, host, products = (sections(page)[title] for title in titles(gpu.TIMES))
    assert rates.count("TFLOP/s") > 1
    for side in ("ours, fp32", "torch, eager"):
        assert re.search(rf"^\| all of Qwen3-0.6B \| {side} \| [\d.]+ \(", newton_schulz, re.MULTILINE)
    for side in ("ours", "ours, watched", r"torch\.optim\.Muon \+ AdamW", "fused AdamW"):
        for case in ("fp32", "bf16", "bf16, int8 moments"):
            assert re.search(rf"^\| qwen3-0.6b, {case} \| {side} \| \d", step, re.MULTILINE), (side, case)
    assert "does not run" not in step + newton_schulz + memory
    assert [row.split(" | ")[1] for row in re.findall(r"^\| qwen3-0.6b .*", memory, re.MULTILINE)] == list("ABDEFG")
    assert re.search(r"^\| .* \| ours \| [\d.]+ \| [\d.]+ \|", host, re.MULTILINE)
    assert re.search("Not run|Newton-Schulz is", products)


DRIVER = """
import os, sys, time, types
from benchmarks import gpu

def fine(where, body):
    body.verdict("3 cases, all equal")

def hangs(where, body):
    import signal, subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    body["first"] = [f"found before, with {subprocess.Popen(['sleep', '600']).pid}"]
    while True:
        time.sleep(1)

def dies(where, body):
    print("the last words")
    sys.stdout.flush()
    os.abort()

def slow(where, body):
    time.sleep(0.5)
    body["alone"] = ["found alone"]

sys.modules["parts"] = sys.modules["__main__"]
# Without torch, which takes long to import where others are busy.
sys.modules["benchmarks.gpu_shared"] = types.SimpleNamespace(Where=lambda *_: None, begin=lambda where: None)
gpu.LAUNCH = [__file__]
gpu.PARTS = {
    "hangs": gpu.Part("Hangs", gpu.ANSWERS, 8, "parts:hangs"),
    "dies": gpu.Part("Dies", gpu.ANSWERS, 240, "parts:dies"),
    "lacks": gpu.Part("Lacks", gpu.ANSWERS, 240, "no_such_module:run"),
    "fine": gpu.Part("Fine", gpu.ANSWERS, 240, "parts:fine"),
    "slow": gpu.Part("Slow", gpu.TIMES, 240, "parts:slow"),
}
gpu.main()
"""


def has_ended(stat):
    """Return whether a process is gone, or waits for its parent, in a minute."""
    for _ in range(600):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def test_a_part_that_hangs_or_dies_or_lacks_a_module_costs_only_itself(tmp_path):
    page, driver = tmp_path / "page.md", tmp_path / "driver.py"
    driver.write_text(DRIVER)
    process = program(str(driver), "--device", "cpu", "--out", str(page), PYTHONPATH=str(ROOT))
    assert process.returncode == 1
    assert "Traceback" not in process.stdout + process.stderr
    hangs, dies, lacks, fine, slow = sections(page).values()
    assert "stopped after 32 s; what follows was found until then" in hangs
    child = re.search(r"found before, with (\d+)", hangs)[1]
    assert has_ended(Path(f"/proc/{child}/stat"))
    assert "its process ended with SIGABRT" in dies
    assert "the last words" in dies
    assert "**Failed: ModuleNotFoundError: No module named 'no_such_module'**" in lacks
    assert re.search(r" s: done\.\n\n\*\*3 cases, all equal\*\*", fine)
    assert "found alone" in slow
    table = {line.split(" | ")[0]: line.split(" | ")[1:] for line in page.read_text().splitlines() if " | " in line}
    assert table["| hangs"][0] == "stopped after 32 s"
    assert table["| fine"][::2] == ["done", "3 cases, all equal |"]
    assert process.stdout.splitlines()[-1].endswith("not complete: hangs, dies, lacks")


def test_a_compiled_function_that_rounds_otherwise_is_found(monkeypatch):
    call = Elementwise.__call__

    def rounded(self, a, b):
        call(self, a, b)
        a[0] = torch.nextafter(a[0], a[0] + 1)

    monkeypatch.setattr(Elementwise, "__call__", rounded)
    with Twins() as twins:
        Elementwise(lambda a, b: a.copy_(a + b), reads=(0, 1), writes=(0,))(torch.ones(5), torch.ones(5))
    assert list(twins.found.values()) == [[1, 5, 1, 1]]  # one call, 5 elements, one of them by one unit


def other_rate_on_rank_1(rank, fault, **arguments):
    """Compare layouts where rank 1 steps otherwise: always, or only with other ranks."""
    muon_over = layouts.muon_over

    def wrong(params, count, layout, views=None, **options):
        wrongly = rank == 1 and (fault == "always" or layout != "single")
        optimizer = muon_over(params, count, layout, views, **options)
        if wrongly:
            optimizer.register_step_post_hook(lambda *_: local_of(params[1]).detach().mul_(1.5))
        return optimizer

    with mock.patch.object(layouts, "muon_over", wrong):
        return layouts.compare(rank, **arguments)


@pytest.mark.parametrize("fault", ["always", "with other ranks"])
def test_layouts_and_products_that_differ_are_named(pools, fault):
    arguments = {"model": "uneven", "options": {"ns_dtype": "fp32"}, "kind": "cpu", "small": 32}
    results = pools[2].run(other_rate_on_rank_1, fault=fault, layouts=("ddp", "fsdp"), **arguments)
    found = gpu_layouts._Found()
    gpu_layouts._add(found, "uneven", 2, results)
    row = found.rows["uneven"]
    if fault == "always":
        assert list(found.products) == ["uneven"]
        assert "1 of 10x16 weight" in found.products["uneven"]
        assert row[-1] == f"**{len(found.products['uneven'])} differ**"
    else:
        assert (row[-1], found.count, found.products) == ("2: =", 2, {})
        (text,) = found.different
        assert "1 of 10x16 weight" in text
        assert found.different[text] == ["ddp-2", "fsdp-2"]
