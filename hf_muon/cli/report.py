"""`hf-muon report`: write a page about one run or several."""

from __future__ import annotations

import argparse
from pathlib import Path

PAGE = "muon_report.html"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "Write one HTML page about a run, or several side by side: what to look at, loss, rates, updates, time."
    parser = commands.add_parser("report", help="write a page about one run or several", description=text)
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="output directory of a run, or its muon_diagnostics.jsonl",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file of the page (default: muon_report.html with the metrics; here for several)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page."""
    from hf_muon.diagnostics.run_file import read_run
    from hf_muon.integrations.archives import complete_or_absent

    try:
        from hf_muon.diagnostics.page import render
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "plotly":
            raise
        raise RuntimeError(
            "hf-muon report needs plotly, which is not installed here. Run: pip install 'hf_muon[report]' "
            "[package-missing]"
        ) from error

    runs: list[Path] = arguments.runs
    folders = [(run if run.is_dir() else run.parent).resolve() for run in runs]
    names = [folder.name for folder in folders]
    names = names if len(set(names)) == len(names) else [str(run) for run in runs]
    named = {name: read_run(run) for name, run in zip(names, runs, strict=True)}
    target = arguments.out or (Path(PAGE) if len(runs) > 1 else folders[0] / PAGE)
    text = render(named, f"Muon: {' and '.join(named)}")
    with complete_or_absent(target) as file:
        file.write_text(text, encoding="utf-8")
    watched = ", ".join(f"{len(run.rows):,} watched steps" for run in named.values())
    print(f"{target} ({len(text) / 1000:.0f} kB, {watched})")
    return 0
