"""The options of muon one by one: which values each takes, how text is read, and what is said of any other value."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_muon.math.coefficients import PRESETS
from hf_muon.math.momentum import MOMENTUM_DTYPES
from hf_muon.math.newton_schulz import NS_DTYPES
from hf_muon.math.update import ADJUST_LR_FNS
from hf_muon.patterns import compile_patterns
from hf_muon.storage.tensors import has_data

LORA_ROUTES = ("adamw", "muon")
COMM_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
OFFLOAD_COMPUTE = ("auto", "cpu", "accelerator")
MAX_BUCKET_BYTES = 256 * 2**20
_RATE_ROUNDING = 1e-12  # schedules that compute a rate from the one before, as LinearLR does, end this close to 0


class _InvalidError(Exception):
    """The value is not one of the option's values; with the reason in words, where the valid ones do not say it."""


@dataclass(frozen=True)
class Option:
    """How one option is read from text, checked, and described."""

    valid: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any]


def _number(valid: str, accepts: Callable[[float], bool]) -> Option:
    def check(value: Any) -> float:
        # numpy's scalars are real numbers, too.
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise _InvalidError
        number = float(value)
        if not (math.isfinite(number) and accepts(number)):
            raise _InvalidError
        return number

    return Option(valid, check, float)


def _learning_rate() -> Option:
    number = _number("a number of at least 0", lambda x: x > -_RATE_ROUNDING)

    def check(value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # as in torch, for schedules that change the rate inside a graph
            if value.numel() != 1 or value.is_complex():
                raise _InvalidError
            if has_data(value):
                number.check(value.item())
            return value
        return max(number.check(value), 0.0)

    return dataclasses.replace(number, check=check)


def _integer(valid: str, accepts: Callable[[int], bool]) -> Option:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not accepts(int(value)):
            raise _InvalidError
        return int(value)

    return Option(valid, check, int)


def _flag() -> Option:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

    def check(value: Any) -> bool:
        of_numpy = getattr(getattr(value, "dtype", None), "kind", "") == "b" and not value.shape
        if not (isinstance(value, bool) or of_numpy):
            raise _InvalidError
        return bool(value)

    return Option("true or false", check, lambda text: words[text.lower()])


def _choice(values: Sequence[str]) -> Option:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise _InvalidError
        return str(value)

    return Option(" or ".join(values), check, str)


def _path() -> Option:
    def check(value: Any) -> str | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            raise _InvalidError
        return str(os.fspath(value))

    return Option("the path of a file", check, str)


def _floats(value: Any, count: int) -> tuple[float, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != count:
        raise _InvalidError
    if any(isinstance(x, bool) or not isinstance(x, numbers.Real) or not math.isfinite(float(x)) for x in value):
        raise _InvalidError
    return tuple(float(x) for x in value)


def _betas() -> Option:
    def check(value: Any) -> tuple[float, ...]:
        betas = _floats(value, 2)
        if not all(0 <= beta < 1 for beta in betas):
            raise _InvalidError
        return betas

    return Option(
        "two numbers from 0 to below 1, written 0.9|0.95", check, lambda text: [float(x) for x in text.split("|")]
    )


def _coefficients() -> Option:
    def check(value: Any) -> str | tuple[float, ...]:
        if isinstance(value, str):
            if value not in PRESETS:
                raise _InvalidError
            return value
        return _floats(value, 3)

    def parse(text: str) -> Any:
        return [float(x) for x in text.split("|")] if "|" in text else text

    return Option(f"{', '.join(PRESETS)}, or three numbers, written 3.4445|-4.775|2.0315", check, parse)


def _patterns(compile_: Callable[[Any], Any] = compile_patterns) -> Option:
    def check(value: Any) -> str | tuple[str, ...]:
        single = isinstance(value, str)
        if not single and not (isinstance(value, Sequence) and all(isinstance(x, str) and x for x in value)):
            raise _InvalidError
        if not value:
            raise _InvalidError
        try:
            compile_(value)
        except ValueError as error:
            raise _InvalidError(str(error)) from None
        return value if single else tuple(value)

    return Option("a regular expression, or several joined by |", check, str)


# The hyperparameters that a param group of `Muon` carries, besides `use_muon`.
GROUP_OPTIONS: dict[str, Option] = {
    "lr": _learning_rate(),
    "weight_decay": _number("a number of at least 0", lambda x: x >= 0),
    "momentum": _number("a number from 0 to below 1", lambda x: 0 <= x < 1),
    "nesterov": _flag(),
    "momentum_dtype": _choice(MOMENTUM_DTYPES),
    "ns_coefficients": _coefficients(),
    "ns_steps": _integer("an integer from 1 to 99", lambda x: 1 <= x < 100),
    "ns_dtype": _choice(tuple(NS_DTYPES)),
    "adjust_lr_fn": _choice(ADJUST_LR_FNS),
    "adamw_betas": _betas(),
    "adamw_eps": _number("a number of at least 0", lambda x: x >= 0),
}

# What the optimizer as a whole carries, and no param group.
OPTIMIZER_OPTIONS: dict[str, Option] = {
    "max_bucket_bytes": _integer("a positive number of bytes", lambda x: x > 0),
    "max_batch_bytes": _integer("a positive number of bytes", lambda x: x > 0),
    "comm_dtype": _choice(tuple(COMM_DTYPES)),
    "offload_compute": _choice(OFFLOAD_COMPUTE),
    "accept_rerouted": _flag(),
    "diagnostics_every": _integer("a number of steps, 0 for never", lambda x: x >= 0),
    "diagnostics_file": _path(),
}

OPTIONS: dict[str, Option] = {
    **GROUP_OPTIONS,
    **OPTIMIZER_OPTIONS,
    "muon_lr": _number("a number of at least 0", lambda x: x >= 0),
    "adamw_lr": _number("a number of at least 0", lambda x: x >= 0),
    "adamw_weight_decay": _number("a number of at least 0", lambda x: x >= 0),
    "muon_patterns": _patterns(),
    "adamw_patterns": _patterns(),
    "optim_target_modules": _patterns(lambda value: compile_patterns([value] if isinstance(value, str) else value)),
    "lora": _choice(LORA_ROUTES),
    "split_fused": _flag(),
    "per_head": _flag(),
}


def check_option(name: str, value: Any) -> Any:
    """The canonical form of a value.

    Raises:
        ValueError: the value is not valid; the message says which are.
    """
    option = OPTIONS[name]
    try:
        return option.check(value)
    except (_InvalidError, TypeError, OverflowError) as error:
        reason = f": {error}" if isinstance(error, _InvalidError) and str(error) else ""
        raise ValueError(f"{name}={shown(value)} is not valid{reason}. Valid: {option.valid}") from None


def shown(value: Any) -> str:
    """Return a value as an error quotes it."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  an integer of more digits than Python prints, or somebody else's class
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}..."


def unknown_option(name: Any, valid: Sequence[str]) -> ValueError:
    """Return the error for a key that is no option, with the nearest one that is."""
    near = difflib.get_close_matches(name[:100], valid, n=1) if isinstance(name, str) else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{shown(name)} is not an option of muon.{hint} Valid: {', '.join(valid)}")
