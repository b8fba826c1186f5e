"""Lines and numbers of the tables, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def line_of(cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def head_of(cells: Sequence[str]) -> list[str]:
    """Return the first two lines of a table."""
    return [line_of(cells), line_of(["---"] * len(cells))]


def settings_text(values: Mapping[str, Any]) -> str:
    """Return settings, `name value` each."""
    return " ".join(
        f"{key} {value:g}" if isinstance(value, float | int) else f"{key} {value}" for key, value in values.items()
    )


def probability(p: float) -> str:
    """Return a probability; nothing for NaN."""
    return "" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
