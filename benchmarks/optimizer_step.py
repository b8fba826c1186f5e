"""Measure the whole optimizer step on the parameters of real models, scaled down where they do not fit."""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
    timeline,
)
from benchmarks.models import MODELS, build, on_meta, scaled_config
from benchmarks.rivals import STEPS, bfloat16_is, llamafactory_muon, sides
from hf_muon import Muon, build_optimizer, route_parameters

OURS, WATCHED, TORCH = "hf_muon", "hf_muon, watched", "torch.optim.Muon + AdamW"
LLAMAFACTORY, DION, ADAMW = "LLaMA-Factory", "dion", "fused AdamW"
LR, DECAY, MOMENTUM, BETAS, EPS = 1e-3, 0.1, 0.95, (0.9, 0.95), 1e-8
Step = Callable[[], Any]


def ours(model: nn.Module, **options: Any) -> Muon:
    """Return this package's optimizer, with the coefficients of the others."""
    own = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "ns_coefficients": "original", "ns_steps": STEPS}
    return build_optimizer(model, **own, adamw_betas=BETAS, adamw_eps=EPS, **options)


def routed(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that our routing gives to Muon, and the rest."""
    routes = route_parameters(model)
    return [r.parameter for r in routes if r.use_muon], [r.parameter for r in routes if not r.use_muon]


def torch_step(model: nn.Module, half: torch.dtype) -> Step:
    """Return a step of torch.optim.Muon for our Muon parameters, and of fused AdamW for the rest.

    Raises:
        ValueError: a parameter is not a matrix, which torch's Muon does not support.
    """
    muon, rest = routed(model)
    first = torch.optim.Muon(
        muon, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, ns_steps=STEPS, adjust_lr_fn="match_rms_adamw"
    )
    second = torch.optim.AdamW(rest, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)

    def step() -> None:
        with bfloat16_is(half):
            first.step()
        second.step()

    return step


def llamafactory_step(model: nn.Module, half: torch.dtype) -> Step:
    """Return a step of LLaMA-Factory's Muon. ValueError if a parameter of Muon is not a matrix."""
    muon, rest = routed(model)
    _check_matrices(muon)
    optimizer = llamafactory_muon().Muon(
        lr=LR, wd=DECAY, muon_params=muon, momentum=MOMENTUM, ns_steps=STEPS, adamw_params=rest, adamw_betas=BETAS
    )

    def step() -> None:
        with torch.no_grad(), bfloat16_is(half):
            optimizer.step()

    return step


def _check_matrices(params: Sequence[Tensor]) -> None:
    if any(param.ndim != 2 for param in params):
        raise ValueError("it steps only matrices, and experts are 3-D parameters")


def adamw_step(model: nn.Module) -> Step:
    """Return the step of one fused AdamW for all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True).step


def dion_step(model: nn.Module, setting: Setting) -> Step:
    """Return the step of microsoft/dion's Muon for matrices, and of its AdamW for the rest.

    On a CPU its own bf16 would take some hundred times as long: there, and on the meta device, its plain function
    multiplies in our dtype.
    """
    muon, rest = routed(model)
    _check_matrices(muon)
    if setting.dion and setting.dion not in sys.path:
        sys.path.insert(0, setting.dion)
    on_cuda = muon[0].device.type == "cuda"
    plain, missing = sides("cpu", setting.half, setting.dion, only=["dion"])
    if missing:
        raise ImportError(missing["dion"])
    run = plain["dion"].run
    function = None if on_cuda else lambda matrices, epsilon=None: run(matrices).to(matrices.dtype)
    optimizer = importlib.import_module("dion.muon").Muon(
        [{"params": muon}, {"params": rest, "algorithm": "adamw"}],
        lr=LR,
        mu=MOMENTUM,
        betas=BETAS,
        epsilon=EPS,
        weight_decay=DECAY,
        nesterov=True,
        adjust_lr="rms_norm",
        use_triton=on_cuda,
        newton_schulz_func=function,
    )
    return optimizer.step  # type: ignore[no-any-return]


def give_gradients(models: Sequence[nn.Module]) -> None:
    """Give copies of one model the same random gradients. Copies share them, since no optimizer writes to them."""
    for params in zip(*(model.parameters() for model in models), strict=True):
        grad = torch.randn_like(params[0])
        for param in params:
            param.grad = grad


def run(setting: Setting) -> list[Row]:
    """Return a row for each model and optimizer."""
    logging.getLogger("hf_muon").setLevel(logging.ERROR)
    names = ["Qwen3-0.6B"] if setting.quick else list(MODELS)
    rows: list[Row] = []
    for place, name in enumerate(names, 1):
        rows_of_model = rows_of(setting, name)
        rows += rows_of_model
        times = ", ".join(f"{row['side']} {row['ms']:.4g} ms" for row in rows_of_model if row.get("ms"))
        setting.say(f"optimizer_step {place}/{len(names)}  {name}: {times}")
    return rows


def rows_of(setting: Setting, name: str) -> list[Row]:
    """Return a row for each optimizer of a model. *Watched* is ours with metrics of every step."""
    torch.manual_seed(0)
    sides = (OURS, WATCHED, TORCH, LLAMAFACTORY, DION, ADAMW)
    config, scaled = scaled_config(name, setting.device.type, setting.quick)
    model = build(config).to(setting.device)
    folder = tempfile.TemporaryDirectory()
    watching = {"diagnostics_every": 1, "diagnostics_file": str(Path(folder.name) / "metrics.jsonl")}
    makers: dict[str, Callable[[nn.Module], Step]] = {
        OURS: lambda own: ours(own).step,
        WATCHED: lambda own: ours(own, **watching).step,
        TORCH: lambda own: torch_step(own, setting.half),
        LLAMAFACTORY: lambda own: llamafactory_step(own, setting.half),
        DION: lambda own: dion_step(own, setting),
        ADAMW: adamw_step,
    }
    # As on an NVIDIA GPU: what `ns_dtype: auto` is there, and the dtype that the others take.
    counted = {
        **makers,
        OURS: lambda meta: ours(meta, ns_dtype="fp16").step,
        TORCH: lambda meta: torch_step(meta, torch.bfloat16),
        LLAMAFACTORY: lambda meta: llamafactory_step(meta, torch.bfloat16),
    }
    del counted[WATCHED]
    copies = {side: copy.deepcopy(model) for side in sides}
    give_gradients(list(copies.values()))
    steps: dict[str, Step] = {}
    notes = {}
    for side in sides:

        def first(side: str = side) -> None:
            step = makers[side](copies[side])
            step()  # creates its state
            steps[side] = step

        notes[side] = attempt(first)
    start = routed(model)[0]
    moved = {side: routed(copies[side])[0] for side in steps}
    parted = {side: _parted(start, moved[OURS], moved[side]) for side in steps if side not in (DION, ADAMW)}
    times = taking_turns({**steps, GEMM: setting.gemm.run}, setting.clock, setting.rounds)
    muon, rest = (sum(param.numel() for param in params) for params in routed(model))
    rows = []
    for side in sides:
        row: Row = {
            "model": name,
            "scaled": scaled,
            "muon weights": muon,
            "adamw weights": rest,
            "side": side,
            "note": notes[side],
            **(asked(lambda side=side: counted[side](on_meta(config)), muon + rest) if side in counted else {}),
        }
        if side in steps:
            flops = executed_flops(steps[side])
            row |= {
                **columns("ms", [1e3 * seconds for seconds in times[side]]),
                **columns("speedup", ratios(times[TORCH], times[side])),
                **columns("x adamw", ratios(times[side], times[ADAMW])),
                "gflop": flops / 1e9,
                "peak mb": peak_extra_bytes(steps[side], setting.device) / 1e6,
                "parted": parted.get(side, ""),
            }
            if not setting.on_cpu:
                note = attempt(
                    lambda row=row, step=steps[side]: row.update(kernels=len(timeline(step, setting.device)))
                )
                row["note"] = row["note"] or note
            if flops and side != ADAMW:
                row |= columns("gemm fraction", setting.gemm.fractions(flops, times[side], times[GEMM]))
        rows.append(row)
    folder.cleanup()
    return rows


@torch.no_grad()
def _parted(start: Sequence[Tensor], first: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the largest distance between the Muon weights of two optimizers, relative to the largest movement."""

    def farthest(one: Sequence[Tensor], two: Sequence[Tensor]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True))

    return farthest(first, other) / farthest(start, first)
