"""Print constraints with other versions: `python scripts/pin.py torch=2.12.0 transformers= constraints/newest.txt`.

A version may be `oldest`, the lower bound in pyproject.toml, or `newest`, which removes the constraint; an empty one
changes nothing. The oldest and newest transformers take accelerate, peft and TRL along, which are released with it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAMILY = ("transformers", "accelerate", "peft", "trl")


def bounds() -> dict[str, str]:
    """Return the lower bounds that pyproject.toml declares."""
    return dict(re.findall(r'"(\w+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))


def pinned(text: str, versions: dict[str, str]) -> str:
    """Return constraints with the versions of some packages replaced.

    Args:
        text: The constraints, one on each line.
        versions: A version, `oldest`, `newest` or the empty string, by package.

    Raises:
        ValueError: the constraints do not name one of the packages.
    """
    wanted = {package: version for package, version in versions.items() if version}
    if wanted.get("transformers") in ("oldest", "newest"):
        named = set(re.findall(r"^\w+(?===)", text, re.MULTILINE))
        wanted |= dict.fromkeys(named.intersection(FAMILY), wanted["transformers"])
    for package, version in wanted.items():
        line = {"newest": "", "oldest": f"{package}=={bounds().get(package)}"}.get(version, f"{package}=={version}")
        text, count = re.subn(rf"^{package}==.*$", line, text, flags=re.MULTILINE)
        if not count:
            raise ValueError(f"these constraints have no {package}, whose version should be {version}")
    return text


if __name__ == "__main__":
    *pairs, file = sys.argv[1:]
    print(pinned(Path(file).read_text(encoding="utf-8"), dict(pair.split("=") for pair in pairs)), end="")
