"""Every option of muon, in one frozen dataclass: declared once, checked, the same in Python, YAML and `optim_args`."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_muon.math.coefficients import AUTO, resolve
from hf_muon.math.moments import MOMENT_DTYPES
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.math.precision import NS_DTYPES
from hf_muon.math.rounding import WEIGHT_ROUNDINGS
from hf_muon.math.update import ADJUST_LR_FNS, check_scale
from hf_muon.options import declaration, types
from hf_muon.options.declaration import Option, check_value, documented, option, options_of, quoted
from hf_muon.rules import registry
from hf_muon.rules.fields import RuleOptions
from hf_muon.storage.host import OFFLOADS

__all__ = [
    "COMM_DTYPES",
    "GROUP_OPTIONS",
    "MUON_OPTIONS",
    "OPTIMIZER_OPTIONS",
    "OPTIONS",
    "MuonConfig",
    "check_option",
    "unknown_option",
]

COMM_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}

LORA = ("adamw", "muon", "muon_b")
_JORDAN = "[Jordan](https://kellerjordan.github.io/posts/muon/)"
_LIU = "[2502.16982](https://arxiv.org/abs/2502.16982)"


@dataclass(frozen=True)
class MuonConfig(RuleOptions):
    """Options of Muon, and of the AdamW that steps the parameters that are not hidden matrices.

    Each field declares an option: its default, its type, its meaning and its source. The rest follows from the fields:
    how text is read, the checks, the defaults of `Muon`, what its copies carry, docstrings, and docs/options.md.

    Attributes:
        {options}
        rules: The options of rules that others have registered, by name; see :mod:`hf_muon.rules`.

    Raises:
        ValueError: a value is not valid; the message names the option and its valid values.
    """

    lr: float | None = option(
        1e-3,
        types.learning_rate(),
        "Learning rate.",
        scope="group",
        fallback="`learning_rate`",
        source="torch",
        may_be_unset=True,
    )
    weight_decay: float = option(
        0.0,
        types.non_negative(),
        "Decoupled weight decay, applied as `1 - lr * weight_decay`. `build_optimizer` gives none to norms and biases.",
        scope="group",
        fallback="`weight_decay`",
        source="torch, transformers",
    )
    muon_lr: float | None = option(
        None,
        types.non_negative(),
        "Learning rate of the Muon groups. The scheduler scales it together with that of the AdamW groups.",
        fallback="`lr`",
    )
    adamw_lr: float | None = option(
        None,
        types.non_negative(),
        "Learning rate of the AdamW groups. The scheduler scales it together with that of the Muon groups.",
        fallback="`lr`",
    )
    adamw_weight_decay: float | None = option(
        None, types.non_negative(), "Weight decay of AdamW. Norms and biases keep none.", fallback="`weight_decay`"
    )
    momentum: float = option(
        0.95,
        types.number("a number from 0 to below 1", 0, 1),
        "Decay of the moving average of the gradients.",
        scope="group",
        source=f"{_JORDAN}, torch",
    )
    nesterov: bool = option(
        True,
        types.flag(),
        "Use Nesterov momentum: the update looks one step ahead along the average.",
        scope="group",
        source=f"{_JORDAN}, torch",
    )
    lr_scales: str | Mapping[str, float] | None = option(
        None,
        types.factors(),
        "Factors of the learning rate by name: `{embed: 0.3, head: 0.5}` in YAML and Python, `embed:0.3|head:0.5` in "
        "`optim_args`. Names are searched for regular expressions; the first that matches counts.",
    )
    momentum_dtype: str = option(
        "auto",
        types.choice(MOMENT_DTYPES),
        "Dtype in which momentum is stored: `auto` (fp32), `fp32`, `bf16` (stochastic rounding) or `int8` (a scale for "
        "every 64 elements of a row). Steps compute in fp32.",
        scope="group",
        source="[2110.02861](https://arxiv.org/abs/2110.02861), [2509.23106](https://arxiv.org/abs/2509.23106), "
        "[docs](docs/momentum.md)",
    )
    ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]] = option(
        "polar_express",
        types.coefficients(),
        "Newton-Schulz coefficients: the preset `polar_express`, `original`, `you_jiacheng`, `cans` or "
        "`deepseek_v4`, three numbers, `a|b|c`, or a list with three for each step, as text `a|b|c|a|b|c`.",
        scope="group",
        source="[docs](docs/how-it-works.md#coefficients)",
    )
    ns_steps: int | str = option(
        AUTO,
        types.steps(1, 100),
        "Number of Newton-Schulz steps, or `auto`: 10 for `deepseek_v4`, those that are listed, else 5.",
        scope="group",
        source=f"{_JORDAN}, torch",
    )
    ns_dtype: str = option(
        "auto",
        types.choice(tuple(NS_DTYPES)),
        "Dtype of the Newton-Schulz matrix products: `auto` (fp16 on NVIDIA GPUs, elsewhere bf16 where the hardware "
        "has it, else fp32), `bf16`, `fp16` (not on a CPU) or `fp32`.",
        scope="group",
    )
    adjust_lr_fn: str = option(
        "match_rms_adamw",
        types.choice(ADJUST_LR_FNS),
        "Scale of a direction by the shape of its matrix: `match_rms_adamw` update_rms * sqrt(max(out, in)), "
        "`original` sqrt(max(1, out / in)) or `spectral_unclamped` sqrt(out / in).",
        scope="group",
        source=f"{_LIU}, {_JORDAN}, [2310.17813](https://arxiv.org/abs/2310.17813)",
    )
    update_rms: float = option(
        0.2, types.above_zero(), "RMS of updates before the rate, under `match_rms_adamw`.", scope="group", source=_LIU
    )
    adamw_betas: tuple[float, float] = option(
        (0.9, 0.999),
        types.betas(),
        "Decay rates of AdamW's moving averages.",
        scope="group",
        fallback="`adam_beta1`, `adam_beta2`",
        source="torch",
    )
    adamw_eps: float = option(
        1e-8,
        types.non_negative(),
        "Term added to AdamW's denominator.",
        scope="group",
        fallback="`adam_epsilon`",
        source="torch",
    )
    adamw_state_dtype: str = option(
        "auto",
        types.choice(MOMENT_DTYPES),
        "Dtype in which AdamW's moments are stored: `auto` (fp32, also for bf16 and fp16 weights), `fp32`, `bf16` "
        "(stochastic rounding) or `int8` (a scale for every 64 elements of a row). Steps compute in fp32.",
        scope="group",
        source="torch, [2110.02861](https://arxiv.org/abs/2110.02861), [docs](docs/bf16-weights.md)",
    )
    weight_rounding: str = option(
        "auto",
        types.choice(WEIGHT_ROUNDINGS),
        "How steps round bf16 and fp16 weights: `auto` (stochastic), `stochastic`, which on average loses no update, "
        "or `nearest`, which loses updates below half a unit in the last place. fp32 weights are not rounded.",
        scope="group",
        source="[2010.06192](https://arxiv.org/abs/2010.06192), [docs](docs/bf16-weights.md)",
    )
    muon_patterns: str | Sequence[str] | None = option(
        None,
        types.patterns(),
        "Regular expressions, joined by `|`. Matrices whose names match go to Muon even if the rules say AdamW.",
    )
    adamw_patterns: str | Sequence[str] | None = option(
        None,
        types.patterns(),
        "Regular expressions, joined by `|`. Parameters whose names match go to AdamW; they win over `muon_patterns`.",
    )
    lora: str = option(
        "adamw", types.choice(LORA), "Optimizer of LoRA factors: `adamw`, `muon` or `muon_b` (lora_B alone)."
    )
    per_head: bool = option(False, types.flag(), "Orthogonalize query, key and value projections head by head.")
    max_batch_bytes: int = option(
        MAX_BATCH_BYTES,
        types.integer("a positive number of bytes", 1),
        "Upper limit for the temporary memory of Newton-Schulz in bytes, updates and directions included. Matrices of "
        "one shape are processed in batches that fit; a single larger matrix goes alone. In a distributed step a rank "
        "has 3.6 times as many bytes under way at most, and what exceeds that is sent without overlap.",
        scope="optimizer",
    )
    comm_dtype: str = option(
        "fp32",
        types.choice(tuple(COMM_DTYPES)),
        "Dtype in which updates and directions travel between ranks: `fp32` (exact) or `bf16` (half the bytes).",
        scope="optimizer",
    )
    momentum_offload: str = option(
        "none",
        types.choice(OFFLOADS),
        "Where moments are stored between steps, those of AdamW too: `none` (with their parameters) or `cpu` (in the "
        "host's memory; a step brings them to the device in turn). The weights stay bit-identical.",
        scope="group",
        source="[docs](docs/offload.md)",
    )
    diagnostics_every: int = option(
        0,
        types.integer("a number of steps, 0 for never", 0),
        "Number of steps between two lines of metrics, which rank 0 writes; 0 for none, unless "
        "`HF_MUON_DIAGNOSTICS_EVERY` is set. The weights stay bit-identical.",
        scope="optimizer",
        source="[docs](docs/command-line.md#diagnostics)",
    )
    rules: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, own in options_of(self).items():
            value = getattr(self, name)
            if value is not None or not own.may_be_unset:
                object.__setattr__(self, name, check_value(name, own, value))
        rules = {name: check_option(name, value) for name, value in self.rules.items()}
        object.__setattr__(self, "rules", rules)
        resolve(self.ns_coefficients, self.ns_steps)
        check_scale(self.adjust_lr_fn, self.update_rms)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(OPTIONS)

    def value_of(self, name: str) -> Any:
        """Return the value of an option, also of one that a registered rule declares; the default if it is not set."""
        value = self.rules.get(name) if name in registry.OTHERS_OPTIONS else getattr(self, name)
        return OPTIONS[name].default if value is None else value

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> MuonConfig:
        """Read options as a YAML file or a command line gives them.

        Numbers and flags may be text: PyYAML reads `1e-5` as a string, and `optim_args` holds only strings.

        Raises:
            ValueError: an option is unknown, or a value cannot be read or is out of range.
        """
        return cls().replace(mapping)

    def replace(self, mapping: Mapping[str, Any]) -> MuonConfig:
        """Return a copy with other values, read as by `from_mapping`."""
        if not isinstance(mapping, Mapping):
            raise ValueError(f"options of muon are a mapping of names to values, not {quoted(mapping)} [not-a-mapping]")
        values = {name: _read(name, value) for name, value in mapping.items()}
        rules = {name: values.pop(name) for name in mapping if name in registry.OTHERS_OPTIONS}
        return dataclasses.replace(self, **values, rules={**self.rules, **rules})


_OWN = dict(sorted(options_of(MuonConfig).items(), key=lambda item: item[0] not in MuonConfig.__annotations__))
FRONT = (
    *("lr", "weight_decay", "muon_lr", "adamw_lr", "adamw_weight_decay", "lora", "muon_patterns", "adamw_patterns"),
    *("momentum_dtype", "adamw_state_dtype", "momentum_offload", "diagnostics_every"),
)
"""The options that errors and documents name first; the rest is for experiments."""
_OWN = {name: _OWN[name] for name in (*FRONT, *(name for name in _OWN if name not in FRONT))}
registry.reserve([*_OWN, "rules"])
OPTIONS = ChainMap(_OWN, registry.OTHERS_OPTIONS)
"""Every option by name, with those of registered rules."""
GROUP_OPTIONS = ChainMap(
    {name: option for name, option in _OWN.items() if option.scope == "group"}, registry.OTHERS_OPTIONS
)
"""The hyperparameters that a param group of `Muon` holds, besides `use_muon`."""
OPTIMIZER_OPTIONS = {name: option for name, option in _OWN.items() if option.scope == "optimizer"}
"""The options that `Muon` holds as a whole."""
MUON_OPTIONS = ChainMap(GROUP_OPTIONS.maps[0], OPTIMIZER_OPTIONS, registry.OTHERS_OPTIONS)
"""The options among the arguments of `Muon`."""

documented(_OWN)(MuonConfig)


def known_option(name: Any) -> Option | None:
    """Return the option of this name, if need be after loading the rules of installed packages; None if there is none.

    Raises:
        RuntimeError: a package's rule cannot be loaded.
    """
    if not isinstance(name, str):
        return None
    if name not in OPTIONS:
        registry.load_entry_points()
    return OPTIONS.get(name)


def unknown_option(name: Any, valid: Sequence[str] | None = None) -> ValueError:
    """Return the error for a key that is not an option, with the closest one that is."""
    return declaration.unknown_option(
        name, MuonConfig.names() if valid is None else valid, hidden=OPTIONS.keys() - FRONT
    )


def check_option(name: str, value: Any) -> Any:
    """Return the canonical form of a value.

    Raises:
        ValueError: there is no such option, or it does not take the value; the message names the valid ones.
    """
    if (known := known_option(name)) is None:
        raise unknown_option(name)
    return check_value(name, known, value)


def _read(name: Any, value: Any) -> Any:
    if (known := known_option(name)) is None:
        raise unknown_option(name)
    if not isinstance(value, str):
        return value
    try:
        return known.type.parse(value)
    except (ValueError, KeyError):
        text = value if len(value) <= 200 else f"{value[:200]}..."
        raise ValueError(f"{name}={text} cannot be read. Valid: {known.type.valid} [invalid-value]") from None
