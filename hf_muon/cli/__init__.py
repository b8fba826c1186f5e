"""The `hf-muon` command: a module for each of its commands, with `add_parser` and `run`.

It imports all other packages of hf_muon, and none imports it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import hf_muon
from hf_muon.cli import doctor, inspect, plan, report


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. What it parses has `run`, the function of the command."""
    parser = argparse.ArgumentParser("hf-muon", description="The Muon optimizer for Hugging Face training.")
    parser.add_argument("--version", action="version", version=f"hf-muon {hf_muon.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (doctor, inspect, plan, report):
        command.add_parser(commands)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of the words of a command line. `command` holds those after --, which begin another one."""
    # argparse would read the options of a command after -- as its own, in some versions.
    own = words.index("--") if "--" in words and words[0] in ("inspect", "plan") else len(words)
    return build_parser().parse_args(words[:own], argparse.Namespace(command=words[own + 1 :]))


def main(words: Sequence[str] | None = None) -> int:
    """Run the console script with the words of `sys.argv`, or with these, and return the exit status."""
    arguments = parse(sys.argv[1:] if words is None else list(words))
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader is gone, as in `hf-muon ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again as it ends
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        if str(error).endswith("]"):
            print("docs/messages.md in the repository says more about many codes in brackets", file=sys.stderr)
        return 1
    return status
