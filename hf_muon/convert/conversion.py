"""Optimizer states of other Muons, as states of `hf_muon.Muon`.

Ours keeps the momentum as a moving average (`ema`), ``buffer = momentum * buffer + (1 - momentum) * gradient``. Others
keep a decayed sum (`sgd`), ``buffer = momentum * buffer + gradient``, which is the average times ``1 / (1 - momentum)``
where the momentum was the same at every step. `foreign.FORMATS` holds what else differs from one Muon to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_muon.convert import formats as foreign
from hf_muon.convert.formats import HALF, Slot
from hf_muon.convert.names import as_matrix, names_of
from hf_muon.diagnostics.log import first_few
from hf_muon.math.coefficients import resolve
from hf_muon.math.momentum import update_dtype
from hf_muon.optimizer import state_check
from hf_muon.optimizer.groups import FOREIGN_KEYS
from hf_muon.optimizer.muon import Muon

MOMENTUM_FORMS = ("ema", "sgd")
_IN_ANY_GROUP = {"param_names", "use_muon", *FOREIGN_KEYS}
"""Keys that do not tell which version wrote a param group."""


@dataclass(frozen=True)
class Conversion:
    """What became of a state.

    Attributes:
        state_dict: what `optimizer.load_state_dict` takes.
        momentum_form: how the source kept its momentum, `ema` or `sgd`.
        factors: what momentum buffers were multiplied by.
        step: the number of steps that the groups say they have taken: AdamW's, or 1 where the source counts none.
        carried: names of the parameters whose moments came over, by `use_muon`.
        from_zero: names of the parameters whose moments start from zero, each with the reason.
        other_options: options that the source was written with and `optimizer` does not have, in our words.
    """

    state_dict: dict[str, Any]
    momentum_form: str
    factors: tuple[float, ...]
    step: int
    carried: Mapping[bool, Sequence[str]]
    from_zero: Mapping[str, str]
    other_options: Mapping[str, Any]


def convert_state_dict(
    state_dict: Mapping[str, Any],
    model: nn.Module,
    optimizer: Muon,
    source: str,
    *,
    adamw: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    in_model_order: bool = False,
    momentum_form: str | None = None,
    momentum: float | None = None,
    accept_rerouted: bool = False,
    accept_missing: bool = False,
) -> Conversion:
    """The state of another Muon as a state of `optimizer`, which is left as it is.

    A momentum buffer becomes a moving average in fp32; AdamW's moments are taken over. Options (learning rates, decays,
    momentum) stay those of `optimizer`: the source's mean something else, the learning rate above all, which each Muon
    scales by its own function of the shape. `Conversion.other_options` says which differ, but for rates and decays.
    A scheduler keeps its state per group, and groups are not the source's: its state is not converted.

    Args:
        state_dict: the source's `state_dict()`, or one keyed by names, as torch.distributed.checkpoint makes it.
        model: the model that `optimizer` is over, by which the source's order of parameters is worked out. It may be on
            the meta device.
        optimizer: the target, made by `build_optimizer(model)`.
        source: a key of `foreign.FORMATS`.
        adamw: the state of the `torch.optim.AdamW` that ran beside a Muon that has no such half.
        names: names of the source's parameters in its order, those of `adamw` last; for sources that neither hold
            names nor have an order of their own.
        in_model_order: each of the source's groups lists its parameters in the order of `model.named_parameters()`.
            They are told apart by group and shape then.
        momentum_form: `ema` or `sgd`, where neither the format nor the groups tell it.
        momentum: the source's momentum, where its groups do not hold it.
        accept_rerouted: parameters that Muon stepped there and AdamW here, or the other way round, start from zero
            moments instead of being refused.
        accept_missing: so do parameters that the source has no moments of.

    Raises:
        ValueError: a source that is not what `source` says, parameters that cannot be told apart or do not fit, and
            moments that would be lost.
    """
    if adamw is not None and foreign.known(source).not_muon is not None:
        raise ValueError(f"adamw: a state of {source} has its AdamW half inside")
    slots = foreign.read(state_dict, source)
    if adamw is not None:
        slots += foreign.read(adamw, None, 1 + max((slot.place[0] for slot in slots), default=-1))
    if not any(slot.use_muon for slot in slots):
        foreign.refuse(source, ["it holds no parameter that Muon stepped"])
    by_name = dict(zip(names_of(slots, model, optimizer, source, names, in_model_order), slots, strict=True))
    form = _momentum_form(slots, source, momentum_form)
    factors = {id(slot.group): _factor(slot.group, form, momentum) for slot in slots if slot.use_muon}

    groups = optimizer.state_dict()["param_groups"]
    state: dict[Any, dict[str, Tensor]] = {}
    carried: dict[bool, list[str]] = {True: [], False: []}
    rerouted: dict[str, str] = {}
    missing: dict[str, str] = {}
    complaints: list[str] = []
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        use_muon = bool(group["use_muon"])
        for name, param, key in zip(group["param_names"], group["params"], saved["params"], strict=True):
            slot = by_name.pop(name, None)
            if slot is None or not slot.state:
                missing[name] = "no moments in the source"
            elif complaint := _shape_complaint(name, slot, param):
                complaints.append(complaint)
            elif slot.use_muon != use_muon:
                rerouted[name] = f"{HALF[slot.use_muon]} there, {HALF[use_muon]} here"
            else:
                carried[use_muon].append(name)
                state[key] = _carry(slot, param, factors.get(id(slot.group), 1.0))
                continue
            state[key] = _zero(param, use_muon)
    if untrained := [name for name, slot in by_name.items() if slot.state]:
        complaints.append(f"{first_few(untrained)}: trained there and not here. Train the same parameters")
    if rerouted and not accept_rerouted:
        listed = first_few([f"{name} ({why})" for name, why in rerouted.items()])
        complaints.append(
            f"{listed}: the moments of one half are of no use to the other. Route them as there (muon_patterns, "
            "adamw_patterns), or accept_rerouted: they start from zero then"
        )
    if missing and not accept_missing:
        complaints.append(
            f"{first_few(missing)}: no moments in the source. It may be the state of one rank of several, or its "
            "AdamW half may have a state of its own (adamw). If nothing is lost, accept_missing: they start from zero"
        )
    foreign.refuse(source, complaints)
    step = max([1, *(int(slot.state["step"]) for slot in slots if "step" in slot.state)])
    # Moving averages are in fp32 here; loading them keeps them as `optimizer` does.
    converted = {"state": state, "param_groups": [{**g, "step": step, "momentum_dtype": "auto"} for g in groups]}
    state_check.check_loadable(optimizer.param_groups, converted)
    used = tuple(dict.fromkeys(factors.values()))
    other = _differing(_options(slots, source), optimizer)
    return Conversion(converted, form, used, step, carried, {**rerouted, **missing}, other)


def _shape_complaint(name: str, slot: Slot, param: Tensor) -> str | None:
    shape = tuple(param.shape)
    fitting = (shape, as_matrix(shape)) if slot.use_muon else (shape,)
    wrong = {key: tuple(v.shape) for key, v in slot.state.items() if key != "step" and tuple(v.shape) not in fitting}
    return f"{name} {shape}: {slot.label} in the source has {wrong}" if wrong else None


def _carry(slot: Slot, param: Tensor, factor: float) -> dict[str, Tensor]:
    if slot.use_muon:
        buffer = slot.state["momentum_buffer"].reshape(param.shape).to(update_dtype(param))
        return {"momentum_buffer": buffer if factor == 1 else buffer * factor}
    averages = ("moment1", "moment2") if "moment1" in slot.state else ("exp_avg", "exp_avg_sq")
    step = torch.tensor(float(slot.state["step"]))
    return {"step": step, "exp_avg": slot.state[averages[0]], "exp_avg_sq": slot.state[averages[1]]}


def _zero(param: Tensor, use_muon: bool) -> dict[str, Tensor]:
    if use_muon:
        return {"momentum_buffer": torch.zeros(param.shape, dtype=update_dtype(param))}
    averages = {key: torch.zeros(param.shape, dtype=param.dtype) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(0.0), **averages}


def _differing(there: Mapping[str, Any], optimizer: Muon) -> dict[str, Any]:
    here = optimizer.param_groups[0]
    differing = {name: value for name, value in sorted(there.items()) if value != here[name]}
    newton_schulz = [resolve(side["ns_coefficients"], side["ns_steps"]) for side in (here, there)]
    if newton_schulz[0] == newton_schulz[1]:
        differing = {name: value for name, value in differing.items() if name not in ("ns_coefficients", "ns_steps")}
    return differing


def _momentum_form(slots: Sequence[Slot], source: str, said: str | None) -> str:
    """How the momentum is kept: as the format has it, as was said, or as the version shows that wrote the groups.

    Raises:
        ValueError: it cannot be told, or something else was said than the format has.
    """
    if said not in (None, *MOMENTUM_FORMS):
        raise ValueError(f"momentum_form={said!r} is not valid. Valid: {' or '.join(MOMENTUM_FORMS)}")
    form = foreign.known(source).form
    if form is not None and said not in (None, form):
        raise ValueError(f"momentum_form={said}: {source} keeps its momentum as {form}; leave it out")
    found = {form or said or _jordans_form(frozenset(slot.group)) for slot in slots if slot.use_muon}
    if len(found) == 1 and (only := found.pop()):
        return only
    raise ValueError(
        "How this state keeps its momentum cannot be told from it, and a wrong guess is off by 1/(1 - momentum). Look "
        "at the code that wrote it: where it adds gradients to a buffer, buffer.mul_(momentum).add_(grad), say "
        "momentum_form=sgd; where it moves one towards them, buffer.lerp_(grad, 1 - momentum), say momentum_form=ema"
    )


def _jordans_form(keys: frozenset[str]) -> str | None:
    """The form by the keys of a Muon group, as Keller Jordan's versions have them.

    Those that added up gradients, until January 2025, had AdamW's options in the same group and no decay. Of the
    averaging ones, those until April 2025 kept communication buffers there, and those since May 2025 next to nothing.
    """
    if "update_buffer" in keys:
        return "ema"
    if "adamw_lr_ratio" in keys and "weight_decay" not in keys:
        return "sgd"
    return "ema" if keys - _IN_ANY_GROUP == {"params", "lr", "momentum", "weight_decay"} else None


def _factor(group: Mapping[str, Any], form: str, said: float | None) -> float:
    """What turns a momentum buffer of this group into a moving average.

    Raises:
        ValueError: the momentum is neither in the group nor said, or both and not the same.
    """
    held = group.get("momentum")
    if held is not None and said is not None and float(held) != said:
        raise ValueError(f"momentum={said}: the source says {float(held)}; leave it out")
    momentum = said if held is None else float(held)
    if form == "ema":
        return 1.0
    if momentum is None:
        raise ValueError("The source's groups do not hold their momentum, which scales its buffers: say momentum")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} is not valid. Valid: a number from 0 to below 1")
    return 1 - momentum


def _options(slots: Iterable[Slot], source: str) -> dict[str, Any]:
    """The options of the rule that the state was written with, in the words of ours; rates and decays left out."""
    there = dict(foreign.known(source).rule)
    for slot in slots:
        group = slot.group
        if slot.use_muon:
            held = {name: group.get(name) for name in ("momentum", "nesterov", "ns_steps")}
            there.update({name: value for name, value in held.items() if value is not None})
            if "ns_coefficients" in group:
                there["ns_coefficients"] = tuple(group["ns_coefficients"])
                there["adjust_lr_fn"] = group.get("adjust_lr_fn") or "original"
        else:
            prefix = "" if "betas" in group else "adamw_"
            if f"{prefix}betas" in group and f"{prefix}eps" in group:
                there |= {"adamw_betas": tuple(group[f"{prefix}betas"]), "adamw_eps": group[f"{prefix}eps"]}
    return there
