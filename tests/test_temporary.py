"""Nothing of a run of the tests is left in the folder for temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
import os, signal, sys, tempfile
from multiprocessing import util
from tests.support.temporary import use_own_folder
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
use_own_folder()
tempfile.mkdtemp()
util.get_temp_dir()  # which multiprocessing deletes itself
"""


def test_a_run_leaves_nothing_unless_it_is_killed_and_the_next_deletes_that(tmp_path):
    assert Path(tempfile.gettempdir()).name.startswith("hf_muon_tests_")  # of this run
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}

    def run(ending, code, left=()):
        """Run something with its own folder; expect an exit code, and what stands in the folder afterwards."""
        process = subprocess.run([sys.executable, "-c", RUN + ending], env=environment, capture_output=True, text=True)
        assert process.returncode == code, process.stderr
        assert "Error" not in process.stderr.replace("KeyboardInterrupt", "")
        assert left is None or list(tmp_path.iterdir()) == list(left)

    run("", 0)
    run("sys.exit(1)", 1)
    run("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT)
    run("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, left=None)
    assert [len(list(folder.iterdir())) for folder in tmp_path.iterdir()] == [2]
    live = tmp_path / f"hf_muon_tests_{os.getpid()}"  # of a run that goes on
    live.mkdir()
    run("", 0, left=[live])
