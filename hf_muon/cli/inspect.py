"""`hf-muon inspect`: show which weights a run gives to Muon, and why."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_muon.cli.console import add_json, add_source, print_json

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.cli.model_source import Source
    from hf_muon.routing.route import Route


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = (
        "Show which weights go to Muon, which to AdamW, and why; check whether a training file's run would be refused. "
        "Exits with 1 if the run would be refused, or if no weight would reach Muon. Nothing is trained."
    )
    parser = commands.add_parser("inspect", help="show which weights go to Muon, and why", description=text)
    add_source(parser)
    parser.add_argument("--all", action="store_true", help="print one line per parameter")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table of routes, or the JSON.

    Raises:
        ValueError: there is no such source, or its run would be refused.
    """
    from hf_muon.cli.model_source import read_source, refuse
    from hf_muon.integrations.transformers.training_file import asks_for_muon

    source = read_source(arguments.source, arguments.optim_args, trust_remote_code=arguments.trust_remote_code)
    if arguments.json:
        print_json(_as_json(source, source.routes))
    else:
        _show(source, source.routes, arguments.all)
    refuse(arguments.source, source.refusals)
    if source.settings and asks_for_muon(source.settings) and not arguments.json:
        print("hf_muon would not refuse this run.")
    return 0


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

    print(f"{type(source.model).__name__}, {source.title}")
    print(table(routes, every=every))
    for first, other_names in _tied(source.model).items():
        print(f"tied: {' and '.join(other_names)}, the same as {first}")
    for line in frozen(source.model):
        print(line)
    for note in source.notes:
        print(note)


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Return the other names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: other_names for first, *other_names in names.values() if other_names}
