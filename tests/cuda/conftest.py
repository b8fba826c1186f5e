"""These tests compile for cards that do not exist, where torch's and Triton's versions are known."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.cuda.fake_gpu import untested


@pytest.fixture(autouse=True)
def _versions_are_known() -> None:
    if reason := untested():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _no_traces_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pytest not keep what torch.compile notes for tools, hundreds of lines a compilation."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)


@pytest.fixture(autouse=True)
def _triton_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
