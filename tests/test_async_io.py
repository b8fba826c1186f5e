"""The script that compiles DeepSpeed's async_io tries again what failed, and only that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "tests" / "deepspeed" / "build_async_io"


def environment(**variables):
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


@pytest.fixture
def venv(tmp_path):
    """Return an environment whose python counts its calls and runs the file `does`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "libaio" / "usr" / "lib").mkdir(parents=True)
    for name in ("libaio.so", "libaio.so.1"):
        (tmp_path / "libaio" / "usr" / "lib" / name).touch()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho x >>{tmp_path}/calls\n. {tmp_path}/does\n")
    python.chmod(0o755)
    (tmp_path / ".made").touch()
    return tmp_path


def build(venv, does, calls, **variables):
    (venv / "does").write_text(does)
    process = subprocess.run([BUILD, venv], env=environment(**variables), capture_output=True, check=False)
    assert len((venv / "calls").read_text().split()) == calls
    return process.returncode


def test_what_has_failed_or_took_too_long_is_tried_again(venv):
    assert build(venv, "exit 1", 1) == 1
    assert build(venv, "sleep 20", 2, ASYNC_IO_TIMEOUT="0.2") == 124
    assert build(venv, "exit 0", 3) == 0
    assert build(venv, "exit 1", 3) == 0  # already built
    built = max(path.stat().st_mtime for path in venv.rglob("*"))
    os.utime(venv / ".made", (built + 1, built + 1))  # a new install, perhaps with another DeepSpeed
    assert build(venv, "exit 1", 4) == 1
    assert build(venv, "exit 0", 5) == 0


def test_a_lock_is_removed_when_its_owner_is_dead(venv):
    folder = venv / "extensions" / "async_io"
    folder.mkdir(parents=True)
    lock = folder / "lock"
    hold = f"import os, time; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); print(1, flush=True); time.sleep(60)"
    owner = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
    try:
        owner.stdout.read(1)
        assert build(venv, f"[ -e {lock} ]", 1) == 0
        assert lock.exists()
    finally:
        owner.kill()
        owner.wait()
    assert lock.exists(), "as torch leaves it"
    assert build(venv, "exit 0", 1) == 0  # although there is nothing left to build
    assert not lock.exists()


def test_no_recipe_marks_as_made_what_has_failed():
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.startswith(("\t-", "\t@-"))]
