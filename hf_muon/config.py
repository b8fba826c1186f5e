"""Everything a user can say, in one frozen dataclass: typed, checked, the same in Python, YAML and `optim_args`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_muon.coefficients import PRESETS, resolve
from hf_muon.distributed.base import has_data
from hf_muon.momentum import MOMENTUM_DTYPES
from hf_muon.newton_schulz import MAX_BATCH_BYTES, NS_DTYPES
from hf_muon.update import ADJUST_LR_FNS

LORA_ROUTES = ("adamw", "muon")
COMM_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
OFFLOAD_COMPUTE = ("auto", "cpu", "accelerator")
MAX_BUCKET_BYTES = 256 * 2**20


class _InvalidError(Exception):
    """The value is not one of the option's values."""


@dataclass(frozen=True)
class _Option:
    """How one option is read from text, checked, and described."""

    valid: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any]


def _number(valid: str, accepts: Callable[[float], bool]) -> _Option:
    def check(value: Any) -> float:
        # numpy's scalars are real numbers, too.
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise _InvalidError
        number = float(value)
        if not (math.isfinite(number) and accepts(number)):
            raise _InvalidError
        return number

    return _Option(valid, check, float)


def _learning_rate() -> _Option:
    number = _number("a number of at least 0", lambda x: x >= 0)

    def check(value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # as in torch, for schedules that change the rate inside a graph
            if value.numel() != 1 or value.is_complex():
                raise _InvalidError
            if has_data(value):
                number.check(value.item())
            return value
        return number.check(value)

    return dataclasses.replace(number, check=check)


def _integer(valid: str, accepts: Callable[[int], bool]) -> _Option:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not accepts(value):
            raise _InvalidError
        return value

    return _Option(valid, check, int)


def _flag() -> _Option:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise _InvalidError
        return value

    return _Option("true or false", check, lambda text: words[text.lower()])


def _choice(values: Sequence[str]) -> _Option:
    def check(value: Any) -> str:
        if value not in values:
            raise _InvalidError
        return str(value)

    return _Option(" or ".join(values), check, str)


def _path() -> _Option:
    def check(value: Any) -> str | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            raise _InvalidError
        return str(os.fspath(value))

    return _Option("the path of a file", check, str)


def _floats(value: Any, count: int) -> tuple[float, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != count:
        raise _InvalidError
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x) for x in value):
        raise _InvalidError
    return tuple(float(x) for x in value)


def _betas() -> _Option:
    def check(value: Any) -> tuple[float, ...]:
        betas = _floats(value, 2)
        if not all(0 <= beta < 1 for beta in betas):
            raise _InvalidError
        return betas

    return _Option(
        "two numbers from 0 to below 1, written 0.9|0.95", check, lambda text: [float(x) for x in text.split("|")]
    )


def _coefficients() -> _Option:
    def check(value: Any) -> str | tuple[float, ...]:
        if isinstance(value, str):
            if value not in PRESETS:
                raise _InvalidError
            return value
        return _floats(value, 3)

    def parse(text: str) -> Any:
        return [float(x) for x in text.split("|")] if "|" in text else text

    return _Option(f"{', '.join(PRESETS)}, or three numbers, written 3.4445|-4.775|2.0315", check, parse)


def _patterns() -> _Option:
    def check(value: Any) -> str | tuple[str, ...]:
        if isinstance(value, str) and value:
            return value
        if isinstance(value, Sequence) and value and all(isinstance(x, str) and x for x in value):
            return tuple(value)
        raise _InvalidError

    return _Option("a regular expression, or several joined by |", check, str)


