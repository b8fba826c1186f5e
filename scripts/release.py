"""Prepare what is released: the README of the package index, and the checks of a tag.

python scripts/release.py readme FOLDER    # rewrites FOLDER/README.md, from which a distribution is built then
python scripts/release.py check v0.1.0     # exits with 1 and says what is missing, if anything
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDER = ".invalid"
"""A part of each address in pyproject.toml that only the publisher knows."""


def found(pattern: str, path: Path) -> str:
    """Return the first group of a pattern in a file, or an empty string."""
    match = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


def version(root: Path = ROOT) -> str:
    return found(r'^__version__ = "(.+)"', root / "hf_muon" / "__init__.py")


def repository(root: Path = ROOT) -> str:
    return found(r'^Repository = "(.+)"', root / "pyproject.toml")


def for_index(text: str, url: str, ref: str) -> str:
    """Return a README as the package index shows it, which knows no other file of the repository.

    Args:
        text: The README of the repository.
        url: The address of the repository, to which relative links lead.
        ref: The branch or tag that links name.
    """

    def link(match: re.Match[str]) -> str:
        is_picture, label, target = match.groups()
        if ":" in target or target.startswith("#"):
            return match[0]
        return f"{is_picture}[{label}]({url}/{'raw' if is_picture else 'blob'}/{ref}/{target})"

    text = re.sub(r" ?<!-- .*? -->", "", text)
    text = re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)
    text = text.replace("git clone URL_OF_THIS_REPOSITORY hf_muon\n", "")
    return re.sub(r'(pip install "?)\./', r"\1", text)


def complaints(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """Return what contradicts the version, and with a tag what is missing for its release."""
    here = version(root)
    is_released = ".dev" not in here
    date = found(r"^date-released: (\S+)$", root / "CITATION.cff")
    heading = f"[{here}] - {date}" if is_released else "[Unreleased]"
    url = repository(root)
    checks = {
        f"CITATION.cff should have version: {here}": found(r"^version: (\S+)$", root / "CITATION.cff") == here,
        f"CHANGELOG.md should begin with ## {heading}": found(r"^## (.+)$", root / "CHANGELOG.md") == heading,
        "CITATION.cff should have date-released for a release, and only then": bool(date) == is_released,
        f"CITATION.cff should have repository-code: {url}": PLACEHOLDER in url
        or found(r"^repository-code: (\S+)$", root / "CITATION.cff") == url,
    }
    if tag is not None:
        checks |= {
            f"hf_muon.__version__ is {here}, the tag {tag}": tag == f"v{here}",
            f"the version {here} is not one to release": is_released,
            f"pyproject.toml has addresses that end in {PLACEHOLDER}": PLACEHOLDER
            not in (root / "pyproject.toml").read_text(encoding="utf-8"),
        }
    return [complaint for complaint, holds in checks.items() if not holds]


if __name__ == "__main__":
    command, argument = sys.argv[1:]
    if command == "readme":
        page = Path(argument) / "README.md"
        ref = "main" if ".dev" in version() else f"v{version()}"
        page.write_text(for_index(page.read_text(encoding="utf-8"), repository(), ref), encoding="utf-8")
    else:
        missing = complaints(tag=argument)
        print(*missing, sep="\n", end="\n" * bool(missing))
        sys.exit(bool(missing))
