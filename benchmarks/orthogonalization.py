"""Measure the orthogonalization functions, without an optimizer, on the layer shapes of real models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import (
    GEMM,
    Row,
    Setting,
    asked,
    attempt,
    columns,
    executed_flops,
    peak_extra_bytes,
    ratios,
    taking_turns,
)
from benchmarks.models import Layer, layers
from benchmarks.rivals import STEPS, TORCH, Side, sides
from hf_muon import orthogonalize

_LEAST = 1.05e-3  # of the Frobenius norm; singular-value ranges hold from 1e-3, and rounding must not pass below that


def matrices(layer: Layer, device: torch.device) -> Tensor:
    """Return matrices ``(count, rows, columns)`` in fp32, whose singular values reach down to the start of the ranges.

    The logarithms of the singular values are evenly spaced, from 1 down to `_LEAST` of the Frobenius norm. All matrices
    of a batch have the same singular values, and different random singular vectors.
    """
    short, long = sorted((layer.rows, layer.columns))
    generator = torch.Generator(device).manual_seed(0)

    def directions(rows: int) -> Tensor:
        noise = torch.randn(layer.count, rows, short, device=device, generator=generator)
        return torch.linalg.qr(noise)[0]

    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        norm = torch.logspace(math.log10(middle), 0, short, dtype=torch.float64).norm()
        low, high = (middle, high) if middle / norm < _LEAST else (low, middle)
    values = torch.logspace(math.log10(high), 0, short, device=device)
    wide = (directions(short) * values) @ directions(long).mT
    return (wide.mT if layer.rows > layer.columns else wide).contiguous()


def singular_values(batch: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest singular value of a batch, in float64.

    They are roots of the eigenvalues of the Gram matrix: exact to 1e-15 near one, and much faster than an SVD.
    """
    x = batch.double()
    gram = x @ x.mT if x.size(-2) <= x.size(-1) else x.mT @ x
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    return float(values.min()), float(values.max())


def run(setting: Setting) -> list[Row]:
    """Return a row for each shape and function."""
    functions, missing = sides(setting.device.type, setting.dtype, setting.dion)
    setting.missing |= missing
    for name, reason in missing.items():
        setting.say(f"{name}: {reason}")
    rows = []
    shapes = layers(setting.device.type, setting.quick)
    for place, (divisor, layer) in enumerate(shapes, 1):
        rows_of_shape = _shape(setting, divisor, layer, functions)
        rows += rows_of_shape
        ours = next(row for row in rows_of_shape if row["side"] == "hf_muon")
        setting.say(
            f"orthogonalization {place}/{len(shapes)}  {layer.model} {layer.name} {layer.key}: "
            f"{ours['ms']:.3g} ms, {ours['speedup']:.2f} x as fast as {TORCH}"
        )
    return rows


def _shape(setting: Setting, divisor: int, layer: Layer, functions: dict[str, Side]) -> list[Row]:
    batch = matrices(layer, setting.device)
    calls = {name: (lambda side=side: side.run(batch)) for name, side in functions.items()}
    notes = {name: attempt(call) for name, call in calls.items()}
    running = {name: call for name, call in calls.items() if not notes[name]}
    times = taking_turns({**running, GEMM: setting.gemm.run}, setting.clock, setting.rounds)
    rows = []
    for name, side in functions.items():
        row: Row = {
            "model": layer.model,
            "layer": layer.name,
            "shape": layer.key,
            "divisor": divisor,
            "aspect": layer.aspect,
            "side": name,
            "version": side.version,
            "note": notes[name],
            **asked(lambda side=side: _on_meta(side, batch.shape), batch.numel()),
        }
        if name in running:
            flops = executed_flops(running[name])
            low, high = singular_values(running[name]())
            row |= {
                **columns("ms", [1e3 * seconds for seconds in times[name]]),
                **columns("speedup", ratios(times[TORCH], times[name])),
                "peak mb": peak_extra_bytes(running[name], setting.device) / 1e6,
                "sigma min": low,
                "sigma max": high,
                "band low": side.band[0],
                "band high": side.band[1],
                "outside": max(0.0, side.band[0] - low, high - side.band[1]),
            }
            if flops >= _standard_flops(layer) / 20:  # torch does not count kernels of other packages
                row["gflop"] = flops / 1e9
                row |= columns("gemm fraction", setting.gemm.fractions(flops, times[name], times[GEMM]))
        rows.append(row)
    return rows


def _on_meta(side: Side, shape: torch.Size) -> Callable[[], Any]:
    """Return the call of a function on a meta tensor; ours in the dtype that `auto` is on NVIDIA GPUs."""
    batch = torch.empty(shape, device="meta")
    if side.preset:
        return lambda: orthogonalize(batch, ns_coefficients=side.preset, ns_steps=STEPS, ns_dtype="fp16")
    return lambda: side.run(batch)


def _standard_flops(layer: Layer) -> int:
    """Return the FLOPs of the standard form: ``4 s^2 l + 2 s^3`` per step for an ``(s, l)`` matrix, ``s <= l``."""
    short, long = sorted((layer.rows, layer.columns))
    return layer.count * STEPS * (4 * short * short * long + 2 * short**3)
