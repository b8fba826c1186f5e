"""Every option of muon, in one frozen dataclass: declared once, checked, the same in Python, YAML and `optim_args`."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from hf_muon.math.coefficients import AUTO, resolve
from hf_muon.math.moments import MOMENT_DTYPES
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.math.precision import NS_DTYPES
from hf_muon.math.rounding import WEIGHT_ROUNDINGS
from hf_muon.math.update import ADJUST_LR_FNS, check_scale
from hf_muon.options import types
from hf_muon.options.declaration import Option, documented, option, options_of
from hf_muon.storage.tensors import quoted

COMM_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}

LORA = ("adamw", "muon")
_JORDAN = "[Jordan](https://kellerjordan.github.io/posts/muon/)"
_LIU = "[2502.16982](https://arxiv.org/abs/2502.16982)"


@dataclass(frozen=True)
class MuonConfig:
    """Options of Muon, and of the AdamW that steps the parameters that are not hidden matrices.

    Each field declares an option: its type, its default, its meaning and its source. The rest follows from the fields:
    how text is read, the checks, the defaults of `Muon`, what its copies carry, docstrings, and docs/options.md.

    Attributes:
        {options}
        rules: The options of rules that were registered, by name; see :mod:`hf_muon.rules`.

    Raises:
        ValueError: a value is not valid; the message names the option and its valid values.
    """

    lr: Annotated[float | None, types.learning_rate()] = option(
        1e-3, "Learning rate.", fallback="`learning_rate`", source="torch", may_be_unset=True
    )
    weight_decay: Annotated[float, types.non_negative()] = option(
        0.0,
        "Decoupled weight decay, applied as `1 - lr * weight_decay`. `build_optimizer` gives none to norms and biases.",
        fallback="`weight_decay`",
        source="torch, transformers",
    )
    muon_lr: Annotated[float | None, types.non_negative()] = option(
        None,
        "Learning rate of the Muon groups. The scheduler scales it together with that of the AdamW groups.",
        scope="model",
        fallback="`lr`",
    )
    adamw_lr: Annotated[float | None, types.non_negative()] = option(
        None,
        "Learning rate of the AdamW groups. The scheduler scales it together with that of the Muon groups.",
        scope="model",
        fallback="`lr`",
    )
    adamw_weight_decay: Annotated[float | None, types.non_negative()] = option(
        None,
        "Weight decay of AdamW's embeddings and heads; 0 for none. Norms and biases keep none.",
        scope="model",
        fallback="`weight_decay`",
    )
    lora: Annotated[str, types.choice(LORA)] = option(
        "adamw",
        "Optimizer of LoRA factors: `adamw` or `muon`. With `adamw`, a run that trains nothing else is refused.",
        scope="model",
    )
    muon_patterns: Annotated[str | Sequence[str] | None, types.patterns()] = option(
        None,
        "Regular expressions, joined by `|`. Matrices whose names match go to Muon even if the rules say AdamW.",
        scope="model",
    )
    adamw_patterns: Annotated[str | Sequence[str] | None, types.patterns()] = option(
        None,
        "Regular expressions, joined by `|`. Parameters whose names match go to AdamW; they win over `muon_patterns`.",
        scope="model",
    )
    momentum_dtype: Annotated[str, types.choice(MOMENT_DTYPES)] = option(
        "auto",
        "Dtype in which momentum is stored: `auto` (fp32), `fp32`, `bf16` (stochastic rounding) or `int8` (a scale for "
        "every 64 elements of a row). Steps compute in fp32.",
        source="[2110.02861](https://arxiv.org/abs/2110.02861), [2509.23106](https://arxiv.org/abs/2509.23106), "
        "[docs](docs/momentum.md)",
    )
    adamw_state_dtype: Annotated[str, types.choice(MOMENT_DTYPES)] = option(
        "auto",
        "Dtype in which AdamW's moments are stored: `auto` (fp32, also for bf16 and fp16 weights), `fp32`, `bf16` "
        "(stochastic rounding) or `int8` (a scale for every 64 elements of a row). Steps compute in fp32.",
        source="torch, [2110.02861](https://arxiv.org/abs/2110.02861), [docs](docs/bf16-weights.md)",
    )
    diagnostics_every: Annotated[int, types.integer("a number of steps, 0 for never", 0)] = option(
        0,
        "Number of steps between two lines of metrics, which rank 0 writes; 0 for none, unless "
        "`HF_MUON_DIAGNOSTICS_EVERY` is set. The weights stay bit-identical.",
        scope="optimizer",
        source="[docs](docs/command-line.md#diagnostics)",
    )
    # From here on for experiments; those above are `FRONT`.
    momentum: Annotated[float, types.number("a number from 0 to below 1", 0, 1)] = option(
        0.95, "Decay of the moving average of the gradients.", source=f"{_JORDAN}, torch"
    )
    nesterov: bool = option(
        True, "Use Nesterov momentum: the update looks one step ahead along the average.", source=f"{_JORDAN}, torch"
    )
    lr_scales: Annotated[str | Mapping[str, float] | None, types.factors()] = option(
        None,
        "Factors of the learning rate by name: `{embed: 0.3, head: 0.5}` in YAML and Python, `embed:0.3|head:0.5` in "
        "`optim_args`. Names are searched for regular expressions; the first that matches counts.",
        scope="model",
    )
    ns_coefficients: Annotated[str | Sequence[float] | Sequence[Sequence[float]], types.coefficients()] = option(
        "polar_express",
        "Newton-Schulz coefficients: the preset `polar_express` or `original`, three numbers, `a|b|c`, or a list with "
        "three for each step, as text `a|b|c|a|b|c`.",
        source="[docs](docs/how-it-works.md#coefficients)",
    )
    ns_steps: Annotated[int | str, types.steps()] = option(
        AUTO,
        "Number of Newton-Schulz steps, or `auto`: those that are listed, else 5.",
        source=f"{_JORDAN}, torch",
    )
    ns_dtype: Annotated[str, types.choice(tuple(NS_DTYPES))] = option(
        "auto",
        "Dtype of the Newton-Schulz matrix products: `auto` (fp16 on NVIDIA GPUs, elsewhere bf16 where the hardware "
        "has it, else fp32), `bf16`, `fp16` (not on a CPU) or `fp32`.",
    )
    adjust_lr_fn: Annotated[str, types.choice(ADJUST_LR_FNS)] = option(
        "match_rms_adamw",
        "Scale of a direction by the shape of its matrix: `match_rms_adamw` update_rms * sqrt(max(out, in)), "
        "`original` sqrt(max(1, out / in)) or `spectral_unclamped` sqrt(out / in).",
        source=f"{_LIU}, {_JORDAN}, [2310.17813](https://arxiv.org/abs/2310.17813)",
    )
    update_rms: Annotated[float, types.number("a number above 0", sys.float_info.min)] = option(
        0.2, "RMS of updates before the rate, under `match_rms_adamw`.", source=_LIU
    )
    adamw_betas: Annotated[tuple[float, float], types.betas()] = option(
        (0.9, 0.999),
        "Decay rates of AdamW's moving averages.",
        fallback="`adam_beta1`, `adam_beta2`",
        source="torch",
    )
    adamw_eps: Annotated[float, types.non_negative()] = option(
        1e-8, "Term added to AdamW's denominator.", fallback="`adam_epsilon`", source="torch"
    )
    weight_rounding: Annotated[str, types.choice(WEIGHT_ROUNDINGS)] = option(
        "auto",
        "How steps round bf16 weights: `auto` (stochastic), `stochastic`, which on average loses no update, or "
        "`nearest`, which loses updates below half a unit in the last place. fp16 weights are refused but with "
        "`nearest`; fp32 weights are not rounded.",
        source="[2010.06192](https://arxiv.org/abs/2010.06192), [docs](docs/bf16-weights.md)",
    )
    per_head: bool = option(False, "Orthogonalize query, key and value projections head by head.", scope="model")
    max_batch_bytes: Annotated[int, types.integer("a positive number of bytes", 1)] = option(
        MAX_BATCH_BYTES,
        "Upper limit for the temporary memory of Newton-Schulz in bytes, updates and directions included. Matrices of "
        "one shape are processed in batches that fit; a larger matrix is a batch by itself. In a distributed step a "
        "rank has at most 3.6 times this limit in flight; a larger round is sent without overlap.",
        scope="optimizer",
    )
    comm_dtype: Annotated[str, types.choice(tuple(COMM_DTYPES))] = option(
        "fp32",
        "Dtype in which updates and directions travel between ranks: `fp32` (exact) or `bf16` (half the bytes).",
        scope="optimizer",
    )
    # Those of `hf_muon.rules`.
    momentum_warmup: Annotated[int, types.integer("a number of steps, 0 for none", 0)] = option(
        0,
        "Number of first steps over which momentum rises linearly from 0.85 to `momentum`; 0 for none.",
        source="[modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt), "
        "[nanochat](https://github.com/karpathy/nanochat)",
    )
    normalize: Annotated[str, types.choice(("none", "rows"))] = option(
        "none",
        "Normalize directions: `none`, or `rows` (NorMuon) by the second moment of each row over the steps.",
        source="[2510.05491](https://arxiv.org/abs/2510.05491)",
    )
    balance: Annotated[str, types.choice(("none", "updates"))] = option(
        "none",
        "Give rows equal norms: `none`, or `updates` (MuonEq) before orthogonalization.",
        source="[2603.28254](https://arxiv.org/abs/2603.28254)",
    )
    weight_decay_mode: Annotated[str, types.choice(("decoupled", "cautious"))] = option(
        "decoupled",
        "Which weights of Muon groups decay: `decoupled` (all) or `cautious` (those that their direction moves towards "
        "zero).",
        source="[2510.12402](https://arxiv.org/abs/2510.12402)",
    )
    qk_clip: Annotated[float | None, types.number("a number above 0, or inf", sys.float_info.min, None)] = option(
        None,
        "Rescale query and key rows of heads whose largest attention logit is above this threshold, as 100 "
        "(MuonClip); `inf` measures the logits and rescales nothing.",
        fallback="off",
        source="[2507.20534](https://arxiv.org/abs/2507.20534), [docs](docs/qk-clip.md)",
    )
    rules: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, option_of_muon in _OWN.items():
            value = getattr(self, name)
            if value is not None or getattr(MuonConfig, name) is not None:
                object.__setattr__(self, name, option_of_muon.check(name, value))
        rules = {name: check_option(name, value) for name, value in self.rules.items()}
        object.__setattr__(self, "rules", rules)
        resolve(self.ns_coefficients, self.ns_steps)
        check_scale(self.adjust_lr_fn, self.update_rms)

    def value_of(self, name: str) -> Any:
        """Return the value of an option, of a registered rule's too; the default if it is not set."""
        value = getattr(self, name) if name in _OWN else self.rules.get(name)
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
        values = {name: option_of(name).read(name, value) for name, value in mapping.items()}
        rules = {name: values.pop(name) for name in mapping if name not in _OWN}
        return dataclasses.replace(self, **values, rules={**self.rules, **rules})


