"""Call `hf-muon` in this process or as one of its own, and write a training file for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml
from typer.testing import CliRunner

from hf_muon.cli.app import app


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def as_process(*arguments):
    program = Path(sys.executable).with_name("hf-muon")
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=env)


def training_yaml(tmp_path, small, **keys):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": str(small[1]), "optim": "muon", **keys}))
    return path
