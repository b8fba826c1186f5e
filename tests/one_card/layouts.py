"""Steps of ranks that share one card, compared with those of one process; pools import `compare` by name."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.gpu_shared import digest, same
from benchmarks.measure import attempt
from tests.distributed.cases import muon_over, placed
from tests.equality.placed import stored
from tests.support.accelerated import accelerated

STEPS = 3
LAYER = [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024), (1024, 3072)]
EXPERTS = [((16, 768, 1024), "rows 384+384"), ((16, 1024, 384), "")]
ATTENTION = [((1024, 1024), ""), ((256, 1024), ""), ((256, 1024), ""), ((1024, 1024), "")]
# Shapes that no number of ranks divides, fewer rows than ranks, stacks, fused and transposed weights.
UNEVEN = [
    ((7, 5), ""),
    ((10, 16), ""),
    ((3, 7, 5), ""),
    ((1, 9), ""),
    ((2, 3), ""),
    ((250, 1000), ""),
    ((513, 257), ""),
]
UNEVEN += [((257, 513), ""), ((3, 500), ""), ((5, 66, 130), ""), ((333, 130), "rows 111+222"), ((250, 1000), "")]
UNEVEN += [((130, 96), "transposed, columns 48*(1+1)"), ((10, 16), "")]
VECTORS = [(9,), (1024,), (1,)]
# By name: matrices with their views, and tables that AdamW steps.
MODELS: dict[str, tuple[list[tuple[tuple[int, ...], str]], list[tuple[int, ...]]]] = {
    "Qwen3-0.6B, two layers": ([(shape, "") for shape in LAYER * 2], [(4096, 1024)]),
    "MoE, two layers": ([*ATTENTION, *EXPERTS] * 2, [(4096, 1024)]),
    "uneven": (UNEVEN, [(11, 4), (65, 130)]),
}
LAYOUTS = {2: ("ddp", "fsdp", "last"), 4: ("ddp", "fsdp", "hsdp", "fsdp-tp", "fsdp-tp-row")}
"""By number of ranks: DDP, FSDP2, columns cut as in tensor parallelism, HSDP, two kinds of FSDP2 x TP."""
CUT_COLUMNS = ("last", "fsdp-tp-row")
BF16 = {"dtype": "bfloat16", "momentum_dtype": "bf16", "adamw_state_dtype": "bf16"}
VARIANTS: tuple[dict[str, Any], ...] = (
    {"momentum_dtype": "int8", "adamw_state_dtype": "int8"},
    BF16,
    {"normalize": "rows"},
    {"balance": "updates"},
    {"dtype": "bfloat16"},
)


def cases(products: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return models and options, the most important first."""
    plain = [(model, {"ns_dtype": dtype}) for dtype, model in itertools.product(products, MODELS)]
    variants = [
        (model, {"ns_dtype": products[0], **options})
        for options, model in itertools.product(VARIANTS, ("uneven", "Qwen3-0.6B, two layers"))
    ]
    return [*plain, *variants]


def compare(
    rank: int, model: str, options: Mapping[str, Any], kind: str, small: int, layouts: Sequence[str]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Take the steps of one process, and those of some layouts; a pool imports this function by name.

    Returns:
        Hashes of one process's weights and moments by name, and for each layout the names of those that differ from
        them, or the error of the steps.
    """
    own = {"model": model, "kind": kind, "small": small, **options}
    differing: dict[str, list[str]] = {}
    if kind == "cuda":
        torch.cuda.set_device(0)
    with contextlib.nullcontext() if kind == "cuda" else accelerated():
        expected = _stepped("single", **own)
        for layout in layouts:
            found: list[str] = []

            def take(layout: str = layout, found: list[str] = found) -> None:
                for name, value in _stepped(layout, **own).items():
                    right = expected[name]
                    if isinstance(value, DTensor):
                        right = stored(right, value.device_mesh, value.placements).to_local()
                        value = value.to_local()
                    if not same(value, right):
                        found.append(name)

            note = attempt(take)
            differing[layout] = [note] if note else found
    return {name: digest(value) for name, value in expected.items()}, differing


def _stepped(
    layout: str, model: str, kind: str, small: int, dtype: str = "float32", **options: Any
) -> dict[str, Tensor]:
    """Return weights and moments by name after some steps of a model in a layout, as they are stored."""

    matrices, tables = MODELS[model]
    if small > 1 and model == "uneven":
        matrices = [(shape, view) for shape, view in matrices if math.prod(shape) < 45_000]
    elif small > 1:
        matrices = [(_smaller(shape, small), _smaller_view(view, small)) for shape, view in matrices]
        tables = [_smaller(shape, small) for shape in tables]
    shapes = [*(shape for shape, _ in matrices), *VECTORS, *tables]

    def numbers(seed: int) -> list[Tensor]:
        generator = torch.Generator(kind).manual_seed(seed)
        drawn = (torch.randn(shape, generator=generator, device=kind) for shape in shapes)
        return [each.to(getattr(torch, dtype)) for each in drawn]

    put, params = placed(numbers(0), layout)
    views = [view for _, view in matrices]
    optimizer = muon_over(params, len(matrices), layout, views if any(views) else None, **options)
    for step in range(STEPS):
        for param, grad in zip(params, numbers(step + 1), strict=True):
            param.grad = put(grad)
        optimizer.step()
    results: dict[str, Tensor] = {}
    for i, (shape, param) in enumerate(zip(shapes, params, strict=True)):
        name = f"{i} of {'x'.join(map(str, shape))}"
        results |= {f"{name} {key}": value for key, value in optimizer.state[param].items()}
        results[f"{name} weight"] = param.detach()
    return results


def _smaller(shape: tuple[int, ...], small: int) -> tuple[int, ...]:
    return tuple(size // small if size >= 4 * small else size for size in shape)


def _smaller_view(view: str, small: int) -> str:
    sizes = view.removeprefix("rows ").split("+")
    return view if not view.startswith("rows") else "rows " + "+".join(str(int(size) // small) for size in sizes)
