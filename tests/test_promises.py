"""In CI, skips for lack of a promised tool become failures; a failed build of async_io runs again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.promises import broken, promised

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "tests" / "deepspeed" / "build_async_io"


def environment(**variables):
    clean = {k: v for k, v in os.environ.items() if k not in ("CI", "HF_MUON_PROMISED") and "PYTEST" not in k}
    return clean | {"PYTHONPATH": str(ROOT)} | variables


class TestSkips:
    TESTS = """
import pytest
from tests.promises import pytest_configure, pytest_runtest_makereport

@pytest.mark.skipif(True, reason="DeepSpeed's async_io: was not built")
def test_marked(): ...

@pytest.fixture
def page():
    pytest.skip("no browser: none was found")

def test_in_a_fixture(page): ...

def test_imported():
    pytest.importorskip("llamafactory.no.such.module")

@pytest.mark.skipif(True, reason="no CUDA device")
def test_of_something_else(): ...

def test_passes(): ...
"""

    def outcomes(self, folder, **variables):
        (folder / "conftest.py").write_text(self.TESTS.split("@pytest.mark")[0])
        (folder / "test_it.py").write_text(self.TESTS)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, folder]
        process = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False)
        return process.returncode, process.stdout + process.stderr

    @pytest.mark.parametrize(
        ("variables", "summary"),
        [
            ({}, "1 passed, 4 skipped"),
            ({"HF_MUON_PROMISED": "nvme,browser"}, "1 passed, 4 skipped"),
            ({"CI": "1"}, "1 passed, 4 skipped"),
            ({"CI": "1", "HF_MUON_PROMISED": "nvme"}, "1 passed, 3 skipped, 1 error"),
            ({"CI": "1", "HF_MUON_PROMISED": "nvme,browser"}, "1 passed, 2 skipped, 2 errors"),
        ],
        ids=str,
    )
    def test_what_is_promised_does_not_skip_in_ci(self, tmp_path, variables, summary):
        code, printed = self.outcomes(tmp_path, **variables)
        assert summary in printed
        assert code == (1 if "error" in summary else 0)

    def test_a_package_that_is_missing_ends_all(self, tmp_path):
        variables = {"CI": "1", "HF_MUON_PROMISED": "llamafactory", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
        (tmp_path / "sitecustomize.py").write_text(
            "import importlib.util as u\nfind = u.find_spec\n"
            "u.find_spec = lambda name, *rest: None if name == 'llamafactory' else find(name, *rest)\n"
        )
        code, printed = self.outcomes(tmp_path, **variables)
        assert code == 4
        assert "promised by HF_MUON_PROMISED and not installed: llamafactory" in printed

    def test_words(self):
        with pytest.raises(ValueError, match=r"HF_MUON_PROMISED=nvm is not valid. Valid: nvme, browser, deepspeed"):
            promised({"HF_MUON_PROMISED": "nvm", "CI": ""})
        assert broken("llamafactory is not installed", ["trl", "llamafactory"]) == "llamafactory"
        assert broken("trl >= 1 is not installed", ["trl"]) == "trl"
        assert broken("could not import 'llamafactory.third_party.muon': No module", ["llamafactory"])
        assert broken("no CUDA device", ["nvme", "browser", "deepspeed", "cuda"]) is None
        assert broken("no compiler for CUDA: triton 3.7 is not installed", ["cuda"]) == "cuda"


class TestAsyncIO:
    @pytest.fixture
    def venv(self, tmp_path):
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

    def build(self, venv, does, calls, **variables):
        (venv / "does").write_text(does)
        process = subprocess.run([BUILD, venv], env=environment(**variables), capture_output=True, check=False)
        assert len((venv / "calls").read_text().split()) == calls
        return process.returncode

    def test_what_has_failed_or_took_too_long_is_tried_again(self, venv):
        assert self.build(venv, "exit 1", 1) == 1
        assert self.build(venv, "sleep 20", 2, ASYNC_IO_TIMEOUT="0.2") == 124
        assert self.build(venv, "exit 0", 3) == 0
        assert self.build(venv, "exit 1", 3) == 0  # already built
        time.sleep(0.01)
        (venv / ".made").touch()  # a new install, perhaps with another DeepSpeed
        assert self.build(venv, "exit 1", 4) == 1
        assert self.build(venv, "exit 0", 5) == 0

    def test_a_lock_is_removed_when_its_owner_is_dead(self, venv):
        folder = venv / "extensions" / "async_io"
        folder.mkdir(parents=True)
        lock = folder / "lock"
        hold = f"import os, time; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); print(1, flush=True); time.sleep(60)"
        owner = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
        try:
            owner.stdout.read(1)
            assert self.build(venv, f"[ -e {lock} ]", 1) == 0
            assert lock.exists()
        finally:
            owner.kill()
            owner.wait()
        assert lock.exists(), "as torch leaves it"
        assert self.build(venv, "exit 0", 1) == 0  # although there is nothing left to build
        assert not lock.exists()

    def test_no_recipe_marks_as_made_what_has_failed(self):
        lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.startswith(("\t-", "\t@-"))]
