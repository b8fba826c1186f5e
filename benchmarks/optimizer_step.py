"""Measure the whole optimizer step on the parameters of real models, scaled down where they do not fit."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from asked import asked
from meters import kernels, peak_extra_bytes
from models import MODELS, build, on_meta, scaled_config
from rivals import STEPS, bfloat16_is, llamafactory_muon, sides
from setting import Row, Setting, attempt
from timing import GEMM, columns, executed_flops, ratios, taking_turns
from torch import Tensor, nn

from hf_muon import build_optimizer, route_parameters
from hf_muon.math import cost

OURS, TORCH, LLAMAFACTORY, DION, ADAMW = (
    *("hf_muon", "torch.optim.Muon + AdamW", "LLaMA-Factory", "dion"),
    "fused AdamW",
)
BOUNDED, WATCHED = "hf_muon, bounded", "hf_muon, watched"
LR, DECAY, MOMENTUM, BETAS, EPS = 1e-3, 0.1, 0.95, (0.9, 0.95), 1e-8
Step = Callable[[], Any]


def ours(model: nn.Module, views: str | None = None, **options: Any) -> Any:
    """Return this package's optimizer, with the coefficients of the others.

    Args:
        model: whose weights it steps.
        views: of all weights of Muon; None for those that are known.
        **options: further ones.
    """
    optimizer = build_optimizer(
        model,
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        ns_coefficients="original",
        ns_steps=STEPS,
        adamw_betas=BETAS,
        adamw_eps=EPS,
        **options,
    )
    for group in optimizer.param_groups:
        if views is not None and group["use_muon"]:
            group["views"] = [views] * len(group["params"])
    return optimizer


def _routed(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    routes = route_parameters(model)
    return [r.parameter for r in routes if r.use_muon], [r.parameter for r in routes if not r.use_muon]


def torch_step(model: nn.Module, half: torch.dtype) -> Step:
    """Return a step of torch.optim.Muon for the parameters that ours gives to Muon, and of fused AdamW for the rest.

    Raises:
        ValueError: a parameter is no matrix; torch takes matrices alone.
    """
    muon, rest = _routed(model)
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
    muon, rest = _routed(model)
    if any(param.ndim != 2 for param in muon):
        raise ValueError("LLaMA-Factory's Muon takes matrices alone, and experts are 3-D parameters")
    optimizer = llamafactory_muon().Muon(
        lr=LR, wd=DECAY, muon_params=muon, momentum=MOMENTUM, ns_steps=STEPS, adamw_params=rest, adamw_betas=BETAS
    )

    def step() -> None:
        with torch.no_grad(), bfloat16_is(half):
            optimizer.step()

    return step


def adamw_step(model: nn.Module) -> Step:
    """Return the step of one fused AdamW for all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True).step


