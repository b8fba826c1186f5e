"""In CI, a test that skips because a promised tool is missing fails, so that CI leaves nothing out unnoticed.

`make test` lists in HF_MUON_PROMISED the tools that each of its environments has. The list counts only where CI is set:
elsewhere a test skips on a machine without a browser or a compiler, and prints the reason.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Generator, Mapping
from typing import Any

import pytest

PACKAGES = ("deepspeed", "llamafactory", "trl", "playwright", "sphinx")
# Patterns of the reasons with which tests skip when a tool is missing.
REASONS = {
    "nvme": r"async_io|NVMe",
    "browser": r"no browser|playwright",
    **{package: rf"\b{package}\b.*\bnot installed\b|could not import '{package}" for package in PACKAGES},
    "cuda": r"no compiler for CUDA",
}


def promised(environment: Mapping[str, str]) -> list[str]:
    """Return the tools that must not be missing.

    Raises:
        ValueError: HF_MUON_PROMISED contains an unknown word.
    """
    words = [word for word in environment.get("HF_MUON_PROMISED", "").split(",") if word]
    if unknown := sorted(set(words) - REASONS.keys()):
        raise ValueError(f"HF_MUON_PROMISED={','.join(unknown)} is not valid. Valid: {', '.join(REASONS)}")
    return words if environment.get("CI") else []


def broken(reason: str, words: list[str]) -> str | None:
    """Return the promised tool that is missing according to the reason of a skip, or None."""
    return next((word for word in words if re.search(REASONS[word], reason, re.IGNORECASE)), None)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start without a promised package: pytest would not collect whole folders of tests."""
    try:
        words = promised(os.environ)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if missing := [word for word in words if word in PACKAGES and importlib.util.find_spec(word) is None]:
        raise pytest.UsageError(f"promised by HF_MUON_PROMISED and not installed: {', '.join(missing)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if word := broken(reason, promised(os.environ)):
            report.outcome = "failed"
            report.longrepr = f"HF_MUON_PROMISED says {word}, and this test would skip: {reason}"
    return report
