"""Print tables, JSON and errors; shared by all commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import typer
from rich.console import Console


def fail(error: Exception | str) -> NoReturn:
    """Print an error on stderr, without a traceback, and exit with status 1.

    Raises:
        BrokenPipeError: the reader of stdout is gone, as in `hf-muon ... | head`; click then exits quietly.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False, highlight=False)
    raise typer.Exit(1)


def console() -> Console:
    """Return a console for tables, as wide as the terminal, or 200 columns wide if stdout is not a terminal."""
    return Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=200, soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold.
    """
    print(json.dumps(value, indent=2, allow_nan=False))
