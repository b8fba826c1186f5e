"""Parts of `gpu.py` that ask whether steps are right: tests, compiled functions, waits, lost memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import glob
import importlib
import importlib.util
import multiprocessing
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hf_muon.math
from benchmarks import measure
from benchmarks.gpu import Body
from benchmarks.gpu_shared import Where, driver, entry, judged, name_of, words_of
from benchmarks.tables import table
from hf_muon.math.elementwise import Elementwise

ROOT = Path(__file__).resolve().parents[1]


# --- machine


def machine(where: Where, body: Body) -> None:
    """Describe the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = {
        "machine": f"{measure.machine()['cpu']}, {memory / 2**30:.0f} GiB",
        "card, driver, memory, clock, power": driver() or "none",
        "Python": sys.version.split()[0],
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        **measure.versions("triton", "transformers", "accelerate", "deepspeed", "llamafactory", "pytest"),
        "`ns_dtype: auto` is": name_of(where.ns_dtype),
        "sums in fp16 may be split": str(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
        "sums in bf16 may be split": str(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
    }
    if where.on_cuda:
        cards = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
        rows["cards that torch sees"] = "; ".join(map(str, cards))
    body["machine"] = table(["", ""], [[key, str(value)] for key, value in rows.items()])
    body.verdict(rows["card, driver, memory, clock, power"] if where.on_cuda else rows["machine"])


# --- tests


def tests(where: Where, body: Body) -> None:
    """Run the tests with the mark `gpu`, those that start processes last."""
    names = [
        str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text()
    ]
    names.sort(key=lambda name: (("deepspeed" in name) + 2 * ("e2e" in name), name))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-rfEs", "--tb=short", "-p", "no:cacheprovider"]
    if where.on_cuda and importlib.util.find_spec("xdist"):  # each starts processes, and waits for them
        command += ["-n", "4", "--dist", "worksteal"]
    counts: Counter[str] = Counter()
    reasons: list[str] = []
    process = subprocess.Popen([*command, *names], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if ended := re.match(r"(?:tests/\S+::|\[gw).* (PASSED|FAILED|SKIPPED|ERROR)\b", line):
            counts[ended[1].lower()] += 1
        # Failures at once: pytest says why at the end, which the budget may cut off.
        if line.startswith(("FAILED ", "ERROR ", "SKIPPED ")) or (ended and ended[1] in ("FAILED", "ERROR")):
            reasons.append(f"- {entry(line)}")
        body["tests"] = reasons
        body.verdict(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none has ended")
    if process.wait() not in (0, 1):  # 1: a test failed
        body["code"] = [f"pytest ended with code {process.returncode}."]


# --- compiled functions


def compiled(where: Where, body: Body) -> None:
    """Take steps in which each call of a compiled function is repeated uncompiled."""
    from tests.one_card.compiled import cases_of, of_case

    every = {
        function.name
        for module in pkgutil.iter_modules(hf_muon.math.__path__)
        for function in vars(importlib.import_module(f"hf_muon.math.{module.name}")).values()
        if isinstance(function, Elementwise)
    }
    cases = list(cases_of())
    notes: list[str] = []
    said: dict[str, None] = {}
    total: dict[tuple[str, str, str], list[int]] = {}
    with contextlib.ExitStack() as stack:
        turns: Any = map
        if where.on_cuda:  # compiling is the host's work
            context = multiprocessing.get_context("spawn")
            turns = stack.enter_context(concurrent.futures.ProcessPoolExecutor(4, context)).map
        for case, (found, lines, note) in zip(cases, turns(of_case, [where.kind] * len(cases), cases), strict=True):
            dtype, of_grads, options = case
            text = f"{name_of(dtype)} weights, {name_of(of_grads)} gradients, {words_of(options)}".rstrip(", ")
            notes += [f"- {text}: {entry(note)}"] if note else []
            said |= dict.fromkeys(lines)
            for key, counts in found.items():
                before = total.setdefault(key, [0, 0, 0, 0])
                total[key] = [*(a + b for a, b in zip(before[:3], counts[:3], strict=True)), max(before[3], counts[3])]
            where.say(f"{text}: {note or 'done'}")
            _show_twins(body, total, every, said, notes)


def _show_twins(
    body: Body,
    found: Mapping[tuple[str, str, str], list[int]],
    every: set[str],
    said: Mapping[str, None],
    notes: list[str],
) -> None:
    rows = [
        [f"`{name}`", kinds, words, *map(str, counts), "=" if not counts[2] else "**differs**"]
        for (name, kinds, words), counts in sorted(found.items())
    ]
    unseen = ", ".join(f"`{name}`" for name in sorted(every - {name for name, *_ in found}))
    heads = ("function", "dtypes", "options", "calls", "elements written", "differ", "by units, at most", "bits")
    body["compiled"] = [
        "Steps of small parameters. After each call of a compiled function, the uncompiled one runs on copies, "
        f"and the results are compared bit for bit. {'' if said else 'Nothing is compiled. '}"
        f"{f'Not called by any step: {unseen}.' if unseen else ''}",
        "",
        *said,
        "",
        *table(heads, rows),
        *notes,
    ]
    failed = f"; {len(notes)} cases do not run" if notes else ""
    differ = [f"{name} ({kinds})" for (name, kinds, _), counts in found.items() if counts[2]]
    without = ", none of them compiled" if not said else ", not all compiled" if "not compiled" in str(said) else ""
    body.verdict(judged(len(rows), differ, f"functions and dtypes{without}") + failed)


# --- waits


_SANITIZED = """
import torch
from tests.one_card.compiled import small, take
for options in ({}, {"momentum_dtype": "int8", "adamw_state_dtype": "int8"}):
    take(*small(torch.device("cuda"), torch.float32, options), times=2)
torch.cuda.synchronize()
print("steps taken")
"""
_FOR_SANITIZER_S = 60


def waits(where: Where, body: Body) -> None:
    """Count the waits of a step, compare memory before and after 200 steps, and look for wrong addresses."""
    from tests.one_card.compiled import small, take

    sanitizer = _sanitizer() if where.on_cuda else None
    int8 = {"momentum_dtype": "int8", "adamw_state_dtype": "int8"}
    cases: list[tuple[torch.dtype, dict[str, Any]]] = [
        *((dtype, {}) for dtype in (torch.float32, torch.bfloat16)),
        (torch.float16, {"weight_rounding": "nearest"}),
        (torch.float32, int8),
        (torch.bfloat16, {"momentum_dtype": "bf16", "adamw_state_dtype": "bf16"}),
        (torch.float32, {"normalize": "rows"}),
    ]
    steps, waited = (200, "one wait") if where.on_cuda else (20, "waits are not counted")
    rows, wrong = [], []
    for dtype, options in cases:
        text = f"{name_of(dtype)} weights, {words_of(options)}".rstrip(", ")
        give, optimizer = small(where.device, dtype, options)
        take(give, optimizer, times=3)
        places = _places_that_wait(optimizer.step) if where.on_cuda else ["not asked on a CPU"]
        before = _bytes_in_use(where)
        take(give, optimizer, times=steps)
        lost = _bytes_in_use(where) - before
        if lost or len(places) != 1:
            wrong.append(text)
        rows.append([text, str(len(places)), ", ".join(sorted(set(places))), str(lost)])
        where.say(" ".join(rows[-1]))
        body["waits"] = [
            "A wait is one of `torch.cuda.set_sync_debug_mode`; a step has one, for its gradients' check.",
            "",
            *table(["", "waits of a step", "where", f"bytes more after {steps} steps"], rows),
        ]
        body.verdict(judged(len(rows), wrong) if wrong else f"{len(rows)} cases: {waited}, and no byte more")
    if sanitizer is None:
        body["sanitizer"] = ["compute-sanitizer is not here."] if where.on_cuda else []
        return
    try:
        printed = sanitizer.communicate(timeout=_FOR_SANITIZER_S)[0]
        ended = next((line for line in printed.splitlines() if "ERROR SUMMARY" in line), "it says nothing")
        steps_taken = "steps taken" in printed
        lines = [] if "ERROR SUMMARY: 0 errors" in printed else ["", "```", *printed.splitlines()[:40], "```"]
        body["sanitizer"] = [f"compute-sanitizer: {ended.strip('= ')}; steps taken: {steps_taken}.", *lines]
    except subprocess.TimeoutExpired:
        sanitizer.kill()
        body["sanitizer"] = [f"compute-sanitizer memcheck: not done in {_FOR_SANITIZER_S} s."]


def _sanitizer() -> subprocess.Popen[str] | None:
    """Start two small steps under memcheck, without torch's cache of memory, which hides wrong addresses."""
    found = shutil.which("compute-sanitizer") or next(iter(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")), None)
    if found is None:
        return None
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [found, "--tool", "memcheck", sys.executable, "-c", _SANITIZED]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )


def _places_that_wait(step: Callable[[], Any]) -> list[str]:
    """Return where a step lets the host wait for the device, as ``file:line``."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [
        f"{Path(each.filename).name}:{each.lineno}" for each in caught if "called a synchronizing" in str(each.message)
    ]


def _bytes_in_use(where: Where) -> int:
    """Return the bytes of all tensors."""
    gc.collect()
    if where.on_cuda:
        where.synchronize()
        return torch.cuda.memory_allocated(where.device)
    return sum(each.nbytes for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter))
