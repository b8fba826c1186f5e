"""`hf-muon inspect`: show which weights a run gives to Muon, and why."""

from __future__ import annotations

import argparse

from hf_muon.cli.console import add_json, add_source, check_source, print_json, status

_INTERNAL = ("text", "all", "facts")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = (
        "Show which weights go to Muon, which to AdamW, and why; of the command of a run, also whether it would be "
        "refused. The command runs with its own code and data, without weights, and ends before it trains. Exits "
        "with 1 if the run would be refused, or if no weight would reach Muon."
    )
    parser = commands.add_parser("inspect", help="show which weights go to Muon, and why", description=text)
    add_source(parser)
    parser.add_argument("--all", action="store_true", help="print one line per parameter")
    parser.add_argument(
        "--weights", action="store_true", help="load the weights, for a command whose code reads them before it trains"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table of routes, or the JSON.

    Raises:
        ValueError: there is no such source or command, or its run would be refused.
    """
    from hf_muon.cli.model_source import read_source, refuse
    from hf_muon.dry_run import parent, report

    check_source(arguments)
    if arguments.command:
        title = " ".join(arguments.command)
        with status(f"dry run of {title}"):
            content = parent.run(arguments.command, with_weights=arguments.weights)
    else:
        title = arguments.source
        source = read_source(title, arguments.optim_args, trust_remote_code=arguments.trust_remote_code)
        content = report.of_model(source.model, source.routes, source.notes, title)
        content["refused"] = source.refusals
    reasons = content["refused"]
    if arguments.json:
        print_json({key: value for key, value in content.items() if key not in _INTERNAL})
    else:
        for line in report.lines(content, every=arguments.all):
            print(line)
    refuse(title, reasons)
    return 0
