"""Routes as text: a table of parameters, totals, and what is frozen."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from hf_muon.routing.parameters import folded
from hf_muon.routing.route import Route


def table(routes: Sequence[Route]) -> str:
    """Return the routes as a table: parameters that differ only in their layer share a row, and totals follow."""
    rows: dict[tuple[str, ...], list[int]] = {}
    factors: dict[tuple[str, ...], list[float]] = {}
    for route in routes:
        reason = f"{route.reason} [{route.view}]" if route.view else route.reason
        key = (
            folded(route.name),
            "x".join(map(str, route.shape)) or "scalar",
            "muon" if route.use_muon else "adamw",
            reason,
        )
        rows.setdefault(key, []).append(math.prod(route.shape))
        factors.setdefault(key, []).append(route.factor)
    cells = [("parameter", "shape", "count", "optimizer", "reason")]
    cells += [(key[0], key[1], str(len(sizes)), key[2], key[3] + _scaled(factors[key])) for key, sizes in rows.items()]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in cells]
    lines.insert(1, "  ".join("-" * w for w in (*widths, max(len(row[4]) for row in cells))))
    return "\n".join([*lines, *totals(routes)])


def _scaled(factors: Sequence[float]) -> str:
    """Return the factors of the parameters of a row, or nothing where all are 1."""
    low, high = min(factors), max(factors)
    if (low, high) == (1, 1):
        return ""
    return f", lr x {low:.3g}" + (f" to {high:.3g}" if low != high else "")


def frozen(model: nn.Module) -> list[str]:
    """Return a line about the parameters that are not trained, or nothing if all are."""
    params = [p for p in model.parameters() if not p.requires_grad]
    if not params:
        return []
    quantized = [p for p in params if p.dtype.itemsize == 1 or hasattr(p, "quant_state")]
    kinds = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in quantized}))
    return [
        f"frozen: {len(params)} parameters" + (f", {len(quantized)} of them quantized ({kinds})" if quantized else "")
    ]


def totals(routes: Sequence[Route]) -> list[str]:
    """Return two lines: how many parameters and weights go to Muon and to AdamW."""
    weights = sum(math.prod(route.shape) for route in routes) or 1
    lines = []
    for name, use_muon in (("muon", True), ("adamw", False)):
        sizes = [math.prod(route.shape) for route in routes if route.use_muon == use_muon]
        lines.append(f"{name}: {len(sizes)} parameters, {sum(sizes):,} weights ({sum(sizes) / weights:.1%})")
    return lines
