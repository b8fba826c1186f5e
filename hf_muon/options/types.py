"""The types of options: which values an option takes, how text is read, and the words that errors have for them."""

from __future__ import annotations

import dataclasses
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_muon.math.coefficients import AUTO, PRESETS
from hf_muon.options.patterns import compile_patterns, parse_factors
from hf_muon.storage.tensors import has_data

_MOST_STEPS = 99


@dataclass(frozen=True)
class OptionType:
    """The values that an option takes. An annotation holds it: ``Annotated[float, types.non_negative()]``.

    Attributes:
        valid: these values in words, for errors.
        check: returns the canonical form of a value, or raises ValueError; its text, if any, is a reason that the
            valid values do not show.
        parse: reads a value from text, as `optim_args` and YAML hold it; `check` follows.
        choices: the words that the option takes, if it takes words.
    """

    valid: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()


def number(valid: str, low: float, below: float | None = math.inf) -> OptionType:
    """Return the type of a number of at least `low` that is less than `below`; without `below` it may be infinite."""

    def check(value: Any) -> float:
        # numpy's scalars are real numbers, too.
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low <= float(value):
            raise ValueError
        if below is not None and not float(value) < below:
            raise ValueError
        return float(value)

    return OptionType(valid, check, float)


def integer(valid: str, low: int, below: int = 2**63) -> OptionType:
    """Return the type of an integer of at least `low` that is less than `below`."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) < below:
            raise ValueError
        return int(value)

    return OptionType(valid, check, int)


def non_negative() -> OptionType:
    """Return the type of a finite number of at least 0."""
    return number("a number of at least 0", 0)


def learning_rate() -> OptionType:
    """Return the type of a learning rate: a number of at least 0, or a tensor with one."""
    rate = non_negative()

    def check(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return rate.check(value)
        if value.numel() != 1 or value.is_complex():
            raise ValueError
        if has_data(value):
            rate.check(value.item())
        # The tensor itself, as in torch: a schedule may change it in place, inside of a graph.
        return value

    return dataclasses.replace(rate, check=check)


def flag() -> OptionType:
    """Return the type of a truth value."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

    def check(value: Any) -> bool:
        is_numpy_bool = getattr(getattr(value, "dtype", None), "kind", "") == "b" and not value.shape
        if not (isinstance(value, bool) or is_numpy_bool):
            raise ValueError
        return bool(value)

    return OptionType("true or false", check, lambda text: words[text.lower()])


def choice(values: Sequence[str]) -> OptionType:
    """Return the type of one word out of several."""
    *words, last = values

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise ValueError
        return str(value)

    return OptionType(f"{', '.join(words)} or {last}", check, choices=tuple(values))


def steps() -> OptionType:
    """Return the type of a number of Newton-Schulz steps: ``auto``, or an integer."""
    whole = integer(f"{AUTO}, or an integer from 1 to {_MOST_STEPS}", 1, _MOST_STEPS + 1)

    def check(value: Any) -> int | str:
        return AUTO if isinstance(value, str) and value == AUTO else whole.check(value)

    return OptionType(whole.valid, check, lambda text: text if text == AUTO else int(text), (AUTO,))


def betas() -> OptionType:
    """Return the type of AdamW's two decay rates."""
    beta = number("a number from 0 to below 1", 0, 1)
    valid = "two numbers from 0 to below 1, written 0.9|0.95"
    return OptionType(valid, lambda value: _tuple_of(beta, 2, value), _parse_floats)


def coefficients() -> OptionType:
    """Return the type of Newton-Schulz coefficients: a preset's name, three numbers, or three for each of some steps.

    Text has no brackets: it holds the numbers of all steps in a row. So a list of one step cannot be written, and is
    not valid.
    """
    preset, finite = choice(tuple(PRESETS)), number("a number", -sys.float_info.max)

    def check(value: Any) -> str | tuple[Any, ...]:
        if isinstance(value, str):
            return preset.check(value)  # type: ignore[no-any-return]
        if not isinstance(value, Sequence) or not any(isinstance(x, Sequence) for x in value):
            return _tuple_of(finite, 3, value)
        if len(value) == 1:
            raise ValueError("a list of one step; write its three numbers, and ns_steps: 1")
        if len(value) > _MOST_STEPS:
            raise ValueError(f"{len(value)} steps")
        return tuple(_tuple_of(finite, 3, triple) for triple in value)

    def parse(text: str) -> Any:
        if "|" not in text:
            return text
        numbers = _parse_floats(text)
        if len(numbers) <= 3 or len(numbers) % 3:
            return numbers
        return [numbers[i : i + 3] for i in range(0, len(numbers), 3)]

    valid = (
        f"{', '.join(PRESETS)}, or three numbers, written 3.4445|-4.775|2.0315, or a list with three for each step, "
        "written as text one after the other"
    )
    return OptionType(valid, check, parse, preset.choices)


def patterns() -> OptionType:
    """Return the type of regular expressions: text, or a sequence of texts."""

    def check(value: Any) -> str | tuple[str, ...]:
        pieces = (value,) if isinstance(value, str) else value
        if not isinstance(pieces, Sequence) or not pieces or not all(isinstance(x, str) and x for x in pieces):
            raise ValueError
        compile_patterns(value)
        return value if isinstance(value, str) else tuple(value)

    return OptionType("a regular expression, or several joined by |", check)


def factors() -> OptionType:
    """Return the type of factors by pattern: a mapping, pairs, or text ``pattern:factor|pattern:factor``."""
    factor = non_negative()

    def check(value: Any) -> tuple[tuple[str, float], ...]:
        if isinstance(value, str):
            value = parse_factors(value)
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, Sequence) or not pairs:
            raise ValueError
        checked = []
        for pair in pairs:
            if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
                raise ValueError
            compile_patterns(pair[:1])
            checked.append((pair[0], factor.check(float(pair[1]) if isinstance(pair[1], str) else pair[1])))
        return tuple(checked)

    valid = "regular expressions with factors of at least 0, a mapping, or text as embed:0.3|head:0.5"
    return OptionType(valid, check)


def _tuple_of(type: OptionType, count: int, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != count:
        raise ValueError
    return tuple(map(type.check, value))


def _parse_floats(text: str) -> list[float]:
    return [float(x) for x in text.split("|")]
