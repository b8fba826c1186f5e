"""The types of options: numbers, flags, choices, patterns and others, each with its check and its parser."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_muon.math.coefficients import AUTO, PRESETS
from hf_muon.options.patterns import compile_patterns, parse_factors
from hf_muon.storage.tensors import has_data

_MOST_STEPS = 99


class InvalidError(Exception):
    """The option does not take this value. The message may add a reason that the valid values do not show."""


@dataclass(frozen=True)
class OptionType:
    """The values that an option takes.

    Attributes:
        valid: these values in words, for errors.
        check: returns the canonical form of a value, or raises `InvalidError`.
        parse: reads a value from text, as `optim_args` and YAML hold it; `check` follows.
        choices: the words that the option takes, if it takes words.
    """

    valid: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any]
    choices: tuple[str, ...] = ()


def number(valid: str, low: float, below: float = math.inf) -> OptionType:
    """Return the type of a number of at least `low` that is less than `below`."""

    def check(value: Any) -> float:
        # numpy's scalars are real numbers, too.
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InvalidError
        number = float(value)
        if not low <= number < below:
            raise InvalidError
        return number

    return OptionType(valid, check, float)


def non_negative() -> OptionType:
    """Return the type of a number of at least 0."""
    return number("a number of at least 0", 0)


def positive() -> OptionType:
    """Return the type of a number above 0, or infinity."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InvalidError
        number = float(value)
        if not number > 0:
            raise InvalidError
        return number

    return OptionType("a number above 0, or inf", check, float)


def above_zero() -> OptionType:
    """Return the type of a finite number above 0."""
    return number("a number above 0", sys.float_info.min)


def learning_rate() -> OptionType:
    """Return the type of a learning rate: a number of at least 0, or a tensor with one."""
    rate = non_negative()

    def check(value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # as in torch, for schedules that change the rate inside a graph
            if value.numel() != 1 or value.is_complex():
                raise InvalidError
            if has_data(value):
                rate.check(value.item())
            return value
        return rate.check(value)

    return dataclasses.replace(rate, check=check)


def integer(valid: str, low: int, below: float = math.inf) -> OptionType:
    """Return the type of an integer of at least `low` that is less than `below`."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) < below:
            raise InvalidError
        return int(value)

    return OptionType(valid, check, int)


def steps(low: int, below: int) -> OptionType:
    """Return the type of a number of Newton-Schulz steps: ``auto``, or an integer of at least `low` below `below`."""
    whole = integer(f"{AUTO}, or an integer from {low} to {below - 1}", low, below)

    def check(value: Any) -> int | str:
        return AUTO if isinstance(value, str) and value == AUTO else whole.check(value)

    return OptionType(whole.valid, check, lambda text: text if text == AUTO else int(text), (AUTO,))


def flag() -> OptionType:
    """Return the type of a truth value."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

    def check(value: Any) -> bool:
        is_numpy_bool = getattr(getattr(value, "dtype", None), "kind", "") == "b" and not value.shape
        if not (isinstance(value, bool) or is_numpy_bool):
            raise InvalidError
        return bool(value)

    return OptionType("true or false", check, lambda text: words[text.lower()])


def choice(values: Sequence[str]) -> OptionType:
    """Return the type of one word out of several."""
    *others, last = values

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise InvalidError
        return str(value)

    return OptionType(f"{', '.join(others)} or {last}", check, str, tuple(values))


def betas() -> OptionType:
    """Return the type of AdamW's two decay rates."""

    def check(value: Any) -> tuple[float, ...]:
        betas = _floats(value, 2)
        if not all(0 <= beta < 1 for beta in betas):
            raise InvalidError
        return betas

    return OptionType("two numbers from 0 to below 1, written 0.9|0.95", check, _parse_floats)


def coefficients() -> OptionType:
    """Return the type of Newton-Schulz coefficients: a preset's name, three numbers, or three for each of some steps.

    Text has no brackets: it holds the numbers of all steps in a row. So a list of one step cannot be written, and is
    not valid.
    """

    def check(value: Any) -> str | tuple[Any, ...]:
        if isinstance(value, str):
            if value not in PRESETS:
                raise InvalidError
            return value
        if not isinstance(value, Sequence) or not any(isinstance(x, Sequence) for x in value):
            return _floats(value, 3)
        if len(value) == 1:
            raise InvalidError("a list of one step; write its three numbers, and ns_steps: 1")
        if len(value) > _MOST_STEPS:
            raise InvalidError(f"{len(value)} steps")
        return tuple(_floats(triple, 3) for triple in value)

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
    return OptionType(valid, check, parse, tuple(PRESETS))


def patterns() -> OptionType:
    """Return the type of regular expressions."""

    def check(value: Any) -> str | tuple[str, ...]:
        is_text = isinstance(value, str)
        if not is_text and not (isinstance(value, Sequence) and all(isinstance(x, str) and x for x in value)):
            raise InvalidError
        if not value:
            raise InvalidError
        try:
            compile_patterns(value)
        except ValueError as error:
            raise InvalidError(str(error)) from None
        return value if is_text else tuple(value)

    return OptionType("a regular expression, or several joined by |", check, str)


def factors() -> OptionType:
    """Return the type of factors by pattern: a mapping, pairs, or text ``pattern:factor|pattern:factor``."""
    factor = non_negative()

    def check(value: Any) -> tuple[tuple[str, float], ...]:
        if isinstance(value, str):
            value = parse(value)
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, Sequence) or not pairs:
            raise InvalidError
        checked = []
        for pair in pairs:
            if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
                raise InvalidError
            pattern, number = pair
            try:
                re.compile(pattern)
                number = factor.check(float(number) if isinstance(number, str) else number)
            except (re.error, OverflowError, RecursionError) as error:
                raise InvalidError(f"{pattern!r} is not a regular expression: {error}") from None
            except ValueError:  # of text that is no number
                raise InvalidError from None
            checked.append((pattern, number))
        return tuple(checked)

    def parse(text: str) -> Any:
        try:
            return parse_factors(text)
        except ValueError as error:
            raise InvalidError(str(error)) from None

    valid = "regular expressions with factors of at least 0, a mapping, or text as embed:0.3|head:0.5"
    return OptionType(valid, check, str)


def _floats(value: Any, count: int) -> tuple[float, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != count:
        raise InvalidError
    if any(isinstance(x, bool) or not isinstance(x, numbers.Real) or not math.isfinite(float(x)) for x in value):
        raise InvalidError
    return tuple(float(x) for x in value)


def _parse_floats(text: str) -> list[float]:
    return [float(x) for x in text.split("|")]
