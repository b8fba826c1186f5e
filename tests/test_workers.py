"""The workers of pytest-xdist: files whose tests share something run in one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.workers import WHOLE_FILES, unit_of

ROOT = Path(__file__).parents[1]
TESTS = """
import os
import pytest

@pytest.mark.parametrize("case", range(6))
def test_a(case):
    with open("workers", "a") as file:
        file.write(f"{__file__} {os.environ['PYTEST_XDIST_WORKER']}\\n")
"""
# The first test ends when the other worker has run one, however slow the machine is.
WAIT = """
    import time
    end = time.monotonic() + 60 * (case == 0)
    while time.monotonic() < end and len({line for line in open("workers") if __file__ in line}) < 2:
        time.sleep(0.05)
"""


def test_units_are_whole_files_or_single_tests():
    assert all((ROOT / path).exists() for path in WHOLE_FILES)
    assert unit_of("tests/chaos/test_faults.py::TestA::test_b[c::d]") == "tests/chaos/test_faults.py"
    assert unit_of("tests/math/test_gram.py::test_a[1]") == "tests/math/test_gram.py::test_a[1]"


def test_a_whole_file_runs_in_one_worker(tmp_path):
    for path, source in {"tests/chaos/test_together.py": TESTS, "tests/test_alone.py": TESTS + WAIT}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "loadgroup",
        "-p",
        "tests.workers",
        "--rootdir",
        ".",
    ]
    clean = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    process = subprocess.run(
        [*command, "tests"], cwd=tmp_path, env=clean | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    lines = (tmp_path / "workers").read_text().splitlines()
    workers = {
        name: {line.split()[1] for line in lines if line.split()[0].endswith(name)}
        for name in ("together.py", "alone.py")
    }
    assert len(lines) == 12
    assert len(workers["together.py"]) == 1
    assert workers["alone.py"] == {"gw0", "gw1"}
