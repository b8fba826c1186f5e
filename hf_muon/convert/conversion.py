"""Conversion of the optimizer states of other Muons to states of `hf_muon.Muon`.

Ours keeps the momentum as a moving average (`ema`), ``buffer = momentum * buffer + (1 - momentum) * gradient``. Others
keep a decayed sum (`sgd`), ``buffer = momentum * buffer + gradient``, which is the average times ``1 / (1 - momentum)``
if the momentum was the same at every step. `formats.FORMATS` has the other differences between Muons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_muon.convert.formats import ALGORITHM, SourceParameter, format_of, read_state, refuse
from hf_muon.convert.names import as_matrix, names_of
from hf_muon.diagnostics.log import first_few
from hf_muon.math.coefficients import resolve
from hf_muon.math.moments import moment_dtype
from hf_muon.math.momentum import update_dtype
from hf_muon.optimizer import state_check
from hf_muon.optimizer.groups import FOREIGN_KEYS
from hf_muon.optimizer.muon import Muon

MOMENTUM_FORMS = ("ema", "sgd")
_IN_ANY_GROUP = {"param_names", "use_muon", *FOREIGN_KEYS}
"""Keys that do not tell which version wrote a param group."""


@dataclass(frozen=True)
class Conversion:
    """A converted state.

    Attributes:
        state_dict: for `optimizer.load_state_dict`.
        momentum_form: how the source kept its momentum, `ema` or `sgd`.
        factors: the factors by which momentum buffers were multiplied.
        step: the step count of the groups: AdamW's, or 1 if the source counts none.
        carried: names of the parameters whose moments were converted, by `use_muon`.
        from_zero: names of the parameters whose moments start from zero, each with the reason.
        other_options: the source's options where they differ from those of `optimizer`, in our words.
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
    """Convert the state of another Muon to a state of `optimizer`, which does not change.

    A momentum buffer becomes a moving average in fp32; AdamW's moments are copied. Options (learning rates, decays,
    momentum) stay those of `optimizer`. The source's may mean something else, above all the learning rate, which each
    Muon scales by its own function of the shape. `Conversion.other_options` has the differences, without rates and
    decays. Scheduler state is not converted: it is per param group, and the param groups differ.

    Args:
        state_dict: the source's `state_dict()`, or one keyed by names, as torch.distributed.checkpoint makes it.
        model: the model that `optimizer` is over. Its parameters give the source's order. It may be on the meta device.
        optimizer: the target, made by `build_optimizer(model)`.
        source: a key of `formats.FORMATS`.
        adamw: the state of the `torch.optim.AdamW` that ran beside a Muon that steps matrices only.
        names: names of the source's parameters in its order, those of `adamw` last; for sources that store no names
            and have no order of their own.
        in_model_order: each of the source's groups lists its parameters in the order of `model.named_parameters()`.
            Group and shape tell them apart.
        momentum_form: `ema` or `sgd`, where neither the format nor the groups determine it.
        momentum: the source's momentum, where its groups do not store it.
        accept_rerouted: whether parameters that Muon stepped in the source and AdamW steps here, or the reverse, may
            start from zero moments. Refused otherwise.
        accept_missing: whether parameters without moments in the source may start from zero moments.

    Raises:
        ValueError: a state that is not of `source`, parameters that are ambiguous or do not fit, or moments that would
            be lost.
    """
    if adamw is not None and format_of(source).not_muon is not None:
        raise ValueError(f"adamw: a state of {source} has its AdamW half inside")
    source_params = read_state(state_dict, source)
    if adamw is not None:
        source_params += read_state(adamw, None, 1 + max((param.group_number for param in source_params), default=-1))
    if not any(param.use_muon for param in source_params):
        refuse(source, ["it holds no parameter that Muon stepped"])
    source_names = names_of(source_params, model, optimizer, source, names, in_model_order)
    by_name = dict(zip(source_names, source_params, strict=True))
    form = _momentum_form(source_params, source, momentum_form)
    factors = {id(param.group): _factor(param.group, form, momentum) for param in source_params if param.use_muon}

    groups = optimizer.state_dict()["param_groups"]
    state: dict[Any, dict[str, Tensor]] = {}
    carried: dict[bool, list[str]] = {True: [], False: []}
    rerouted: dict[str, str] = {}
    missing: dict[str, str] = {}
    complaints: list[str] = []
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        use_muon = bool(group["use_muon"])
        for name, param, key in zip(group["param_names"], group["params"], saved["params"], strict=True):
            source_param = by_name.pop(name, None)
            if source_param is None or not source_param.state:
                missing[name] = "no moments in the source"
            elif complaint := _shape_complaint(name, source_param, param):
                complaints.append(complaint)
            elif source_param.use_muon != use_muon:
                rerouted[name] = f"{ALGORITHM[source_param.use_muon]} there, {ALGORITHM[use_muon]} here"
            else:
                carried[use_muon].append(name)
                state[key] = _converted(source_param, param, factors.get(id(source_param.group), 1.0))
                continue
            state[key] = _zeros(param, use_muon)
    if untrained := [name for name, param in by_name.items() if param.state]:
        complaints.append(f"{first_few(untrained)}: trained there and not here. Train the same parameters")
    if rerouted and not accept_rerouted:
        listing = first_few(f"{name} ({reason})" for name, reason in rerouted.items())
        complaints.append(
            f"{listing}: the moments of one half are of no use to the other. Route them as there (muon_patterns, "
            "adamw_patterns), or accept_rerouted: they start from zero then"
        )
    if missing and not accept_missing:
        complaints.append(
            f"{first_few(missing)}: no moments in the source. It may be the state of one rank of several, or its "
            "AdamW half may have a state of its own (adamw). If nothing is lost, accept_missing: they start from zero"
        )
    refuse(source, complaints)
    step = max([1, *(int(param.state["step"]) for param in source_params if "step" in param.state)])
    # The averages are in fp32; load_state_dict converts them to the optimizer's dtypes.
    stored = {"step": step, "momentum_dtype": "auto", "adamw_state_dtype": "auto"}
    converted = {"state": state, "param_groups": [{**group, **stored} for group in groups]}
    state_check.check_loadable(optimizer.param_groups, converted)
    distinct_factors = tuple(dict.fromkeys(factors.values()))
    other_options = _differing(_options(source_params, source), optimizer)
    return Conversion(converted, form, distinct_factors, step, carried, {**rerouted, **missing}, other_options)


