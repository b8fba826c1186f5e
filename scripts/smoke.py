"""Try the installed package: an import, a step, and the script of README.md in a new folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from hf_muon import Muon

README = Path(__file__).parents[1] / "README.md"


def step() -> None:
    """Step one matrix, and expect that it has moved by about the learning rate."""
    weight = torch.nn.Parameter(torch.zeros(8, 16))
    weight.grad = torch.randn(8, 16)
    Muon([weight], lr=0.1).step()
    assert 0.01 < weight.detach().square().mean().sqrt() < 0.1, weight


def train() -> None:
    """Run the script of README.md, which does not import hf_muon, and expect the table of routes in its log."""
    _, script, _ = re.split(
        r"^```python\n|^```$(?=\n\nThe run)", README.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(script, encoding="utf-8")
        process = subprocess.run(
            [sys.executable, "script.py"],
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            check=False,
        )
    print(process.stdout)
    assert process.returncode == 0, f"exit status {process.returncode}"
    assert re.search(r"muon: [0-9,]+ parameters", process.stdout), "no table of routes: Muon did not run"
    assert "train_loss" in process.stdout


if __name__ == "__main__":
    step()
    train()
    print(f"hf_muon works with Python {sys.version.split()[0]} and torch {torch.__version__} on {sys.platform}")
