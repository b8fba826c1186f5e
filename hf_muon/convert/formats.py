"""The state formats of other Muons as data, and the reading of such a state parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_muon.diagnostics.log import first_few

ALGORITHM = {True: "Muon", False: "AdamW"}
"""By `use_muon`."""


@dataclass(frozen=True)
class Format:
    """How another Muon saves its state.

    Attributes:
        url: the code that defines it.
        has: keys that all of its param groups have.
        lacks: keys that none of its param groups has.
        momentum_form: how it keeps the momentum, `ema` or `sgd`; None where its versions differ.
        not_muon: words. It lists the matrices ``(m, n)`` whose names have none of them, then all other parameters, each
            in the model's order. None where its users make the groups.
        lists_frozen: whether it lists parameters that are not trained.
        options: our options for what it hard-codes, or for its defaults where its groups do not say.
    """

    url: str
    has: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    momentum_form: str | None = None
    not_muon: tuple[str, ...] | None = None
    lists_frozen: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, keys: frozenset[str]) -> bool:
        """Return whether a param group of this format can have these keys."""
        return self.has <= keys and not self.lacks & keys and bool({"momentum", "betas"} & keys)


# LLaMA-Factory copied Moonlight's code: AdamW's moments are `moment1` and `moment2`, and `use_muon` is in the state.
_MOONLIGHT_KEYS = frozenset({"wd", "momentum", "nesterov", "ns_steps", "adamw_betas", "adamw_eps"})
_MOONLIGHT_OPTIONS = {"ns_coefficients": "original", "adjust_lr_fn": "match_rms_adamw"}

FORMATS: dict[str, Format] = {
    "torch": Format(
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/_muon.py",
        has=frozenset({"momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "weight_decay"}),
        lacks=frozenset({"use_muon"}),
        momentum_form="ema",
    ),
    "llamafactory-v0": Format(
        "https://github.com/hiyouga/LLaMA-Factory/blob/v0.9.5/src/llamafactory/train/trainer_utils.py",
        has=_MOONLIGHT_KEYS,
        momentum_form="sgd",
        not_muon=("embed", "lm_head"),
        options=_MOONLIGHT_OPTIONS,
    ),
    "llamafactory-v1": Format(
        "https://github.com/hiyouga/LLaMA-Factory/tree/main/src/llamafactory/v1/plugins/trainer_plugins/optimizers",
        has=_MOONLIGHT_KEYS,
        momentum_form="sgd",
        not_muon=("embed", "lm_head", "wte", "wpe", "lora"),
        options=_MOONLIGHT_OPTIONS,
    ),
    "moonlight": Format(
        "https://github.com/MoonshotAI/Moonlight/blob/master/examples/toy_train.py",
        has=_MOONLIGHT_KEYS,
        momentum_form="sgd",
        not_muon=("embed_tokens", "lm_head"),
        lists_frozen=True,
        options=_MOONLIGHT_OPTIONS,
    ),
    "keller-jordan": Format(
        "https://github.com/KellerJordan/Muon/blob/master/muon.py",
        lacks=frozenset({"wd", "ns_coefficients"}),
        options={"nesterov": True, "ns_coefficients": "original", "ns_steps": 5, "adjust_lr_fn": "original"},
    ),
}
# torch.optim.AdamW, which trains the other parameters beside a Muon that steps matrices only.
_ADAMW = Format(
    "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py", has=frozenset({"betas", "eps", "amsgrad"})
)

# Keys of the state of one parameter, and whether Muon keeps it.
_USE_MUON_BY_KEYS = {
    frozenset({"momentum_buffer"}): True,
    frozenset({"step", "exp_avg", "exp_avg_sq"}): False,
    frozenset({"step", "moment1", "moment2"}): False,
}


@dataclass(frozen=True)
class SourceParameter:
    """One parameter of a source's state.

    Attributes:
        label: what to call it where it has no name.
        name: its name, where the state has names.
        group: its param group.
        group_number: the position of that group.
        use_muon: whether Muon stepped it.
        state: its moments; empty where it has none.
    """

    label: str
    name: str | None
    group: Mapping[str, Any]
    group_number: int
    use_muon: bool
    state: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its moments. Some Muons flatten a momentum of more than two dims to a matrix."""
        return next((tuple(value.shape) for key, value in self.state.items() if key != "step"), None)


