"""What other Muons write into their optimizer states: the formats as data, and states read parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_muon.diagnostics.log import first_few

HALF = {True: "Muon", False: "AdamW"}


@dataclass(frozen=True)
class Format:
    """How one Muon keeps its state.

    Attributes:
        source: where that was read.
        has: keys that all of its param groups have.
        lacks: keys that none of them has.
        form: how it keeps the momentum, `ema` or `sgd`; None where its versions differ.
        not_muon: it lists the matrices ``(m, n)`` without these words in their names, then all the rest, both in the
            model's order. None where its users make the groups.
        lists_frozen: whether it lists parameters that are not trained.
        rule: what it fixes of the rule, or takes where its groups do not say, in the words of our options.
    """

    source: str
    has: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    form: str | None = None
    not_muon: tuple[str, ...] | None = None
    lists_frozen: bool = False
    rule: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, keys: frozenset[str]) -> bool:
        """Whether a param group with these keys can be one of its."""
        return self.has <= keys and not self.lacks & keys and bool({"momentum", "betas"} & keys)


# LLaMA-Factory took over Moonlight's code: AdamW's averages are `moment1` and `moment2`, `use_muon` is in the state.
_MOONLIGHT_KEYS = frozenset({"wd", "momentum", "nesterov", "ns_steps", "adamw_betas", "adamw_eps"})
_MOONLIGHT_RULE = {"ns_coefficients": "original", "adjust_lr_fn": "match_rms_adamw"}

FORMATS: dict[str, Format] = {
    "torch": Format(
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/_muon.py",
        has=frozenset({"momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "weight_decay"}),
        lacks=frozenset({"use_muon"}),
        form="ema",
    ),
    "llamafactory-v0": Format(
        "https://github.com/hiyouga/LLaMA-Factory/blob/v0.9.5/src/llamafactory/train/trainer_utils.py",
        has=_MOONLIGHT_KEYS,
        form="sgd",
        not_muon=("embed", "lm_head"),
        rule=_MOONLIGHT_RULE,
    ),
    "llamafactory-v1": Format(
        "https://github.com/hiyouga/LLaMA-Factory/tree/main/src/llamafactory/v1/plugins/trainer_plugins/optimizers",
        has=_MOONLIGHT_KEYS,
        form="sgd",
        not_muon=("embed", "lm_head", "wte", "wpe", "lora"),
        rule=_MOONLIGHT_RULE,
    ),
    "moonlight": Format(
        "https://github.com/MoonshotAI/Moonlight/blob/master/examples/toy_train.py",
        has=_MOONLIGHT_KEYS,
        form="sgd",
        not_muon=("embed_tokens", "lm_head"),
        lists_frozen=True,
        rule=_MOONLIGHT_RULE,
    ),
    "keller-jordan": Format(
        "https://github.com/KellerJordan/Muon/blob/master/muon.py",
        lacks=frozenset({"wd", "ns_coefficients"}),
        rule={"nesterov": True, "ns_coefficients": "original", "ns_steps": 5, "adjust_lr_fn": "original"},
    ),
}
# torch.optim.AdamW, which runs beside a Muon that has no such half.
_ADAMW = Format(
    "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py", has=frozenset({"betas", "eps", "amsgrad"})
)

# What the state of one parameter holds, by `use_muon`.
_MOMENTS = {
    frozenset({"momentum_buffer"}): True,
    frozenset({"step", "exp_avg", "exp_avg_sq"}): False,
    frozenset({"step", "moment1", "moment2"}): False,
}


@dataclass(frozen=True)
class Slot:
    """One parameter of a state: where it stands there, and its moments.

    Attributes:
        label: what to call it where it has no name.
        name: its name, where the state holds names.
        group: the param group it stands in.
        place: the number of that group, and the half of it.
        state: its moments; empty where it has none.
    """

    label: str
    name: str | None
    group: Mapping[str, Any]
    place: tuple[int, bool]
    state: Mapping[str, Any]

    @property
    def use_muon(self) -> bool:
        return self.place[1]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """That of its moments. A momentum of more than two dims may be kept as a matrix."""
        return next((tuple(value.shape) for key, value in self.state.items() if key != "step"), None)


def known(source: str) -> Format:
    """A format by its name.

    Raises:
        ValueError: with the names that are valid.
    """
    if source not in FORMATS:
        raise ValueError(f"{source!r} is not a format. Valid: {', '.join(FORMATS)}")
    return FORMATS[source]


def refuse(source: str, complaints: Iterable[str]) -> None:
    """Raise a ValueError with all complaints, if there are any."""
    if lines := list(complaints):
        raise ValueError(f"This state cannot be converted from {source}:\n  - " + first_few(lines, 10, "\n  - "))


def read(state_dict: Any, source: str | None, first_group: int = 0) -> list[Slot]:
    """The parameters of a state, in its order.

    Args:
        state_dict: what `state_dict()` gave, or one keyed by names.
        source: a key of `FORMATS`, or None for torch's AdamW.
        first_group: the number of its first param group.

    Raises:
        ValueError: it is not a state of that optimizer, or not a whole one.
    """
    called = source or "torch.optim.AdamW"
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state_dict.get("state"), Mapping):
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else f"a {type(state_dict).__name__}"
        refuse(called, [f"it is not an optimizer's state_dict, which holds 'state' and 'param_groups', but {found}"])
        raise AssertionError("unreachable")
    _check_groups(groups, called, known(source) if source else _ADAMW)
    slots: list[Slot] = []
    complaints: list[str] = []
    for number, group in enumerate(groups, first_group):
        names = group.get("param_names") or [key if isinstance(key, str) else None for key in group["params"]]
        for i, (key, name) in enumerate(zip(group["params"], names, strict=True)):
            state = dict(state_dict["state"].get(key) or {})
            flag = state.pop("use_muon", group.get("use_muon"))
            label = name or f"parameter {i} of group {number}"
            complaints += [f"{label}: {complaint}" for complaint in _state_complaints(state, flag)]
            held = _MOMENTS.get(frozenset(state))
            guess = source is not None and "betas" not in group  # nothing depends on it: it has no moments
            use_muon = bool(flag) if flag is not None else guess if held is None else held
            slots.append(Slot(label, name, group, (number, use_muon), state))
    refuse(called, complaints)
    return slots


def _check_groups(groups: Sequence[Any], called: str, form: Format) -> None:
    keys = [frozenset(group) if isinstance(group, Mapping) else frozenset() for group in groups]
    if all("params" in found and form.fits(found) for found in keys) and not any("ns_dtype" in found for found in keys):
        if any(group.get("amsgrad") for group in groups):
            refuse(called, ["it was written with amsgrad, which this AdamW does not have"])
        return
    like = [name for name, other in FORMATS.items() if all(other.fits(found) for found in keys)]
    looks = f"It looks like {' or '.join(like)}" if like else "No known format has such groups"
    if any("ns_dtype" in found for found in keys):
        looks = "It is hf_muon's own already"
    held = sorted(frozenset().union(*keys) - {"params"})
    refuse(called, [f"its param groups hold {held}, which are not those of that optimizer. {looks}"])


def _state_complaints(state: Mapping[str, Any], flag: Any) -> Iterator[str]:
    held = _MOMENTS.get(frozenset(state))
    if not state:
        return
    if held is None:
        lost = "" if {"step", "momentum_buffer"} & set(state) else " AdamW's mean nothing without their number of steps"
        yield f"its state holds {sorted(state)}, which is neither Muon's nor AdamW's.{lost}"
    elif flag is not None and bool(flag) != held:
        yield f"its state is {HALF[held]}'s, and its flag use_muon says {bool(flag)}"
    elif not all(isinstance(v, Tensor) and v.is_floating_point() for key, v in state.items() if key != "step"):
        yield f"its state {sorted(state)} holds something that is not a tensor of floats"
    elif not held and not float(state["step"]) >= 1:
        yield f"its step is {float(state['step'])} although it has moments"