def dion_step(model: nn.Module, setting: Setting) -> Step:
    """Return the step of microsoft/dion's Muon for matrices, and of its AdamW for the rest.

    On a CPU its own bf16 would take some hundred times as long: there, and on the meta device, its plain function
    multiplies in our dtype.
    """
    muon, rest = _routed(model)
    if any(param.ndim != 2 for param in muon):
        raise ValueError("dion takes matrices alone here, and experts are 3-D parameters")
    if setting.dion and setting.dion not in sys.path:
        sys.path.insert(0, setting.dion)
    on_cuda = muon[0].device.type == "cuda"
    plain, _ = sides("cpu", setting.dtype if setting.on_cpu else torch.bfloat16, setting.dion, only=["dion"])
    if "dion" not in plain:
        raise ImportError("dion is not installed; name a checkout with --dion or HF_MUON_BENCH_DION")
    run = plain["dion"].run
    function = None if on_cuda else lambda matrices, epsilon=None: run(matrices).to(matrices.dtype)
    groups = [{"params": muon}, {"params": rest, "algorithm": "adamw"}]
    optimizer = importlib.import_module("dion.muon").Muon(
        groups,
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
    """Give copies of one model the same random gradients. Copies share their memory, since no side writes to them."""
    for params in zip(*(model.parameters() for model in models), strict=True):
        grad = torch.randn_like(params[0])
        for param in params:
            param.grad = grad


def run(setting: Setting) -> list[Row]:
    """Return a row for each model and side."""
    logging.getLogger("hf_muon").setLevel(logging.ERROR)
    names = ["Qwen3-0.6B"] if setting.quick else list(MODELS)
    rows: list[Row] = []
    for place, name in enumerate(names, 1):
        rows_of_model = rows_of(setting, name)
        rows += rows_of_model
        times = ", ".join(f"{row['side']} {row['ms']:.4g} ms" for row in rows_of_model if row.get("ms"))
        setting.say(f"optimizer_step {place}/{len(names)}  {name}: {times}")
    return rows


def rows_of(
    setting: Setting,
    name: str,
    *,
    sides: Sequence[str] = (OURS, WATCHED, TORCH, LLAMAFACTORY, DION, ADAMW),
    config: tuple[Any, str] | None = None,
) -> list[Row]:
    """Return a row for each side of a model.

    Args:
        setting: where and how to measure.
        name: of the model.
        sides: to measure; ours and fused AdamW, with which others are compared, must be among them. *Watched* is ours
            with metrics of every step.
        config: of the model and in words what is smaller in it, in place of the one that fits the device.
    """
    torch.manual_seed(0)
    config, scaled = config or scaled_config(name, setting.device.type, setting.quick)
    model = build(config).to(setting.device)
    views = MODELS[name].views
    half = setting.dtype if setting.on_cpu else torch.bfloat16
    copies = {side: copy.deepcopy(model) for side in sides}
    give_gradients(list(copies.values()))
    optimizer = ours(copies[OURS], views)
    folder = tempfile.TemporaryDirectory()
    watching = {"diagnostics_every": 1, "diagnostics_file": str(Path(folder.name) / "metrics.jsonl")}
    makers: dict[str, Callable[[], Step]] = {
        OURS: lambda: optimizer.step,
        WATCHED: lambda: ours(copies[WATCHED], views, **watching).step,
        TORCH: lambda: torch_step(copies[TORCH], half),
        LLAMAFACTORY: lambda: llamafactory_step(copies[LLAMAFACTORY], half),
        DION: lambda: dion_step(copies[DION], setting),
        ADAMW: lambda: adamw_step(copies[ADAMW]),
    }
    # What `ns_dtype: auto` is on NVIDIA GPUs, and what the others multiply there.
    counted: dict[str, Callable[[nn.Module], Step]] = {
        OURS: lambda meta: ours(meta, views, ns_dtype="fp16").step,
        TORCH: lambda meta: torch_step(meta, torch.bfloat16),
        LLAMAFACTORY: lambda meta: llamafactory_step(meta, torch.bfloat16),
        DION: lambda meta: dion_step(meta, setting),
        ADAMW: adamw_step,
    }
    steps: dict[str, Step] = {}
    notes = {}
    for side in sides:

        def first(side: str = side) -> None:
            step = makers[side]()
            step()  # creates its state
            steps[side] = step

        notes[side] = attempt(first)
    muons = {side: _routed(model_of_side)[0] for side, model_of_side in copies.items()}
    start = _routed(model)[0]
    parted = {side: _parted(start, muons[OURS], muons[side]) for side in steps if side not in (DION, ADAMW)}
    times = taking_turns({**steps, GEMM: setting.gemm.run}, setting.clock, setting.rounds)
    muon, rest = (sum(param.numel() for param in params) for params in _routed(copies[OURS]))
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
                **(columns("speedup", ratios(times[TORCH], times[side])) if TORCH in times else {}),
                **columns("x adamw", ratios(times[side], times[ADAMW])),
                "gflop": flops / 1e9,
                "peak mb": peak_extra_bytes(steps[side], setting.device) / 1e6,
                "parted": parted.get(side, ""),
            }
            if not setting.on_cpu:
                note = attempt(lambda row=row, step=steps[side]: row.update(kernels=_launched(step, setting)))
                row["note"] = row["note"] or note
            if flops and side != ADAMW:
                row |= columns("gemm fraction", setting.gemm.fractions(flops, times[side], times[GEMM]))
        rows.append(row)
    folder.cleanup()
    rows.append({**dict.fromkeys(rows[0], ""), **_bounded(setting, name, scaled, model)})
    return rows


def _launched(step: Step, setting: Setting) -> int:
    return sum(count for count, _ in kernels(step, setting.device).values())


def _bounded(setting: Setting, name: str, scaled: str, model: nn.Module) -> Row:
    """Return the row of the memory of our step with the smallest `max_batch_bytes` that fits every matrix."""
    bounded = copy.deepcopy(model)
    give_gradients([bounded])
    bound = max(_needed(param, setting) for param in _routed(bounded)[0])
    step = ours(bounded, MODELS[name].views, max_batch_bytes=bound).step
    step()
    return {
        "model": name,
        "scaled": scaled,
        "side": BOUNDED,
        "peak mb": peak_extra_bytes(step, setting.device) / 1e6,
        "max batch mb": bound / 1e6,
        "note": f"memory alone, max_batch_bytes {bound}",
    }


def _needed(param: Tensor, setting: Setting) -> int:
    """Return the bytes that orthogonalizing one matrix of a parameter needs, and a little for scalars."""
    shape = param.shape[-2:]
    rows = cost.block_rows(min(shape), setting.dtype, setting.device.type)
    working = cost.working_bytes(shape, cost.segments(shape, STEPS, setting.dtype), setting.dtype, rows)
    return 4 * math.prod(shape) + working + 2**16


@torch.no_grad()
def _parted(start: Sequence[Tensor], first: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the largest distance between two sides' Muon weights after a step, relative to the largest movement."""
    moved = apart = 0.0
    for a, b, c in zip(start, first, other, strict=True):
        moved, apart = max(moved, _farthest(a, b)), max(apart, _farthest(b, c))
    return apart / moved


def _farthest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
