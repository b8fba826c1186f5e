"""`hf-muon report`: a page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_muon.cli.console import console, fail, print_json


def report(
    run: Annotated[Path, typer.Argument(help="A run's output directory, or its muon_diagnostics.jsonl.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the page. Default: beside the metrics.")] = None,
    skip_broken: Annotated[
        bool,
        typer.Option(
            "--skip-broken", help="Skip lines that cannot be read, such as one cut off when a run was killed."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the last numbers as JSON instead of writing a page.")
    ] = False,
) -> None:
    """Write one HTML page about a run: loss, rates, updates, momentum, orthogonality, time. It needs no network."""
    try:
        from hf_muon.diagnostics.page import render, summary
        from hf_muon.diagnostics.run_file import diagnostics_of, read_run
        from hf_muon.integrations.archives import complete_or_absent

        metrics_file = diagnostics_of(run)
        metrics = read_run(metrics_file, skip_broken=skip_broken)
        if as_json:
            print_json(summary(metrics))
            return
        target = out or metrics_file.with_name("muon_report.html")
        text = render(metrics, f"Muon: {metrics_file.parent.resolve().name}")
        if not target.parent.is_dir():
            raise ValueError(f"{target.parent} is not a directory")
        if target.is_dir():
            raise ValueError(f"{target} is a directory. Name the page itself: --out {target / 'page.html'}")
        with complete_or_absent(target) as file:
            file.write_text(text, encoding="utf-8")
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)
    console().print(f"{target} ({len(text) / 1000:.0f} kB, {len(metrics.steps)} watched steps)", markup=False)
