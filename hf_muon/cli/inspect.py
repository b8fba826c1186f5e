"""`hf-muon inspect`: show which weights a run gives to Muon, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_muon.cli.console import JsonOption, OptimArgsOption, SourceArgument, TrustOption, console, fail, print_json

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.cli.model_source import Source
    from hf_muon.routing.route import Route


def inspect(
    source: SourceArgument,
    optim_args: OptimArgsOption = "",
    every: Annotated[bool, typer.Option("--all", help="Print one line per parameter.")] = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which weights go to Muon, which to AdamW, and why; check whether a training file's run would be refused.

    Exits with 1 if the run would be refused, or if no weight would reach Muon. Nothing is trained.
    """
    try:
        from hf_muon.cli.model_source import read_source, refuse
        from hf_muon.integrations.transformers.training_file import asks_for_muon

        described = read_source(source, optim_args, trust_remote_code=trust_remote_code)
        if as_json:
            print_json(_as_json(described, described.routes))
        else:
            _show(described, described.routes, every)
        refuse(source, described.refusals)
        if described.settings and asks_for_muon(described.settings) and not as_json:
            console().print("hf_muon would not refuse this run.")
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)


def _count(routes: Sequence[Route]) -> dict[str, int]:
    return {"parameters": len(routes), "weights": sum(math.prod(route.shape) for route in routes)}


def _as_json(source: Source, routes: Sequence[Route]) -> dict[str, Any]:
    frozen = [p.numel() for p in source.model.parameters() if not p.requires_grad]
    return {
        "source": source.title,
        "model": type(source.model).__name__,
        "notes": source.notes,
        "refused": source.refusals,
        "muon": _count([route for route in routes if route.use_muon]),
        "adamw": _count([route for route in routes if not route.use_muon]),
        "frozen": {"parameters": len(frozen), "weights": sum(frozen)},
        "tied": _tied(source.model),
        "parameters": [
            {
                "name": route.name,
                "shape": list(route.shape),
                "route": "muon" if route.use_muon else "adamw",
                "reason": route.reason,
                "view": route.view,
                "weight_decay": route.decay,
            }
            for route in routes
        ],
    }


def _show(source: Source, routes: Sequence[Route], every: bool) -> None:
    from hf_muon.routing.route import frozen, table

    show = console().print
    show(f"{type(source.model).__name__}, {source.title}", style="bold")
    show(table(routes, every=every))
    for first, other_names in _tied(source.model).items():
        show(f"tied: {' and '.join(other_names)}, the same as {first}")
    for line in frozen(source.model):
        show(line)
    for note in source.notes:
        show(note, style="yellow")


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Return the other names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: other_names for first, *other_names in names.values() if other_names}
