"""`hf-muon report`: write a page about one run or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_muon.cli.console import console, fail

PAGE = "muon_report.html"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Output directories of runs, or their muon_diagnostics.jsonl."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File of the page. Default: muon_report.html with the metrics; here for several."),
    ] = None,
) -> None:
    """Write one HTML page about a run, or several side by side: what to look at, loss, rates, updates, time."""
    try:
        from hf_muon.diagnostics.page import render
        from hf_muon.diagnostics.run_file import read_run
        from hf_muon.integrations.archives import complete_or_absent

        folders = [(run if run.is_dir() else run.parent).resolve() for run in runs]
        names = [folder.name for folder in folders]
        names = names if len(set(names)) == len(names) else [str(run) for run in runs]
        named = {name: read_run(run) for name, run in zip(names, runs, strict=True)}
        target = out or (Path(PAGE) if len(runs) > 1 else folders[0] / PAGE)
        text = render(named, f"Muon: {' and '.join(named)}")
        with complete_or_absent(target) as file:
            file.write_text(text, encoding="utf-8")
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)
    watched = ", ".join(f"{len(run.rows):,} watched steps" for run in named.values())
    console().print(f"{target} ({len(text) / 1000:.0f} kB, {watched})")
