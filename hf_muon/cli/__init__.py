"""The `hf-muon` command: a module for each of its commands.

It imports all other packages of hf_muon, and none imports it. It also needs the extra `cli`.
"""

from __future__ import annotations

import sys

_EXTRA = ("plotly", "rich", "typer")


def main() -> None:
    """Run the console script."""
    try:
        from hf_muon.cli.app import app

        app(prog_name="hf-muon")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        sys.exit(
            f"hf-muon needs {package}, which is not installed here. Run: pip install 'hf_muon[cli]' [package-missing]"
        )
