"""Regular expressions of names, as users write them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def compile_patterns(patterns: str | Sequence[str] | None) -> list[re.Pattern[str]]:
    """Return compiled patterns: those of a sequence, or the alternatives of one text.

    Raises:
        ValueError: a pattern is empty, or is not a regular expression.
    """
    if patterns is None:
        return []
    pieces = list(patterns)
    if isinstance(patterns, str):
        flags = re.match(r"(\(\?[aiLmsux]+\))?", patterns)
        prefix = flags[0] if flags else ""
        pieces = [piece and prefix + piece for piece in _alternatives(patterns[len(prefix) :])]
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


def is_factors(value: object) -> bool:
    """Return whether a value is pairs of a pattern and a factor, as a checked option holds them."""
    return isinstance(value, tuple) and bool(value) and all(_is_factor(pair) for pair in value)


def _is_factor(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and not isinstance(pair[1], str)


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


def _alternatives(pattern: str) -> list[str]:
    """Split at each ``|`` outside brackets, so that each alternative can be tested for a match."""
    pieces, depth, in_class, current = [], 0, False, ""
    escaped = False
    for character in pattern:
        if escaped or character == "\\":
            escaped = not escaped
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            pieces.append(current)
            current = ""
            continue
        current += character
    return [*pieces, current]
