"""Convert the optimizer states of other Muons to states of `hf_muon.Muon`.

Ours keeps the momentum as a moving average, ``buffer = momentum * buffer + (1 - momentum) * gradient``. LLaMA-Factory
keeps a decayed sum, ``buffer = momentum * buffer + gradient``, which is the average times ``1 / (1 - momentum)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_muon.diagnostics.log import first_few
from hf_muon.math.momentum import update_dtype
from hf_muon.optimizer import load
from hf_muon.optimizer.checkpoint_format import KEY, packed, unpacked
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.state import ALGORITHM
from hf_muon.routing.parameters import unwrapped


@dataclass(frozen=True)
class Format:
    """How another Muon saves its state.

    Attributes:
        key: a key of its param groups that no other format has.
        is_sum: whether its momentum is a decayed sum.
        not_muon: words in the names of matrices that its Muon does not step. The state lists the matrices of Muon
            first, then all other parameters, each in the model's order. None if its users make the groups.
        by_size: as DeepSpeed: Muon steps all tensors of two dims and more, sorted by size, the largest first; AdamW
            counts the steps of a group on one of its parameters.
    """

    key: str
    is_sum: bool = False
    not_muon: tuple[str, ...] | None = None
    by_size: bool = False


FORMATS = {
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/_muon.py
    "torch": Format("ns_coefficients"),
    # https://github.com/hiyouga/LLaMA-Factory/blob/v0.9.5/src/llamafactory/train/trainer_utils.py
    "llamafactory-v0": Format("wd", is_sum=True, not_muon=("embed", "lm_head")),
    # https://github.com/hiyouga/LLaMA-Factory/tree/main/src/llamafactory/v1/plugins/trainer_plugins/optimizers
    "llamafactory-v1": Format("wd", is_sum=True, not_muon=("embed", "lm_head", "wte", "wpe", "lora")),
    # https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/muon/original_muon.py
    "deepspeed": Format("use_muon", not_muon=("embed", "lm_head"), by_size=True),
}
# Names of the groups that DeepSpeed's engine makes. Users may make others, whose order is not known.
_OF_DEEPSPEED = ("muon-params", "adam-params")
# Keys of the state of one parameter, and whether Muon keeps it.
_BY_KEYS = {
    frozenset({"momentum_buffer"}): True,
    frozenset({"step", "exp_avg", "exp_avg_sq"}): False,
    frozenset({"step", "moment1", "moment2"}): False,
}


@dataclass(frozen=True)
class _Source:
    """One parameter of a source's state: its name there, its param group, and its moments."""

    label: str
    name: str | None
    group: Mapping[str, Any]
    state: dict[str, Any]

    @property
    def use_muon(self) -> bool:
        return "momentum_buffer" in self.state