def _shape_complaint(name: str, source_param: SourceParameter, param: Tensor) -> str | None:
    shape = tuple(param.shape)
    fitting = (shape, as_matrix(shape)) if source_param.use_muon else (shape,)
    shapes = {key: tuple(value.shape) for key, value in source_param.state.items() if key != "step"}
    wrong = {key: other for key, other in shapes.items() if other not in fitting}
    return f"{name} {shape}: {source_param.label} in the source has {wrong}" if wrong else None


def _converted(source_param: SourceParameter, param: Tensor, factor: float) -> dict[str, Tensor]:
    state = source_param.state
    if source_param.use_muon:
        buffer = state["momentum_buffer"].reshape(param.shape).to(update_dtype(param))
        return {"momentum_buffer": buffer if factor == 1 else buffer * factor}
    first, second = ("moment1", "moment2") if "moment1" in state else ("exp_avg", "exp_avg_sq")
    return {"step": torch.tensor(float(state["step"])), "exp_avg": state[first], "exp_avg_sq": state[second]}


def _zeros(param: Tensor, use_muon: bool) -> dict[str, Tensor]:
    if use_muon:
        return {"momentum_buffer": torch.zeros(param.shape, dtype=update_dtype(param))}
    averages = {key: torch.zeros(param.shape, dtype=moment_dtype(param, key)) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(0.0), **averages}