_OWN = options_of(MuonConfig)
FRONT = tuple(itertools.takewhile(lambda name: name != "momentum", _OWN))
"""The options that errors and documents name first; the rest is for experiments."""
# `hf_muon.rules.register` adds options of param groups to these tables.
OPTIONS = dict(_OWN)
"""Every option by name."""
GROUP_OPTIONS = {name: of for name, of in _OWN.items() if of.scope == "group"}
"""The hyperparameters of a param group of `Muon`, in addition to `use_muon`."""
OPTIMIZER_OPTIONS = {name: of for name, of in _OWN.items() if of.scope == "optimizer"}
"""The options that `Muon` holds as a whole."""
MUON_OPTIONS = {**GROUP_OPTIONS, **OPTIMIZER_OPTIONS}
"""The options among the arguments of `Muon`."""


documented(_OWN)(MuonConfig)


def option_of(name: Any, among: Mapping[str, Option] = OPTIONS, more: Sequence[str] = ()) -> Option:
    """Return the option of this name.

    Args:
        name: the name of the option.
        among: the options that are valid here, by name.
        more: other names that are valid here, for the error.

    Raises:
        ValueError: there is no such option; the message names the closest one, and the valid ones.
    """
    if isinstance(name, str) and name in among:
        return among[name]
    valid, hint = [*more, *among], ""
    if name in OPTIONS:
        whose = "Muon as a whole" if OPTIONS[name].scope == "optimizer" else "build_optimizer and MuonOfGroups"
        hint = f" It belongs to {whose}."
    elif near := _close_to(name[:100], valid) if isinstance(name, str) else []:
        hint = f" Did you mean {near[0]!r}?"
    raise ValueError(f"{quoted(name)} is not an option of muon.{hint} Valid: {listed(valid)} [unknown-option]")


def _close_to(name: str, valid: Sequence[str]) -> list[str]:
    """Return the names most like one, or those that hold it, as `adamw_betas` holds `beta1` without its number."""
    stem = name.rstrip("0123456789")
    return difflib.get_close_matches(name, valid, n=1) or [other for other in valid if len(stem) > 2 and stem in other]


def check_option(name: str, value: Any, among: Mapping[str, Option] = OPTIONS, more: Sequence[str] = ()) -> Any:
    """Return the canonical form of a value.

    Raises:
        ValueError: as `option_of`, or the option does not take the value; the message names the valid ones.
    """
    return option_of(name, among, more).check(name, value)


def listed(names: Collection[str]) -> str:
    """Join names for an error. Options that are not in `FRONT` are only counted."""
    shown = [name for name in names if name in FRONT or name not in OPTIONS]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f", and {rest} more, in docs/options.md of the repository" if rest else "")
