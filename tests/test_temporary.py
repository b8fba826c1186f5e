"""Nothing of a run of the tests is left in the folder for temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

RUN = """
import os, signal, sys, tempfile
from multiprocessing import util
from tests.temporary import use_own_folder
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
use_own_folder()
tempfile.mkdtemp()
util.get_temp_dir()  # which multiprocessing deletes itself
{ending}
"""


def run(folder, ending):
    """Return the exit code of a run that makes a folder for temporary files in another one, and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    environment |= {"TMPDIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.run(
        [sys.executable, "-c", RUN.format(ending=ending)], env=environment, capture_output=True, text=True, check=False
    )
    return process.returncode, process.stderr.replace("KeyboardInterrupt", "")


@pytest.mark.parametrize(
    ("ending", "code"), [("", 0), ("sys.exit(1)", 1), ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT)]
)
def test_a_run_leaves_nothing(ending, code, tmp_path):
    exit_code, printed = run(tmp_path, ending)
    assert exit_code == code
    assert "Error" not in printed
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_has_left_goes_with_the_next_and_what_runs_stays(tmp_path):
    assert run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")[0] == -signal.SIGKILL
    assert [len(list(folder.iterdir())) for folder in tmp_path.iterdir()] == [2]
    live = tmp_path / f"hf_muon_tests_{os.getpid()}"
    live.mkdir()
    run(tmp_path, "")
    assert list(tmp_path.iterdir()) == [live]


def test_this_run_has_a_folder_of_its_own():
    assert Path(tempfile.gettempdir()).name.startswith("hf_muon_tests_")