# The hyperparameters that a param group of `Muon` carries, besides `use_muon`.
GROUP_OPTIONS: dict[str, _Option] = {
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
OPTIMIZER_OPTIONS: dict[str, _Option] = {
    "max_bucket_bytes": _integer("a positive number of bytes", lambda x: x > 0),
    "max_batch_bytes": _integer("a positive number of bytes", lambda x: x > 0),
    "comm_dtype": _choice(tuple(COMM_DTYPES)),
    "offload_compute": _choice(OFFLOAD_COMPUTE),
    "accept_rerouted": _flag(),
    "diagnostics_every": _integer("a number of steps, 0 for never", lambda x: x >= 0),
    "diagnostics_file": _path(),
}

OPTIONS: dict[str, _Option] = {
    **GROUP_OPTIONS,
    **OPTIMIZER_OPTIONS,
    "muon_lr": _number("a number of at least 0", lambda x: x >= 0),
    "adamw_lr": _number("a number of at least 0", lambda x: x >= 0),
    "adamw_weight_decay": _number("a number of at least 0", lambda x: x >= 0),
    "muon_patterns": _patterns(),
    "adamw_patterns": _patterns(),
    "optim_target_modules": _patterns(),
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
    except (_InvalidError, TypeError, OverflowError):
        raise ValueError(f"{name}={value!r} is not valid. Valid: {option.valid}") from None


def unknown_option(name: str, valid: Sequence[str]) -> ValueError:
    """The error for a key that is no option, with the nearest one that is."""
    near = difflib.get_close_matches(name, valid, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{name!r} is not an option of muon.{hint} Valid: {', '.join(valid)}")


@dataclass(frozen=True)
class MuonConfig:
    """What a user can say about Muon and its AdamW half.

    Attributes:
        lr: learning rate of both halves, unless one has its own.
        weight_decay: decoupled weight decay; norms and biases in the AdamW half have none.
        muon_lr: learning rate of the Muon half, if it differs from `lr`.
        adamw_lr: learning rate of the AdamW half, if it differs from `lr`.
        adamw_weight_decay: weight decay of the AdamW half, if it differs from `weight_decay`.
        momentum: decay of the exponential moving average of the gradients.
        nesterov: whether the update looks one step ahead along the average.
        momentum_dtype: how the average is kept between steps: `auto` (fp32), `fp32`, `bf16` (stochastic rounding) or
            `int8` (a scale for every 64 elements of a row).
        ns_coefficients: Newton-Schulz preset `polar_express`, `original`, `you_jiacheng`, `cans`, or three numbers.
        ns_steps: Newton-Schulz steps.
        ns_dtype: dtype of the Newton-Schulz products: `auto`, `bf16`, `fp16` or `fp32`.
        adjust_lr_fn: scale of a direction by its shape: `match_rms_adamw`, `original` or `rms_to_rms`.
        adamw_betas: AdamW's averaging coefficients.
        adamw_eps: AdamW's denominator term.
        muon_patterns: regular expressions of parameter names that go to Muon against the rules.
        adamw_patterns: regular expressions of parameter names that go to AdamW; they win over `muon_patterns`.
        optim_target_modules: restricts Muon to these modules, as in `TrainingArguments`.
        lora: where LoRA factors go, `adamw` or `muon`.
        split_fused: orthogonalize fused projections part by part; otherwise as the one matrix that they are stored as.
        per_head: orthogonalize query, key and value projections head by head.
        max_bucket_bytes: bound on the bytes of updates and directions that a rank holds at once in a distributed step.
        max_batch_bytes: bound on the bytes that orthogonalizing matrices of one shape together takes, their updates
            and directions among them.
        comm_dtype: dtype in which updates travel between ranks: `fp32`, which is exact, or `bf16`.
        offload_compute: where momentum that is offloaded to the CPU is orthogonalized: `auto` (on the accelerator that
            the model computes on), `cpu` or `accelerator`.
        accept_rerouted: resume from checkpoints in which parameters were on the other side, Muon or AdamW, with
            their moments at zero.
        diagnostics_every: steps from one line of metrics to the next, on rank 0; 0 for none.
        diagnostics_file: where these lines go.

    Raises:
        ValueError: a value that is not valid, by name, with the valid ones.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    muon_lr: float | None = None
    adamw_lr: float | None = None
    adamw_weight_decay: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    momentum_dtype: str = "auto"
    ns_coefficients: str | tuple[float, float, float] = "polar_express"
    ns_steps: int = 5
    ns_dtype: str = "auto"
    adjust_lr_fn: str = "match_rms_adamw"
    adamw_betas: tuple[float, float] = (0.9, 0.999)
    adamw_eps: float = 1e-8
    muon_patterns: str | Sequence[str] | None = None
    adamw_patterns: str | Sequence[str] | None = None
    optim_target_modules: str | Sequence[str] | None = None
    lora: str = "adamw"
    split_fused: bool = True
    per_head: bool = False
    max_bucket_bytes: int = MAX_BUCKET_BYTES
    max_batch_bytes: int = MAX_BATCH_BYTES
    comm_dtype: str = "fp32"
    offload_compute: str = "auto"
    accept_rerouted: bool = False
    diagnostics_every: int = 0
    diagnostics_file: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            object.__setattr__(self, field.name, check_option(field.name, value))
        resolve(self.ns_coefficients, self.ns_steps)
        if self.per_head and not self.split_fused:
            raise ValueError("per_head=true goes head by head, and split_fused=false keeps parts together: drop one")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> MuonConfig:
        """Read options as a YAML file or a command line gives them.

        Numbers and flags may be text: PyYAML reads `1e-5` as a string, and `optim_args` holds nothing but strings.

        Raises:
            ValueError: an unknown option, or a value that cannot be read or is out of range.
        """
        return cls().replace(mapping)

    def replace(self, mapping: Mapping[str, Any]) -> MuonConfig:
        """A copy with other values, read as by `from_mapping`."""
        return dataclasses.replace(self, **{name: _read(name, value) for name, value in mapping.items()})


def _read(name: str, value: Any) -> Any:
    if name not in OPTIONS:
        raise unknown_option(name, MuonConfig.names())
    if not isinstance(value, str):
        return value
    option = OPTIONS[name]
    try:
        return option.parse(value)
    except (ValueError, KeyError):
        raise ValueError(f"{name}={value} cannot be read. Valid: {option.valid}") from None


def parse_optim_args(text: str | None) -> dict[str, str]:
    """Split `optim_args`, `"momentum=0.9,ns_steps=6"`, as transformers does: blanks dropped, commas between items.

    Raises:
        ValueError: an item that is not `name=value`, an unknown name, or a name given twice.
    """
    options: dict[str, str] = {}
    for item in (text or "").replace(" ", "").split(","):
        if not item and not text:
            continue
        name, equals, value = item.partition("=")
        if not (name and equals and value) or "=" in value:
            raise ValueError(
                f"optim_args: {item!r} is not of the form name=value. Items are joined by commas, lists by |, and a "
                f"value cannot hold a comma or an equals sign. Valid names: {', '.join(MuonConfig.names())}"
            )
        if name not in OPTIONS:
            raise unknown_option(name, MuonConfig.names())
        if name in options:
            raise ValueError(f"optim_args: {name} is given twice, {options[name]!r} and {value!r}")
        options[name] = value
    return options