def format_of(source: str) -> Format:
    """Return the format of this name.

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


def read_state(state_dict: Any, source: str | None, first_group: int = 0) -> list[SourceParameter]:
    """Return the parameters of a state, in its order.

    Args:
        state_dict: the source's `state_dict()`, or one keyed by names.
        source: a key of `FORMATS`, or None for torch's AdamW.
        first_group: the number of its first param group.

    Raises:
        ValueError: it is not a state of that optimizer, or parts of it are missing.
    """
    title = source or "torch.optim.AdamW"
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state_dict.get("state"), Mapping):
        content = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else f"a {type(state_dict).__name__}"
        refuse(title, [f"it is not an optimizer's state_dict, which holds 'state' and 'param_groups', but {content}"])
        raise AssertionError("unreachable")
    _check_groups(groups, title, format_of(source) if source else _ADAMW)
    params: list[SourceParameter] = []
    complaints: list[str] = []
    for number, group in enumerate(groups, first_group):
        names = group.get("param_names") or [key if isinstance(key, str) else None for key in group["params"]]
        for i, (key, name) in enumerate(zip(group["params"], names, strict=True)):
            state = dict(state_dict["state"].get(key) or {})
            flag = state.pop("use_muon", group.get("use_muon"))
            label = name or f"parameter {i} of group {number}"
            complaints += [f"{label}: {complaint}" for complaint in _state_complaints(state, flag)]
            if flag is None:
                # Without moments nothing depends on the guess.
                flag = _USE_MUON_BY_KEYS.get(frozenset(state), source is not None and "betas" not in group)
            params.append(SourceParameter(label, name, group, number, bool(flag), state))
    refuse(title, complaints)
    return params


def _check_groups(groups: Sequence[Any], title: str, expected: Format) -> None:
    keys_of_groups = [frozenset(group) if isinstance(group, Mapping) else frozenset() for group in groups]
    is_own = any("ns_dtype" in keys for keys in keys_of_groups)
    if all("params" in keys and expected.fits(keys) for keys in keys_of_groups) and not is_own:
        if any(group.get("amsgrad") for group in groups):
            refuse(title, ["it was written with amsgrad, which this AdamW does not have"])
        return
    candidates = [name for name, other in FORMATS.items() if all(other.fits(keys) for keys in keys_of_groups)]
    hint = f"It looks like {' or '.join(candidates)}" if candidates else "No known format has such groups"
    if is_own:
        hint = "It is hf_muon's own already"
    all_keys = sorted(frozenset().union(*keys_of_groups) - {"params"})
    refuse(title, [f"its param groups hold {all_keys}, which are not those of that optimizer. {hint}"])


def _state_complaints(state: Mapping[str, Any], flag: Any) -> Iterator[str]:
    use_muon = _USE_MUON_BY_KEYS.get(frozenset(state))
    if not state:
        return
    if use_muon is None:
        lost = "" if {"step", "momentum_buffer"} & set(state) else " AdamW's mean nothing without their number of steps"
        yield f"its state holds {sorted(state)}, which is neither Muon's nor AdamW's.{lost}"
    elif flag is not None and bool(flag) != use_muon:
        yield f"its state is {ALGORITHM[use_muon]}'s, and its flag use_muon says {bool(flag)}"
    elif not all(isinstance(v, Tensor) and v.is_floating_point() for key, v in state.items() if key != "step"):
        yield f"its state {sorted(state)} holds something that is not a tensor of floats"
    elif not use_muon and not float(state["step"]) >= 1:
        yield f"its step is {float(state['step'])} although it has moments"
