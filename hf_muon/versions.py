"""The versions of other packages that Muon runs with."""

from __future__ import annotations

import importlib.metadata
import re

TESTED = {
    "torch": ("2.10", "2.15"),
    "transformers": ("5.5.4", "5.24"),
    "accelerate": ("1.11", "1.15"),
    "peft": ("0.18.1", "0.21"),
    "deepspeed": ("0.18.4", "0.19"),
    "trl": ("0.24", "1.16"),
    "llamafactory": ("0.9.5", "0.9.5"),
}
"""The oldest and the newest versions that the tests pass with. A newer one is not refused."""
# As in pyproject.toml, but for LLaMA-Factory. Checked at run time, because `pip install --no-deps` does not check them.
OLDEST = {package: oldest for package, (oldest, _) in TESTED.items()}
NEEDED = ("torch", "transformers", "accelerate")
"""The packages of every run of Trainer."""


def is_older(version: str, oldest: str) -> bool:
    """Return whether a version precedes another one. A pre-release counts as the release that it leads to."""
    return _release(version) < _release(oldest)


def _release(version: str) -> list[int]:
    """Return the numbers in front of a version's first letter or sign."""
    return [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]


def remark(package: str, version: str) -> str:
    """Return how an installed version lies outside of those that were tested, in a few words; empty if it does not."""
    oldest, newest = TESTED.get(package, (version, version))
    if is_older(version, oldest):
        return f"too old: {oldest} or newer"
    return f"newer than tested: {newest}" if _release(version)[: len(_release(newest))] > _release(newest) else ""


def refuse_older(*packages: str) -> None:
    """Raise if an installed package is too old, before its first use fails with another error or is wrong.

    Args:
        packages: Names of distributions. One that is not installed is skipped.

    Raises:
        RuntimeError: the package, its version, and the oldest one that works.
    """
    for package in packages:
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if is_older(installed, OLDEST[package]):
            raise RuntimeError(
                f"Muon needs {package} {OLDEST[package]} or newer, and {installed} is installed. "
                f'Run: pip install "{package}>={OLDEST[package]}" [too-old]'
            )
