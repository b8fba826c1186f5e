"""Route every parameter of a model to Muon or to AdamW, and show the routes as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from hf_muon.config import MuonConfig
from hf_muon.routing.parameters import ModelParameter, examples, folded, matching, parameters_of
from hf_muon.routing.router import GUESS, Router, is_adapter
from hf_muon.storage.tensors import shape_of


@dataclass(frozen=True)
class Route:
    """The optimizer of one parameter.

    Attributes:
        name: without the prefixes of wrappers (DDP, torch.compile, activation checkpointing).
        parameter: the parameter itself.
        use_muon: True for Muon, False for AdamW.
        decay: apply weight decay.
        reason: why, as text.
        view: how Muon reads the parameter as matrices, as by :mod:`hf_muon.storage.views`; empty to read it as stored.
        factor: the factor of the learning rate.
        adapter: whether an adapter, such as LoRA, added the parameter to the model.
    """

    name: str
    parameter: nn.Parameter
    use_muon: bool
    decay: bool
    reason: str
    view: str = ""
    factor: float = 1.0
    adapter: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.parameter)


def route_parameters(model: nn.Module, config: MuonConfig | None = None, **options: Any) -> list[Route]:
    """Return a route for every trainable parameter, in the model's order; tied parameters appear once.

    The first rule that applies decides: `adamw_patterns`, the shape, `muon_patterns`, LoRA and excluded names, and then
    the structure of the model: embeddings, types of modules, routers of experts, and heads, by their place or rows. The
    reason of a route that the model does not settle begins with "a guess".

    Args:
        model: any module.
        config: the options; only `muon_patterns`, `adamw_patterns`, `lora`, `per_head` and `lr_scales` are used.
        **options: override those of `config`.

    Raises:
        ValueError: a pattern matches nothing, or an option is not valid.
    """
    config = (config or MuonConfig()).replace(options)
    params = parameters_of(model)
    router = Router(model, config, params)
    factors = _factors(config, params)
    return [
        Route(param.name, param.parameter, *router.decide(param), factors.get(param.name, 1.0), is_adapter(param))
        for param in params
        if param.parameter.requires_grad
    ]


def _factors(config: MuonConfig, params: Sequence[ModelParameter]) -> dict[str, float]:
    """Return the learning rate factors of the parameters that a pattern of `lr_scales` matches."""
    factors: dict[str, float] = {}
    for pattern, factor in cast(Sequence[tuple[str, float]], config.lr_scales or ()):
        matches = matching("lr_scales", pattern, params)
        if all(param.name in factors for param in matches):
            names = examples(param.name for param in matches)
            raise ValueError(
                f"lr_scales: patterns before {pattern!r} match all that it matches, {names}: put it first "
                "[shadowed-pattern]"
            )
        for param in matches:
            factors.setdefault(param.name, factor)
    return factors


def table(routes: Sequence[Route], *, every: bool = False) -> str:
    """Return the routes as a table, and totals.

    Args:
        routes: the routes of a model.
        every: whether parameters that differ only in their layer have a row each.
    """
    rows: dict[tuple[str, ...], list[int]] = {}
    factors: dict[tuple[str, ...], list[float]] = {}
    for route in routes:
        reason = f"{route.reason} [{route.view}]" if route.view else route.reason
        key = (
            route.name if every else folded(route.name),
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
    return "\n".join([*lines, *totals(routes), *_guesses(routes)])


def _guesses(routes: Sequence[Route]) -> list[str]:
    """Return a line for each optimizer to which parameters go by a guess, with the options that settle it."""
    lines = []
    for use_muon, guess, other in ((True, "hidden matrices", "heads"), (False, "heads", "hidden matrices")):
        names = [route.name for route in routes if route.use_muon == use_muon and route.reason.startswith(GUESS)]
        if names:
            shown = ", ".join([*names[:4], *([f"and {len(names) - 4} more"] if len(names) > 4 else [])])
            wrong, right = ("adamw_patterns", "muon_patterns") if use_muon else ("muon_patterns", "adamw_patterns")
            lines.append(
                f"a guess: taken for {guess}: {shown}. If they are {other}, write {wrong}=^{re.escape(names[0])}$ and "
                f"the like; {right} confirms it"
            )
    return lines


def _scaled(factors: Sequence[float]) -> str:
    """Return the factors of the parameters of a row; empty if all are 1."""
    low, high = min(factors), max(factors)
    if (low, high) == (1, 1):
        return ""
    return f", lr x {low:.3g}" + (f" to {high:.3g}" if low != high else "")


def frozen(model: nn.Module) -> list[str]:
    """Return a line about the frozen parameters; empty if there are none."""
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
