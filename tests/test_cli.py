from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def doctor(**environment):
    program = Path(sys.executable).with_name("hf-muon")
    env = {**os.environ, "COLUMNS": "160", **environment}
    return subprocess.run([program, "doctor"], capture_output=True, text=True, check=False, env=env)


def test_doctor():
    done = doctor()
    assert done.returncode == 0, done.stderr
    assert "optim: muon is accepted without any import" in done.stdout
    assert "found: hf_muon_autoload:activate" in done.stdout
    assert done.stdout.count("patched") == 2


def test_doctor_says_why_not():
    done = doctor(HF_MUON_AUTOLOAD="0")
    assert done.returncode == 1
    assert "switched off by HF_MUON_AUTOLOAD" in done.stdout
    assert "NOT accepted without `import hf_muon`" in done.stdout


def test_doctor_in_a_broken_environment(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise ImportError('half an installation')")
    done = doctor(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "half an installation" in done.stdout


def test_help():
    program = Path(sys.executable).with_name("hf-muon")
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout
