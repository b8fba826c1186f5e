"""Parts of `gpu.py` that train small models with other programs, resume them, and compare bits.

Sums of torch's own kernels have a fixed order here (`torch.use_deterministic_algorithms`), so that bits can be equal.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import Body
from benchmarks.gpu_shared import Where, entry, judged
from benchmarks.measure import attempt
from benchmarks.tables import table
from tests.one_card import programs

_FIXED_SUMS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


# --- Trainer


def trainer(where: Where, body: Body) -> None:
    """Train in every precision, resume, and train again with metrics: weights, moments and losses are equal."""
    os.environ.update(_FIXED_SUMS)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if not where.on_cuda:
        importlib.import_module("torch._dynamo").config.disable = False  # for `torch_compile`, with a fast backend
    import hf_muon_autoload

    hf_muon_autoload.activate()
    backend = {} if where.on_cuda else {"torch_compile_backend": "aot_eager"}
    ways: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16 autocast": {"bf16": True},
        "bf16 weights": {"bf16": True, "weights": "stored"},
        "fp16, by its GradScaler": {"fp16": True},
        "bf16, gradient checkpointing": {"bf16": True, "gradient_checkpointing": True},
        "bf16, flash attention": {"bf16": True, "attention": "flash_attention_2"},
        "bf16, torch_compile": {"bf16": True, "torch_compile": True, **backend},
    }
    if not where.on_cuda:
        del ways["fp16, by its GradScaler"]
    if importlib.util.find_spec("flash_attn") is None:
        del ways["bf16, flash attention"]
    rows: list[list[str]] = []
    different: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (way, settings) in enumerate(ways.items()):
            found: list[str] = []
            own = Path(folder, str(number))
            note = attempt(lambda own=own, settings=settings, found=found: found.extend(programs.tried(own, settings)))
            rows.append([way, *(found or [entry(note), "", ""])])
            different += [f"{way}: {'; '.join(rows[-1][1:3])}"] if rows[-1][1:3] != ["=", "="] else []
            where.say(" ".join(rows[-1]))
            body["trainer"] = [
                "A small Qwen3 with sdpa; eight steps with clipping and a schedule, saved after four.",
                "",
                *table(["", "resumed", "with `HF_MUON_DIAGNOSTICS_EVERY`", "loss"], rows),
            ]
            body.verdict(judged(len(rows), different, "ways to train"))


# --- LLaMA-Factory


def llamafactory(where: Where, body: Body) -> None:
    """Run `llamafactory-cli train` with `optim: muon`, full and freeze, and resume it."""
    if importlib.util.find_spec("llamafactory") is None:
        body.verdict("not run: LLaMA-Factory is not here")
        return
    environment = {**os.environ, **_FIXED_SUMS, "DISABLE_VERSION_CHECK": "1"}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        start = programs.prepare(folder)
        (folder / "entry.py").write_text(programs.ENTRY)
        processes = {}
        for tuning in ("full", "freeze"):
            names = [programs.settings_of(folder, tuning, resumed, where.on_cuda) for resumed in (False, True)]
            with (folder / f"{tuning}.log").open("w") as log:
                processes[tuning] = subprocess.Popen(
                    [sys.executable, "entry.py", *names], cwd=folder, env=environment, stdout=log, stderr=log
                )
            if not where.on_cuda:
                processes[tuning].wait()
        rows, different, tails = [], [], []
        for tuning, process in processes.items():
            code = process.wait()
            printed = (folder / f"{tuning}.log").read_text(errors="replace")
            print(printed, flush=True)
            found: list[str] = []
            note = attempt(lambda tuning=tuning, found=found: found.extend(programs.ran(folder, tuning, start)))
            rows.append([tuning, "ended well" if code == 0 else f"code {code}", *(found or [note])])
            if code or not found or found[0] != "=" or "no Muon" in found[1]:
                different.append(tuning)
                tails += ["", "```", *printed.splitlines()[-15:], "```"]
            body["llamafactory"] = [
                "`llamafactory-cli train` with `optim: muon`, six steps, saved and resumed after three.",
                "",
                *table(["finetuning_type", "process", "resumed", "checkpoint", "loss"], rows),
                *tails,
            ]
            body.verdict(judged(len(rows), different, "kinds of training"))


# --- DeepSpeed

_BOUND = 0.02  # on the distance from one process, whose loss has no scale: its fp16 gradients lose other bits


def deepspeed(where: Where, body: Body) -> None:
    """Train under ZeRO-1, 2 and 3 on one rank, with and without offload, and compare with one process."""
    if importlib.util.find_spec("deepspeed") is None:
        body.verdict("not run: DeepSpeed is not here")
        return
    os.environ |= _FIXED_SUMS
    torch.use_deterministic_algorithms(True, warn_only=True)
    from tests.one_card import zero

    runs = zero.start(where.device)
    rows: list[list[str]] = []
    different: list[str] = []
    for dtype in ("bfloat16", "float16")[: 1 + where.on_cuda]:  # DeepSpeed refuses fp16 on a CPU
        for stage in [stage for stage in runs.STAGES if stage != "0"]:
            found: list[str] = []
            note = attempt(lambda s=stage, d=dtype, found=found: found.extend(zero.compared(runs, s, d)))
            rows.append([stage, dtype, *(found or [entry(note)])])
            if not found or not float(found[0]) <= _BOUND or found[1] != "=" or found[2] not in ("=", ""):
                different.append(f"{stage} {dtype}: {'; '.join(rows[-1][2:])}")
            where.say(" ".join(rows[-1]))
            body["deepspeed"] = [
                "Four steps of a small model, resumed after two. The first column of results is the largest distance "
                "of a master weight from that of one process, of the distance that it has moved.",
                "",
                *table(["stage", "dtype", "from one process", "resumed", "after a skipped step"], rows),
            ]
            body.verdict(judged(len(rows), different) + "; from one process " + _farthest(rows))
    torch.distributed.destroy_process_group()


def _farthest(rows: list[list[str]]) -> str:
    distances = [float(row[2]) for row in rows if len(row) > 3]
    return f"at most {max(distances):.2g}" if distances else "not known"