def convert_state_dict(
    state_dict: Mapping[str, Any],
    model: nn.Module,
    optimizer: Muon,
    source: str,
    *,
    adamw: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Convert the state of another Muon to a state for `optimizer.load_state_dict`; `optimizer` does not change.

    A momentum buffer becomes a moving average in fp32; AdamW's moments are copied. Options (learning rates, decays,
    momentum) remain those of `optimizer`, because those of the source may mean something else: each Muon scales the
    learning rate by its own function of the shape. Scheduler state is not converted, because it is per param group, and
    the param groups differ.

    Args:
        state_dict: the source's `state_dict()`, or one keyed by names, as torch.distributed.checkpoint makes it.
        model: the model that `optimizer` is over. Its parameters give the source's order. It may be on the meta device.
        optimizer: the target, made by `build_optimizer(model)`.
        source: a key of `FORMATS`.
        adamw: the state of the `torch.optim.AdamW` that stepped the rest, for a Muon that steps only matrices.
        names: names of the source's parameters in its order, those of `adamw` after them; for sources that store
            neither names nor a known order. Within a group, parameters of one shape keep the model's order.

    Raises:
        ValueError: a state that is not of `source`, parameters that do not fit, or moments that would be lost.
    """
    if source not in FORMATS:
        raise ValueError(f"{source!r} is not a format. Valid: {', '.join(FORMATS)} [unknown-format]")
    if not all(group.get("param_names") for group in optimizer.param_groups):
        raise ValueError("The optimizer's param groups hold no names. Make it with build_optimizer(model) [no-names]")
    params = _read(state_dict, source, FORMATS[source].key)
    if adamw is not None:
        params += _read(adamw, "torch.optim.AdamW", "amsgrad")
    sources = _names(params, model, source, names)
    _refuse(source, _misfits(sources, optimizer))

    groups = list(map(unpacked, optimizer.state_dict()["param_groups"]))
    state: dict[Any, dict[str, Tensor]] = {}
    # A Muon may store no count of steps: that there are moments says that there was one.
    step = max([1, *(int(param.state["step"]) for param in params if "step" in param.state)])
    for param in params if FORMATS[source].by_size else ():
        param.state.update({"step": step} if "step" in param.state else {})
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        for name, param, key in zip(group["param_names"], group["params"], stored["params"], strict=True):
            state[key] = _converted(sources[name], param, is_sum=FORMATS[source].is_sum)
    # The averages are in fp32; load_state_dict converts them to the optimizer's dtypes.
    stored = {"step": step, "momentum_dtype": "auto", "adamw_state_dtype": "auto"}
    converted = {"state": state, "param_groups": [packed({**group, **stored}) for group in groups]}
    if complaints := load.compare(optimizer.param_groups, converted).complaints:
        _refuse(source, [*complaints[:8], "so check the model, the options, and the order of --names"])
    return converted


def _refuse(source: str, complaints: Iterable[str]) -> None:
    if lines := list(complaints):
        raise ValueError(f"This state cannot be converted from {source}:\n  - " + first_few(lines, 10, "\n  - "))


def _read(state_dict: Any, source: str, own_key: str) -> list[_Source]:
    """Return the parameters of a state, in its order.

    Raises:
        ValueError: it is not a state of that optimizer, or parts of it are missing.
    """
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state_dict.get("state"), Mapping):
        raise ValueError(
            f"This state cannot be converted from {source}: it is no optimizer's state_dict, which holds 'state' and "
            "'param_groups'. DeepSpeed's stage 0 saves it in global_step.../mp_rank_00_model_states.pt; the files of "
            "ZeRO 1 to 3 hold slices of it, which are not read [not-a-state]"
        )
    keys = sorted(set().union(*groups) - {"params"})
    if not all(own_key in group for group in groups) or KEY in keys:
        hint = " (it is hf_muon's own already)" if KEY in keys else ""
        _refuse(source, [f"its param groups hold {keys}, which are not those of that optimizer{hint} [foreign-state]"])
    params: list[_Source] = []
    complaints: list[str] = []
    for number, group in enumerate(groups):
        names = group.get("param_names") or [key if isinstance(key, str) else None for key in group["params"]]
        for i, (key, name) in enumerate(zip(group["params"], names, strict=True)):
            state = dict(state_dict["state"].get(key) or {})
            flag = state.pop("use_muon", group.get("use_muon"))
            param = _Source(name or f"parameter {i} of group {number}", name, group, state)
            if state and _BY_KEYS.get(frozenset(state)) in (None, not flag if flag is not None else None):
                complaints.append(
                    f"{param.label}: its state holds {sorted(state)}, which is not what Muon or AdamW has "
                    "there [foreign-moments]"
                )
            elif param.use_muon and not 0 <= float(group.get("momentum", -1)) < 1:
                complaints.append(f"{param.label}: its param group has no momentum from 0 to below 1 [no-momentum]")
            params.append(param)
    _refuse(source, complaints)
    return params


def _names(params: Sequence[_Source], model: nn.Module, source: str, names: Sequence[str] | None) -> dict[str, _Source]:
    """Return the model's names of the parameters of a state: `names`, those in the state, or by the source's order.

    Raises:
        ValueError: a name is not the model's, or there are more or fewer than the state has parameters.
    """
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    given_names, words, by_size = names, FORMATS[source].not_muon, FORMATS[source].by_size

    def place(name: str) -> tuple[int, ...]:
        shape = trained[name].shape
        is_matrix = len(shape) > 1 if by_size else len(shape) == 2
        # Of the two, only DeepSpeed looks at names in lower case.
        text = name.lower() if by_size else name
        if not is_matrix or any(word in text for word in words or ()):
            return (1,)
        return (0, *(-size for size in shape), 1) if by_size else (0,)

    if names is None and all(param.name for param in params):
        names = [name if name in trained else unwrapped(name, "module") for name in (str(p.name) for p in params)]
    elif names is None and words and by_size == all(param.group.get("name") in _OF_DEEPSPEED for param in params):
        names = sorted(trained, key=place)
    elif names is None:
        raise ValueError(
            f"This state of {source} holds no names, and the user of that optimizer makes its groups. Give the names "
            "of its parameters, in its order (names, --names) [names-needed]"
        )
    unknown = [name for name in names if name not in trained]
    if unknown or len(set(names)) != len(names) or len(names) != len(params):
        reason = f"{first_few(unknown)} are not trained in this model" if unknown else "each parameter has one name"
        raise ValueError(
            f"{len(names)} names for a state of {len(params)} parameters do not fit it: {reason} [names-misfit]"
        )
    order, previous_names = {name: i for i, name in enumerate(trained)}, dict[Any, str]()
    for name, param in zip(given_names or (), params, strict=False):
        previous = previous_names.get(kind := (id(param.group), trained[name].shape), name)
        if order[name] < order[previous]:
            raise ValueError(
                f"--names has {previous} before {name}, the model after it, and no shape shows whose moments are "
                "whose. Write names of one shape in the model's order; if the optimizer had another one, store the "
                "names in its state, as param_names of its param groups [names-order]"
            )
        previous_names[kind] = name
    return dict(zip(names, params, strict=True))


def _misfits(sources: Mapping[str, _Source], optimizer: Muon) -> Iterable[str]:
    """Yield why a state cannot be converted to one of `optimizer`."""
    sides = {name: bool(group["use_muon"]) for group in optimizer.param_groups for name in group["param_names"]}
    if missing := [name for name in sides if name not in sources or not sources[name].state]:
        yield (
            f"no moments in the source for {first_few(missing)}. It may be the state of one rank of several, or the "
            "AdamW that ran beside it may have a state of its own (adamw, --adamw) [moments-missing]"
        )
    for name, use_muon in sides.items():
        if name not in missing and (used_muon := sources[name].use_muon) != use_muon:
            yield (
                f"{name}: {ALGORITHM[used_muon]} there, {ALGORITHM[use_muon]} here, which has no use "
                "for its moments. Route it as there (muon_patterns, adamw_patterns) [routing-changed]"
            )


def _converted(source: _Source, param: Tensor, *, is_sum: bool) -> dict[str, Tensor]:
    state = source.state
    if source.use_muon:
        buffer = state["momentum_buffer"].to(update_dtype(param))
        return {"momentum_buffer": buffer * (1 - float(source.group["momentum"])) if is_sum else buffer}
    first_moment, second_moment = ("moment1", "moment2") if "moment1" in state else ("exp_avg", "exp_avg_sq")
    return {
        "step": torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu"),
        "exp_avg": state[first_moment],
        "exp_avg_sq": state[second_moment],
    }
