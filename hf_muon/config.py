"""Everything a user can say, in one frozen dataclass: typed, checked, the same in Python, YAML and `optim_args`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_muon.math.coefficients import resolve
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.options import (
    COMM_DTYPES,
    GROUP_OPTIONS,
    MAX_BUCKET_BYTES,
    OPTIMIZER_OPTIONS,
    OPTIONS,
    check_option,
    shown,
    unknown_option,
)

__all__ = [
    "COMM_DTYPES",
    "GROUP_OPTIONS",
    "MAX_BUCKET_BYTES",
    "OPTIMIZER_OPTIONS",
    "OPTIONS",
    "MuonConfig",
    "check_option",
    "parse_optim_args",
    "text_of",
    "unknown_option",
]


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
        """Return a copy with other values, read as by `from_mapping`."""
        if not isinstance(mapping, Mapping):
            raise ValueError(f"options of muon are a mapping of names to values, not {shown(mapping)}")
        return dataclasses.replace(self, **{name: _read(name, value) for name, value in mapping.items()})


def _read(name: Any, value: Any) -> Any:
    if not isinstance(name, str) or name not in OPTIONS:
        raise unknown_option(name, MuonConfig.names())
    if not isinstance(value, str):
        return value
    option = OPTIONS[name]
    try:
        return option.parse(value)
    except (ValueError, KeyError):
        shown = value if len(value) <= 200 else f"{value[:200]}..."
        raise ValueError(f"{name}={shown} cannot be read. Valid: {option.valid}") from None


def parse_optim_args(text: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Split `optim_args`, `"momentum=0.9,ns_steps=6"`, as transformers does: blanks dropped, commas between items.

    A mapping of names to values, as a YAML file may hold it, says the same.

    Raises:
        ValueError: an item that is not `name=value`, an unknown name, or a name given twice.
    """
    if isinstance(text, Mapping):
        for name in text:
            if name not in OPTIONS:
                raise unknown_option(name, MuonConfig.names())
        return dict(text)
    if text is not None and not isinstance(text, str):
        raise ValueError(f'optim_args={shown(text)} is neither text, "name=value,name=value", nor a mapping')
    options: dict[str, Any] = {}
    for item in (text or "").replace(" ", "").split(","):
        if not item and not text:
            continue
        name, equals, value = item.partition("=")
        if not (name and equals and value) or "=" in value:
            raise ValueError(
                f"optim_args: {shown(item)} is not of the form name=value. Items are joined by commas, lists by |, and "
                f"a value cannot hold a comma or an equals sign. Valid names: {', '.join(MuonConfig.names())}"
            )
        if name not in OPTIONS:
            raise unknown_option(name, MuonConfig.names())
        if name in options:
            raise ValueError(f"optim_args: {name} is given twice, {options[name]!r} and {value!r}")
        options[name] = value
    return options


def text_of(options: Mapping[str, Any]) -> str:
    """Return options as the text of `optim_args`, which transformers splits again.

    Raises:
        ValueError: a value that such a text cannot hold.
    """
    items = []
    for name, value in options.items():
        if value is None:
            continue
        several = isinstance(value, Sequence) and not isinstance(value, str)
        text = "|".join(map(str, value)) if several else str(value)
        if not text or set(text) & set(" ,="):
            raise ValueError(
                f"optim_args: {name}={shown(value)} holds a blank, a comma or an equals sign, at which transformers "
                "splits. Write a pattern with \\s, \\x2c or \\x3d in their place"
            )
        items.append(f"{name}={text}")
    return ",".join(items)
