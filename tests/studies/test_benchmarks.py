"""The benchmarks run and write readable files, on shapes so small that their numbers mean nothing."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_parts
from benchmarks.bench import arguments
from hf_muon.math.elementwise import Elementwise
from hf_muon.math.precision import compute_dtype

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
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)


def bench(*options):
    return program("-m", "benchmarks.bench", *options)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_benchmark_runs_and_writes_a_csv(tmp_path):
    process = bench("--quick", "--out", str(tmp_path))
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


def test_all_sides_multiply_in_a_chosen_dtype(tmp_path):
    """Expect fp32 to show in the singular values of every side: the preset is the same."""
    process = bench("--quick", "--only", "orthogonalization", "--dtype", "fp32", "--out", str(tmp_path))
    assert process.returncode == 0, process.stderr
    assert json.loads((tmp_path / "machine.json").read_text())["orthogonalization"]["dtype"] == "float32"
    values = {row["side"]: float(row["sigma max"]) for row in rows(tmp_path / "orthogonalization.csv") if row["ms"]}
    assert abs(values["hf_muon, original"] - values["torch.optim.Muon"]) < 1e-4


COUNTS = """
import json, logging
import torch
from benchmarks.measure import asked, executed_flops
from benchmarks.models import MODELS, on_meta, scaled_config
from benchmarks.optimizer_step import ours
logging.getLogger("hf_muon").setLevel("ERROR")

ran = []
def backend(graph, inputs):
    return lambda *arguments: ran.append(1) or graph(*arguments)
product = torch.compile(lambda a: a @ a, fullgraph=True, backend=backend)
matrix = torch.ones(4, 4)
product(matrix)
flops = executed_flops(lambda: product(matrix))
product(matrix)

sizes = {}
for name in MODELS:
    model = on_meta(scaled_config(name, "cuda", False)[0])
    weights = sum(param.numel() for param in model.parameters())
    sizes[name] = asked(lambda: ours(model, ns_dtype="fp16").step, weights)

print(json.dumps({"flops": flops, "ran": len(ran), "sizes": sizes}))
"""


def test_counts():
    """Count a function that stays compiled, and steps at the sizes of CUDA."""
    process = program("-c", COUNTS)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert (found["flops"], found["ran"]) == (128, 2)
    assert len(found["sizes"]) == 4
    for row in found["sizes"].values():
        assert row.keys() == {"launches", "waits", "traffic", "host ms"}, row
        assert row["waits"] == 1
        assert 20 < row["traffic"] < 120


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "sped"], "invalid choice: 'sped'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--device", "cuda", "--dtype", "fp32"], "--dtype is for --device cpu"),
        (["--rounds", "0"], "'0' is not an integer of at least 1"),
        (["--dion", os.devnull], "not a checkout of microsoft/dion"),
        (["--redraw", "--out", os.devnull], "holds no CSV of orthogonalization"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_not_valid_is_said_at_once(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        arguments(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def first_minutes(*options):
    return program("-m", "benchmarks.gpu", "--device", "cpu", *options)


def sections(page):
    """Return the sections of a page by title."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_first_minutes_on_a_card_at_small_sizes(tmp_path):
    page = tmp_path / "small.md"
    process = first_minutes("--out", str(page))
    assert process.returncode == 0, process.stdout + process.stderr
    by_title = sections(page)
    assert len(by_title) == 7
    for title, text in by_title.items():
        if text.strip().endswith("There is no Triton here. Not run."):
            continue
        assert not re.search("Not run|Not complete|[Ff]ailed|does not run: (?!ImportError: dion)", text), (title, text)
    machine, tests, compiled, _, memory, step, ranks = by_title.values()
    assert f"| torch | {torch.__version__}" in machine
    assert re.search(r"^[1-9]\d* skipped$", tests, re.MULTILINE)
    assert "no CUDA device" in tests
    assert "Not called" not in compiled
    assert "Nothing is compiled." in compiled
    assert len(re.findall(r"\| 0 \| 0 \| = \|$", compiled, re.MULTILINE)) == compiled.count("| `") > 25
    for weights in ("fp32 weights", "bf16 weights", "bf16 weights, int8 moments"):
        cells = re.search(rf"^\| {weights} \|(.*)\|$", memory, re.MULTILINE)[1].split("|")
        planned, found, *_, counted, _, _ = map(float, cells)
        assert planned == found
        assert 100 < counted < 400
    assert re.search(r"hf_muon, watched \| \d", step)
    assert re.search(r"torch.optim.Muon \+ AdamW \| \d", step)
    assert ranks.count("| = |") == 4
    assert re.search(r"^2 ranks, fsdp, tiny, .*\n\n.*\n.*\n\| hf_muon \| \d", ranks, re.MULTILINE)


def test_parts_that_do_not_end_in_time_say_so(tmp_path):
    page = tmp_path / "slow.md"
    page.write_text("# A page\n\n## Two ranks compared with one process\n\nWhat an earlier run found.\n")
    process = first_minutes("--only", "machine", "compiled", "--budget", "0.2", "--out", str(page))
    assert process.returncode == 1
    texts = list(sections(page).values())
    assert ["stopped after 0 s" in text for text in texts] == [True, False, True, False, False, False, False]
    assert sum("Not run." in text for text in texts) == 4
    assert texts[-1].strip() == "What an earlier run found."


def test_a_part_that_fails_leaves_what_it_found_and_why(tmp_path, monkeypatch, capsys):
    def failing(where, body):
        """Report a compiled function whose first element is the next number."""
        body["first"] = ["what was found"]
        function = Elementwise(lambda a, b: a.copy_(a + b), reads=(0, 1), writes=(0,))
        call = Elementwise.__call__

        def rounded(self, a, b):
            call(self, a, b)
            a[0] = torch.nextafter(a[0], a[0] + 1)

        monkeypatch.setattr(Elementwise, "__call__", rounded)
        with gpu_parts.Twins() as twins:
            function(torch.ones(5), torch.ones(5))
        body["twins"] = [str(twins.found)]
        raise ValueError("lost | the card")

    monkeypatch.setattr(gpu_parts, "machine", failing)
    body = tmp_path / "body.md"
    assert gpu._run_part(gpu.arguments(["--device", "cpu", "--part", "machine", "--body", str(body)])) == 1
    first, twins, failed = body.read_text().split("\n\n", 2)
    assert first == "what was found"
    assert twins.endswith(": [1, 5, 1, 1]}")
    assert failed.startswith("**Failed: ValueError: lost | the card**")
    assert "in failing" in failed