def _differing(there: Mapping[str, Any], optimizer: Muon) -> dict[str, Any]:
    """Return the source's options that differ from the optimizer's; coefficients count by their values."""
    here = optimizer.param_groups[0]
    differing = {name: value for name, value in sorted(there.items()) if value != here[name]}
    newton_schulz = [resolve(side["ns_coefficients"], side["ns_steps"]) for side in (here, there)]
    if newton_schulz[0] == newton_schulz[1]:
        differing = {name: value for name, value in differing.items() if name not in ("ns_coefficients", "ns_steps")}
    return differing


def _momentum_form(source_params: Sequence[SourceParameter], source: str, argument: str | None) -> str:
    """Return the momentum form of the format, else of the argument, else of the version that wrote the groups.

    Raises:
        ValueError: none of these determines it, or the argument contradicts the format.
    """
    if argument not in (None, *MOMENTUM_FORMS):
        raise ValueError(f"momentum_form={argument!r} is not valid. Valid: {' or '.join(MOMENTUM_FORMS)}")
    form = format_of(source).momentum_form
    if form is not None and argument not in (None, form):
        raise ValueError(f"momentum_form={argument}: {source} keeps its momentum as {form}; leave it out")
    groups = [param.group for param in source_params if param.use_muon]
    forms = {form or argument or _jordans_form(frozenset(group)) for group in groups}
    if len(forms) == 1 and (only := forms.pop()):
        return only
    raise ValueError(
        "How this state keeps its momentum cannot be told from it, and a wrong guess is off by 1/(1 - momentum). Look "
        "at the code that wrote it: where it adds gradients to a buffer, buffer.mul_(momentum).add_(grad), say "
        "momentum_form=sgd; where it moves one towards them, buffer.lerp_(grad, 1 - momentum), say momentum_form=ema"
    )


def _jordans_form(keys: frozenset[str]) -> str | None:
    """Return the momentum form of the version of Keller Jordan's code that writes Muon groups with these keys.

    Until January 2025 it added gradients up, with AdamW's options in the same group and no weight decay. Since then it
    averages: until April 2025 with communication buffers in the group, since May 2025 with few keys.
    """
    if "update_buffer" in keys:
        return "ema"
    if "adamw_lr_ratio" in keys and "weight_decay" not in keys:
        return "sgd"
    return "ema" if keys - _IN_ANY_GROUP == {"params", "lr", "momentum", "weight_decay"} else None


def _factor(group: Mapping[str, Any], form: str, argument: float | None) -> float:
    """Return the factor that turns a momentum buffer of this group into a moving average.

    Raises:
        ValueError: neither the group nor the argument has the momentum, or they differ.
    """
    own = group.get("momentum")
    if own is not None and argument is not None and float(own) != argument:
        raise ValueError(f"momentum={argument}: the source says {float(own)}; leave it out")
    momentum = argument if own is None else float(own)
    if form == "ema":
        return 1.0
    if momentum is None:
        raise ValueError("The source's groups do not hold their momentum, which scales its buffers: say momentum")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} is not valid. Valid: a number from 0 to below 1")
    return 1 - momentum


def _options(source_params: Iterable[SourceParameter], source: str) -> dict[str, Any]:
    """Return the options that the state was written with, as options of ours; without learning rates and decays."""
    options = dict(format_of(source).options)
    for param in source_params:
        group = param.group
        if param.use_muon:
            options |= {
                name: group[name] for name in ("momentum", "nesterov", "ns_steps") if group.get(name) is not None
            }
            if "ns_coefficients" in group:
                options["ns_coefficients"] = tuple(group["ns_coefficients"])
                options["adjust_lr_fn"] = group.get("adjust_lr_fn") or "original"
        else:
            prefix = "" if "betas" in group else "adamw_"
            if f"{prefix}betas" in group and f"{prefix}eps" in group:
                options |= {"adamw_betas": tuple(group[f"{prefix}betas"]), "adamw_eps": group[f"{prefix}eps"]}
    return options
