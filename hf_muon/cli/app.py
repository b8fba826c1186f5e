"""`hf-muon`: the command line."""

from __future__ import annotations

import argparse
from typing import Annotated

import typer

import hf_muon
from hf_muon.cli import plan
from hf_muon.cli.console import fail
from hf_muon.cli.conversion import convert
from hf_muon.cli.doctor import doctor
from hf_muon.cli.inspect import inspect
from hf_muon.cli.report import report
from hf_muon.cli.sweep import sweep

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # the columns of rich cut the names of options
    help="The Muon optimizer for Hugging Face training.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(version: bool) -> None:
    if version:
        print(f"hf-muon {hf_muon.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (doctor, inspect, sweep, report, convert):
    app.command()(command)


_ARGPARSE = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command("plan", context_settings=_ARGPARSE)
def _plan(context: typer.Context) -> None:
    parser = argparse.ArgumentParser("hf-muon")
    plan.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["plan", *context.args])
    try:
        code = arguments.run(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)
    raise typer.Exit(code)
