"""Regular expressions of names, as users write them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def compile_patterns(patterns: str | Sequence[str] | None) -> list[re.Pattern[str]]:
    """Return compiled patterns: those of a sequence, or the alternatives of one text.

    Raises:
        ValueError: a pattern is empty, or is not a regular expression.
    """
    pieces = patterns or ()
    if isinstance(patterns, str):
        # Flags stand once before all alternatives, and hold for each.
        flags, rest = re.fullmatch(r"((?:\(\?[aiLmsux]+\))?)(.*)", patterns, re.DOTALL).groups()  # type: ignore[union-attr]
        pieces = [piece and flags + piece for piece in _alternatives(rest)]
    compiled = []
    for piece in pieces:
        try:
            compiled.append(re.compile(piece))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{piece!r} is not a regular expression: {error}") from None
        if not piece:
            raise ValueError(f"{patterns!r} has an empty alternative, which would match every parameter")
    return compiled


def parse_factors(text: str) -> list[tuple[str, str]]:
    """Split ``pattern:factor|pattern:factor`` into patterns and the texts of their factors.

    The last colon of an item splits it. What has no factor is an alternative of the next pattern: ``norm|bias:0.5``.

    Raises:
        ValueError: the last item has no factor.
    """
    pairs: list[tuple[str, str]] = []
    waiting = ""
    for piece in _alternatives(text):
        pattern, _, factor = piece.rpartition(":")
        if pattern and _NUMBER.fullmatch(factor):
            pairs.append((waiting + pattern, factor))
            waiting = ""
        else:
            waiting += f"{piece}|"
    if waiting or not pairs:
        raise ValueError(f"{text!r} does not end in a factor")
    return pairs


def factor_text(pattern: str, factor: object) -> str:
    """Return an item that `parse_factors` reads; a pattern with alternatives may get brackets around it."""
    text = f"{pattern}:{factor}"
    try:
        if parse_factors(text) == [(pattern, str(factor))]:
            return text
    except ValueError:
        pass
    return f"(?:{pattern}):{factor}"


_NUMBER = re.compile(r"[0-9.]+(e[+-]?[0-9]+)?", re.IGNORECASE)
# An escape, a set of characters, or a character.
_TOKEN = re.compile(r"\\.|\[(?:\\.|[^]\\])*]?|.", re.DOTALL)


def _alternatives(pattern: str) -> list[str]:
    """Split at each ``|`` outside brackets, so that each alternative can be tested for a match."""
    pieces, depth = [""], 0
    for token in _TOKEN.findall(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += token
    return pieces
