"""`hf-muon report`: a page about a run, or about several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hf_muon.cli.console import console, fail, print_json

PAGE = "muon_report.html"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="A run's output directory, or its muon_diagnostics.jsonl; several to compare them."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the page. Default: muon_report.html beside the metrics, or here for several."
        ),
    ] = None,
    skip_broken: Annotated[
        bool,
        typer.Option("--skip-broken", help="Skip lines that cannot be read. Half a line at the end is no error."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the last numbers as JSON instead of writing a page.")
    ] = False,
) -> None:
    """Write one HTML page about a run, or several side by side: what to look at, loss, rates, updates, time."""
    try:
        from hf_muon.diagnostics.page import render, summary
        from hf_muon.diagnostics.run_file import diagnostics_of, read_run
        from hf_muon.integrations.archives import complete_or_absent

        files = [diagnostics_of(run) for run in runs]
        named = {name: read_run(file, skip_broken=skip_broken) for name, file in zip(_names(files), files, strict=True)}
        if as_json:
            summaries = {name: summary(run) for name, run in named.items()}
            print_json(summaries if len(files) > 1 else next(iter(summaries.values())))
            return
        target = out or (Path(PAGE) if len(files) > 1 else files[0].with_name(PAGE))
        text = render(named, f"Muon: {' and '.join(named)}")
        if not target.parent.is_dir():
            raise ValueError(f"{target.parent} is not a directory")
        if target.is_dir():
            raise ValueError(f"{target} is a directory. Name the page itself: --out {target / 'page.html'}")
        with complete_or_absent(target) as file:
            file.write_text(text, encoding="utf-8")
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)
    watched = ", ".join(f"{len(run.steps):,} watched steps" for run in named.values())
    console().print(f"{target} ({len(text) / 1000:.0f} kB, {watched})", markup=False)


def _names(files: Sequence[Path]) -> list[str]:
    """Return a name for each file: its folder's, or where those are equal its folder's path.

    Raises:
        ValueError: a file comes twice.
    """
    folders = [file.resolve().parent for file in files]
    paths = [str(file.resolve()) for file in files]
    for names in ([folder.name for folder in folders], list(map(str, folders)), paths):
        if len(set(names)) == len(names):
            return names
    raise ValueError("a run is named twice. Name each once")
