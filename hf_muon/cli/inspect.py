"""`hf-muon inspect`: which weights a run gives to Muon, and why."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hf_muon.cli.console import console, fail, print_json

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.cli.model_source import Source
    from hf_muon.routing.route import Route

SOURCE_HELP = (
    "A model's directory or config.json, a training YAML (LLaMA-Factory, TRL, transformers), a name on the hub, or a "
    "known configuration such as qwen3-8b. Weights are not read."
)
TRUST_HELP = "Run the code that comes with a model that transformers does not know."
COLUMNS = 60


def inspect(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    optim_args: Annotated[
        str, typer.Option(help="Options of Muon, as in TrainingArguments. They override those of SOURCE.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Print one line per parameter.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help=TRUST_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which weights go to Muon, which to AdamW, and why; check whether a training file's run would be refused.

    Exits with 1 if the run would be refused, or if no weight would reach Muon. Nothing is trained.
    """
    try:
        from hf_muon.build import require_muon
        from hf_muon.cli.model_source import read_source
        from hf_muon.routing.route import route_parameters

        described = read_source(source, optim_args, trust_remote_code=trust_remote_code)
        routes = route_parameters(described.model, described.config)
        if as_json:
            print_json(_as_json(described, routes))
        else:
            _show(described, routes, every)
        refuse(source, described.refusals)
        require_muon(routes, type(described.model).__name__)
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)


def refuse(source: str, refusals: Sequence[str]) -> None:
    """Raise if a run would be refused.

    Raises:
        ValueError: with all reasons.
    """
    if refusals:
        raise ValueError(f"{source} would be refused:" + "".join(f"\n  - {refusal}" for refusal in refusals))


def _count(routes: Sequence[Route]) -> dict[str, int]:
    return {"parameters": len(routes), "weights": sum(math.prod(route.shape) for route in routes)}


def _frozen(source: Source) -> dict[str, int]:
    sizes = [p.numel() for p in source.model.parameters() if not p.requires_grad]
    return {"parameters": len(sizes), "weights": sum(sizes)}


def _as_json(source: Source, routes: Sequence[Route]) -> dict[str, Any]:
    return {
        "source": source.title,
        "model": type(source.model).__name__,
        "notes": source.notes,
        "refused": source.refusals,
        "muon": _count([route for route in routes if route.use_muon]),
        "adamw": _count([route for route in routes if not route.use_muon]),
        "frozen": _frozen(source),
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


class Row(NamedTuple):
    """Parameters that differ only in their layer.

    Attributes:
        heading: optimizer, reason, and whether there is weight decay.
        name: without the layers, stars in place of further numbers.
        shape: as text.
        view: how the weight is seen; empty for one matrix.
    """

    heading: str
    name: str
    shape: str
    view: str


def _show(source: Source, routes: Sequence[Route], every: bool) -> None:
    from hf_muon.routing.table import totals

    screen = console()

    def show(line: str, style: str | None = None) -> None:
        screen.print(line, style=style, markup=False, highlight=False)

    for line in _wrapped(f"{type(source.model).__name__}, {source.title}"):
        show(line, "bold")
    for layers, rows in _by_layers(routes, every).items():
        show("")
        for line in _wrapped(layers):
            show(line, "bold")
        for heading in dict.fromkeys(row.heading for row in rows):
            for line in _wrapped(heading, "  "):
                show(line, "green" if heading.startswith("Muon") else "cyan")
            own = [row for row in rows if row.heading == heading]
            for row in dict.fromkeys(own):
                count = own.count(row)
                for line in _lines(row, count if "*" in row.name else 1):
                    show(line)
    show("")
    for line in totals(routes):
        show(line)
    for line in (*_tied_lines(source.model), *_frozen_lines(source)):
        for part in _wrapped(line):
            show(part)
    for note in source.notes:
        for part in _wrapped(note):
            show(part, "yellow")


def _by_layers(routes: Sequence[Route], every: bool) -> dict[str, list[Row]]:
    """Return the rows under the layers that have them: equal layers share theirs unless `every`."""
    from hf_muon.routing.parameters import folded

    layers_of: dict[tuple[str, Row], list[int]] = {}
    for route in routes:
        stack, layer, rest = _split(route.name)
        decay = "" if route.decay else ", no weight decay"
        heading = f"{'Muon' if route.use_muon else 'AdamW'}: {route.reason}{decay}"
        shape = "x".join(map(str, route.shape)) or "scalar"
        # A dot in front, because only numbers between dots are folded.
        name = route.name if every else folded(f".{rest}")[1:]
        layers_of.setdefault((stack, Row(heading, name, shape, route.view)), []).append(layer or 0)
    groups: dict[str, list[Row]] = {}
    for (stack, row), layers in layers_of.items():
        distinct = sorted(set(layers))
        words = f"{stack}{_ranges(distinct)}" if stack else "outside of layers"
        if len(distinct) > 1:
            words += f", {len(distinct)} layers, each:"
        groups.setdefault(words, []).extend([row] * (len(layers) // len(distinct)))
    return groups


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: 0-2, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _lines(row: Row, count: int) -> list[str]:
    """Return a row in at most `COLUMNS` columns, unless its name alone is longer."""
    name, shape = f"    {row.name}", f"{count} x {row.shape}" if count > 1 else row.shape
    room = COLUMNS - len(name) - 1
    lines = [f"{name} {shape:>{room}}"] if len(shape) <= room else [name, f"{shape:>{COLUMNS}}"]
    return [*lines, *(_wrapped(f"seen as {row.view}", "      ") if row.view else [])]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, COLUMNS, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
    ) or [""]


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Return the other names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def _tied_lines(model: nn.Module) -> list[str]:
    return [f"tied: {' and '.join(others)}, the same as {name}" for name, others in _tied(model).items()]


def _frozen_lines(source: Source) -> list[str]:
    frozen = _frozen(source)
    return [f"frozen: {frozen['parameters']} parameters, {frozen['weights']:,} weights"] * bool(frozen["parameters"])


def _split(name: str) -> tuple[str, int | None, str]:
    """Return the stack of layers that a parameter is in, the number of its layer, and the rest of its name."""
    match = re.match(r"(.*?\.)(\d+)\.(.+)$", name)
    return (match[1], int(match[2]), match[3]) if match else ("", None, name)
