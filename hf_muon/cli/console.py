"""What several commands share: arguments, JSON, and a line on the terminal while something takes long."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `model_source.read_source` takes, and the command of a run that replaces them."""
    parser.usage = "%(prog)s [options] (SOURCE | -- COMMAND ...)"
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?",
        help="a model's directory or config.json, a name on the hub, or a known configuration such as qwen3-8b; "
        "weights are not read. Or after --: the command of a run, which ends before it trains",
    )
    parser.add_argument(
        "--optim-args", default="", metavar="TEXT", help="options of Muon, as in TrainingArguments; for a SOURCE"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code that comes with a model that transformers does not know; for a SOURCE",
    )


def check_source(arguments: argparse.Namespace) -> None:
    """Raise unless there is either a source or a command.

    Raises:
        ValueError: both, none, or options of a source together with a command.
    """
    if bool(arguments.source) == bool(arguments.command):
        raise ValueError("give a SOURCE, or -- and the command of a run, one of the two [source-or-command]")
    if arguments.command and (arguments.optim_args or arguments.trust_remote_code):
        raise ValueError("--optim-args and --trust-remote-code are for a SOURCE: a run has its own [source-or-command]")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option to print JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold.
    """
    print(json.dumps(value, indent=2, allow_nan=False))


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Show a line on stderr while something takes long, if that is a terminal."""
    stream = sys.stderr
    if not stream.isatty():
        yield
        return
    print(text[: shutil.get_terminal_size().columns - 1], end="", file=stream, flush=True)
    try:
        yield
    finally:
        print("\r\033[K", end="", file=stream, flush=True)  # erases the line
