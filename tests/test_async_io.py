"""The script that compiles DeepSpeed's async_io tries again what failed, and only that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def build(tmp_path):
    """Return a function that builds in an environment whose python counts its calls and runs some lines of sh."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "libaio" / "usr" / "lib").mkdir(parents=True)
    for name in ("libaio.so", "libaio.so.1"):
        (tmp_path / "libaio" / "usr" / "lib" / name).touch()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho x >>{tmp_path}/calls\n. {tmp_path}/does\n")
    python.chmod(0o755)
    (tmp_path / ".made").touch()

    def run(does, calls, **variables):
        (tmp_path / "does").write_text(does)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        script = ROOT / "tests" / "deepspeed" / "build_async_io"
        process = subprocess.run([script, tmp_path], env=environment, capture_output=True, check=False)
        assert len((tmp_path / "calls").read_text().split()) == calls
        return process.returncode

    return run


def test_what_has_failed_or_took_too_long_is_tried_again(build, tmp_path):
    assert build("exit 1", 1) == 1
    assert build("sleep 60", 2, ASYNC_IO_TIMEOUT="2") == 124
    assert build("exit 0", 3) == 0
    assert build("exit 1", 3) == 0  # already built
    built = max(path.stat().st_mtime for path in tmp_path.rglob("*"))
    os.utime(tmp_path / ".made", (built + 1, built + 1))  # a new install, perhaps with another DeepSpeed
    assert build("exit 1", 4) == 1
    assert build("exit 0", 5) == 0
    # No recipe marks as made what has failed.
    assert not [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(("\t-", "\t@-"))]


def test_a_lock_is_removed_when_its_owner_is_dead(build, tmp_path):
    lock = tmp_path / "extensions" / "async_io" / "lock"
    lock.parent.mkdir(parents=True)
    hold = f"import os, time; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); print(1, flush=True); time.sleep(60)"
    owner = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
    try:
        owner.stdout.read(1)
        assert build(f"[ -e {lock} ]", 1) == 0
        assert lock.exists()
    finally:
        owner.kill()
        owner.wait()
    assert lock.exists(), "as torch leaves it"
    assert build("exit 0", 1) == 0  # although there is nothing left to build
    assert not lock.exists()
