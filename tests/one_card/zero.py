"""ZeRO on one rank compared with one process; on a card, and on a CPU at the same sizes."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from tests.e2e.harness import free_port
from tests.one_card.programs import differing


def start(device: torch.device) -> Any:
    """Start one rank, and return `tests.deepspeed.runs`, whose models and tokens are on a device from now on."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ |= {**alone, "DS_ACCELERATOR": device.type, "DS_SKIP_CUDA_CHECK": "1"}
    importlib.import_module("deepspeed.accelerator").get_accelerator()  # chosen now: the next import names another
    before = dict(os.environ)
    runs = importlib.import_module("tests.deepspeed.runs")
    os.environ.clear()
    os.environ.update(before)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, rank=0, world_size=1)
    model, tokens = runs.build_model, runs.tokens_of
    runs.build_model = lambda *args, **options: model(*args, **options).to(device)
    runs.tokens_of = lambda *args: tokens(*args).to(device)
    return runs


def compared(runs: Any, stage: str, dtype: str) -> list[str]:
    """Return the distance from one process, and what differs after a resume and after a step that fp16 skips."""
    options = {**runs.STAGES[stage], "dtype": dtype}
    if dtype == "float16":
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        options["config"] = {"fp16": fp16, "bf16": {"enabled": False}}
    with tempfile.TemporaryDirectory() as folder:
        straight = runs.run(0, last=4, saves={2: folder}, **options)
        resumed = runs.run(0, first=2, last=4, load=folder, **options)
        cells = [_cell(straight["ended"], resumed["ended"])]
        if dtype == "float16":  # the part of rank 1, whose loss is infinite
            skipped = runs.run(1, last=3, skips=("overflow", 2), **options)
            cells.append(_cell(resumed["loaded"], skipped["ended"]))
        else:
            cells.append("")
    states = runs.single(4, dtype=dtype)["states"]
    return [f"{_distance(straight['ended'], states[-1], states[0]):.2g}", *cells]


def _cell(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    names = [f"{name} {key}" for name in one for key in differing(one[name], other[name])]
    return "=" if not names else f"**{len(names)} differ**: {', '.join(names[:3])}"


def _distance(ended: Mapping[str, Any], expected: Mapping[str, Any], start: Mapping[str, Any]) -> float:
    """Return the largest distance of master weights, relative to the distance that they moved; NaN if one is."""
    distances: list[float] = []
    for name, own in ended.items():
        if "master" in own:
            right, first = (state[name]["master"].cpu() for state in (expected, start))
            moved = (right - first).norm()
            distances.append(float((own["master"].cpu() - right).norm() / moved) if moved else 0.0)
    return float(torch.tensor(distances).max())
