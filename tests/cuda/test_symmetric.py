"""The candidate kernel for symmetric products (`benchmarks.symmetric`), until a card has answered."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.extended


def test_a_card_would_be_asked_all_questions(tmp_path):
    """Run the part of `make gpu` in the interpreter, where only its first answer means something."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--device", "cpu", "--only", "products"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([*command, "--out", tmp_path / "page.md"], env=environment, capture_output=True, check=True)
    page = (tmp_path / "page.md").read_text()
    assert re.search(r"\| 32 \| float16 \| \d\.\de-04 \| = \|", page)
    assert re.search(r"\*\*(Yes|No): Newton-Schulz is \d+\.\d\d times as fast with the kernel", page)
