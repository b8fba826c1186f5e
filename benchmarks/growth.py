"""Measure how the cost grows with parameters, width, aspect and the number of equal shapes."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Row, Setting, columns, executed_flops, ratios, taking_turns
from benchmarks.models import build, small_qwen3
from benchmarks.optimizer_step import give_gradients, ours, torch_step
from benchmarks.rivals import OURS, TORCH, sides
from hf_muon import route_parameters

Calls = dict[str, Callable[[], Any]]
PARAMETERS, WIDTH, ASPECT, EQUAL = "parameters", "width", "aspect", "equal shapes"


def _points(setting: Setting) -> dict[str, tuple[int, ...]]:
    """Return the values to measure at: layers, rows of squares, columns over rows, and numbers of matrices."""
    if setting.quick:
        return {PARAMETERS: (1, 2), WIDTH: (16, 32), ASPECT: (1, 4), EQUAL: (1, 4)}
    if setting.on_cpu:
        counts, widths, aspects, equal = (1, 2, 4, 8), (128, 256, 512, 1024), (1, 2, 4, 8, 16, 32), (1, 4, 16, 64)
    else:
        counts, widths = (1, 4, 16, 64), (512, 1024, 2048, 4096, 8192)
        aspects, equal = (1, 2, 4, 8, 16, 32, 64), (1, 4, 16, 64, 256)
    return {PARAMETERS: counts, WIDTH: widths, ASPECT: aspects, EQUAL: equal}


def run(setting: Setting) -> list[Row]:
    """Return a row for each point and optimizer; `exponent` is the logarithmic slope from the point before."""
    logging.getLogger("hf_muon").setLevel(logging.ERROR)
    rows: list[Row] = []
    for kind, points in _points(setting).items():
        before: dict[str, Row] = {}
        for point in points:
            calls, x, what = _steps(setting, point) if kind == PARAMETERS else _matrices(setting, kind, point)
            times = taking_turns(calls, setting.clock, setting.rounds)
            for side, call in calls.items():
                row: Row = {
                    "kind": kind,
                    "x": x,
                    "what": what,
                    "side": side,
                    **columns("ms", [1e3 * seconds for seconds in times[side]]),
                    **columns("speedup", ratios(times[TORCH], times[side])),
                    "gflop": executed_flops(call) / 1e9,
                }
                if side in before:
                    last = before[side]
                    row["exponent"] = math.log(row["ms"] / last["ms"]) / math.log(x / last["x"])
                before[side] = row
                rows.append(row)
            setting.say(f"growth  {kind}: {what}: {before[OURS]['ms']:.4g} ms, torch's {before[TORCH]['ms']:.4g} ms")
    return rows


def _steps(setting: Setting, layers: int) -> tuple[Calls, int, str]:
    """Return whole steps on the layers of a Qwen3, the number of weights that Muon steps, and a description."""
    width = 32 if setting.quick else 256 if setting.on_cpu else 1024
    torch.manual_seed(0)
    model = build(small_qwen3(width, layers, 16 * width)).to(setting.device)
    copies = [model, copy.deepcopy(model)]
    give_gradients(copies)
    calls: Calls = {OURS: ours(copies[0]).step, TORCH: torch_step(copies[1], setting.half)}
    weights = sum(route.parameter.numel() for route in route_parameters(model) if route.use_muon)
    return calls, weights, f"{layers} layers, {weights / 1e6:.3g} M"


def _matrices(setting: Setting, kind: str, point: int) -> tuple[Calls, int, str]:
    """Return orthogonalizations of square, wide or many equal matrices, the point, and a description."""
    width = 32 if setting.quick else 256 if setting.on_cpu else 2048
    small = width // 2
    shape = {WIDTH: (1, point, point), ASPECT: (1, width, width * point), EQUAL: (point, small, 4 * small)}[kind]
    matrices = torch.randn(shape, device=setting.device)
    all_sides, _ = sides(setting.device.type, setting.dtype, only=(OURS, TORCH))
    calls: Calls = {name: (lambda side=side: side.run(matrices)) for name, side in all_sides.items()}
    count, rows, columns_ = shape
    return calls, point, f"{count} of {rows}x{columns_}" if count > 1 else f"{rows}x{columns_}"
