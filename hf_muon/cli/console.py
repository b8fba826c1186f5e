"""Options that several commands have, and functions that print tables, JSON and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

SourceArgument = Annotated[
    str,
    typer.Argument(
        help="A model's directory or config.json, a training file (YAML or JSON of LLaMA-Factory, TRL, "
        "transformers), a name on the hub, or a known configuration such as qwen3-8b. Weights are not read."
    ),
]
OptimArgsOption = Annotated[
    str, typer.Option(help="Options of Muon, as in TrainingArguments. They override those of SOURCE.")
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the code that comes with a model that transformers does not know."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fail(error: Exception | str) -> NoReturn:
    """Print an error on stderr, without a traceback, and exit with status 1.

    Raises:
        BrokenPipeError: the reader of stdout is gone, as in `hf-muon ... | head`; click then exits quietly.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    console(stderr=True).print(str(error), style="red")
    if str(error).endswith("]"):
        console(stderr=True).print("docs/messages.md in the repository explains the codes in brackets", style="dim")
    raise typer.Exit(1)


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is, also while the streams are redirected.

    For stdout it is as wide as the terminal, or 200 columns wide if stdout is not a terminal.
    """
    width = None if stderr or sys.stdout.isatty() else 200
    return Console(
        file=sys.stderr if stderr else sys.stdout, width=width, soft_wrap=True, markup=False, highlight=False
    )


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold.
    """
    print(json.dumps(value, indent=2, allow_nan=False))
