"""Call `hf-muon` in this process and show what it says."""

from __future__ import annotations

import contextlib
import io
import json
import os
from types import SimpleNamespace
from unittest import mock

from hf_muon.cli import main


def call(*arguments, **environment):
    """Return exit status and output of a call; a variable that is None is unset. Each question is answered by yes."""
    environment = {"HF_HUB_OFFLINE": "1", **environment}
    kept = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, kept, clear=True),
        mock.patch("sys.stdin", io.StringIO("y\n" * 5)),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:  # of argparse
            status = end.code
    return SimpleNamespace(exit_code=status, stdout=stdout.getvalue(), stderr=stderr.getvalue())


def report_of(*arguments):
    """Return the JSON of a command that succeeds."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def transcript(*calls):
    """Return what a terminal would show of some calls of `hf-muon`, each a list of words."""
    parts = []
    for words in calls:
        result = call(*words)
        shown = [f"$ hf-muon {' '.join(map(str, words))}", result.stdout, result.stderr and f"stderr: {result.stderr}"]
        parts += [*(part.rstrip("\n") for part in shown if part), f"exit status {result.exit_code}", ""]
    return "\n".join(parts)
