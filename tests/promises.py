"""A test that skips because something is missing here fails where that was promised: in CI nothing is left out unseen.

`make test` names in HF_MUON_PROMISED what each of its environments has. It counts where CI is set: elsewhere a machine
without a browser or a compiler skips, and says why.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Generator, Mapping
from typing import Any

import pytest

PACKAGES = ("deepspeed", "llamafactory", "trl", "playwright")
# What the reason of a skip says where something is missing.
REASONS = {
    "nvme": r"async_io|NVMe",
    "browser": r"no browser|playwright",
    **{package: rf"\b{package}\b.*\bnot installed\b|could not import '{package}" for package in PACKAGES},
}


def promised(environment: Mapping[str, str]) -> list[str]:
    """Return what must not be missing.

    Raises:
        ValueError: a word that nobody knows.
    """
    words = [word for word in environment.get("HF_MUON_PROMISED", "").split(",") if word]
    if unknown := sorted(set(words) - REASONS.keys()):
        raise ValueError(f"HF_MUON_PROMISED={','.join(unknown)} is not valid. Valid: {', '.join(REASONS)}")
    return words if environment.get("CI") else []


def broken(reason: str, words: list[str]) -> str | None:
    """Return what was promised and is missing by the reason of a skip."""
    return next((word for word in words if re.search(REASONS[word], reason, re.IGNORECASE)), None)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start where a package is missing, of which whole folders of tests would not be collected."""
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
