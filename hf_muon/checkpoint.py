"""Loading optimizer state that fits, or refusing it before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon import diagnostics
from hf_muon.config import GROUP_OPTIONS, check_option
from hf_muon.distributed import is_dtensor, local_of, shape_of
from hf_muon.momentum import Quantized, is_quantized, momentum_dtype, scale_shape
from hf_muon.views import views_of

STATE_KEYS = {True: ("momentum_buffer",), False: ("step", "exp_avg", "exp_avg_sq")}
"""State of a parameter by `use_muon`; momentum that is kept as int8 has a `momentum_scale` besides."""


def state_keys(group: Mapping[str, Any], param: Tensor, choice: str | None = None) -> tuple[str, ...]:
    """State of a parameter of a group; `choice` is another `momentum_dtype` than the group's."""
    keys = STATE_KEYS[bool(group["use_muon"])]
    quantized = group["use_muon"] and is_quantized(choice or _kept(group), param.shape)
    return (*keys, "momentum_scale") if quantized else keys


def _kept(group: Mapping[str, Any]) -> str:
    """How a group keeps its momentum; states of older versions do not say, and have it in fp32."""
    return str(group.get("momentum_dtype", "auto"))


def describe(group: Mapping[str, Any], index: int) -> str:
    """A parameter by name where the group has names, else by position and shape."""
    names = group.get("param_names")
    param = group["params"][index]
    if names and len(names) != len(group["params"]):
        return f"partition {index}, of {param.numel()} elements, of {_few(names)}"
    return f"{names[index]} {shape_of(param)}" if names else f"parameter {index} {shape_of(param)}"


def state_complaints(group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong with the live state of a group: moments lost on the way, or of a parameter that has changed."""
    lost = []
    for i, param in enumerate(group["params"]):
        found = state.get(param, {})
        # Momentum in another dtype than the group's is converted before the step, and needs what its own dtype does.
        keys = state_keys(group, param, _dtype_of(found) if found else None)
        missing = [key for key in keys if key not in found]
        if missing:
            lost.append(f"{describe(group, i)} lacks {', '.join(missing)}")
        for key in found.keys() - {"step", *missing}:
            if (complaint := _unlike(found[key], param, _state_shape(param, key))) is not None:
                yield (
                    f"{describe(group, i)}: its {key} {complaint}. The parameter was resized, redistributed or "
                    "replaced after the optimizer had taken steps; build a new optimizer, or load a checkpoint"
                )
    if lost and group.get("step"):
        yield (
            f"the optimizer has taken {group['step']} steps and its moments are gone: {_few(lost)}. They were dropped "
            "on the way (an empty load template, or parameters that were replaced); load a checkpoint that has them"
        )


def _dtype_of(state: Mapping[str, Any]) -> str:
    buffer = state.get("momentum_buffer")
    return "int8" if torch.is_tensor(buffer) and buffer.dtype is torch.int8 else "auto"


def _state_shape(param: Tensor, key: str) -> tuple[int, ...]:
    return scale_shape(param.shape) if key == "momentum_scale" else tuple(param.shape)


def _unlike(moment: Tensor, param: Tensor, shape: tuple[int, ...]) -> str | None:
    """How a moment differs from what its parameter's would be."""
    if tuple(moment.shape) != shape:
        return f"has shape {tuple(moment.shape)}"
    stored = [(t.placements, t.device_mesh) if is_dtensor(t) else None for t in (moment, param)]  # type: ignore[attr-defined]
    if stored[0] == stored[1]:
        return None
    words = [f"stored as {place[0]}" if place else "a plain tensor" for place in stored]
    return f"is {words[0]}, the parameter {words[1]}"


def _few(items: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(items[:limit])
    return f"{shown} and {len(items) - limit} more" if len(items) > limit else shown


def state_dtype(param: Tensor, key: str, choice: str = "auto") -> torch.dtype:
    """The dtype in which a state is kept; `choice` is the group's `momentum_dtype`."""
    if key in ("step", "momentum_scale"):
        return torch.float32
    return momentum_dtype(param, choice) if key == "momentum_buffer" else param.dtype


def zero_state(param: Tensor, key: str, choice: str = "auto") -> Tensor:
    """A state before the first step, stored like the parameter; `choice` is the group's `momentum_dtype`."""
    if key == "step":
        return torch.zeros((), dtype=torch.float32)
    dtype = state_dtype(param, key, choice)
    if key == "momentum_scale" or dtype is torch.int8:
        local = local_of(param)
        zeros = torch.zeros(_state_shape(local, key), dtype=dtype, device=local.device)
        return _wrapped(param, zeros, _state_shape(param, key))
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def _wrapped(param: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """What this rank has of a tensor of some shape, stored like the parameter."""
    if not is_dtensor(param):
        return local
    from hf_muon.distributed.dtensor import stored_like

    return stored_like(param, local, shape)  # type: ignore[arg-type]


def blocks_complaint(group: Mapping[str, Any], param: Tensor) -> str | None:
    """Why a parameter's momentum cannot be kept as its group says."""
    if not (group["use_muon"] and is_quantized(_kept(group), param.shape) and is_dtensor(param)):
        return None
    from hf_muon.distributed.dtensor import blocks_complaint

    return blocks_complaint(param)  # type: ignore[arg-type]


def kept_momentum(param: Tensor, state: Mapping[str, Tensor], choice: str) -> dict[str, Tensor]:
    """Momentum in the dtype of a choice, in memory of its own.

    Args:
        param: stored as the result will be.
        state: `momentum_buffer`, with `momentum_scale` where that holds codes; whole, or stored like the parameter.
        choice: one of `MOMENTUM_DTYPES`.
    """
    state = {key: value for key, value in state.items() if key in ("momentum_buffer", "momentum_scale")}
    to_int8 = is_quantized(choice, param.shape)
    if to_int8 or ("momentum_scale" in state and any(map(is_dtensor, state.values()))):
        state = {key: _stored_like(param, value) for key, value in state.items()}
    if "momentum_scale" in state and to_int8:
        dtypes = {"momentum_buffer": torch.int8, "momentum_scale": torch.float32}
        return {key: _copied(param, value, dtypes[key]) for key, value in state.items()}
    buffer = state["momentum_buffer"]
    if "momentum_scale" in state:
        kept = Quantized(local_of(buffer).to(torch.int8), local_of(state["momentum_scale"]))
        values = kept.values() if kept.codes.numel() else kept.codes.float()
        buffer = _wrapped(param, values, param.shape) if is_dtensor(buffer) else values
    if not to_int8:
        return {
            "momentum_buffer": _copied(
                param, _stored_like(param, buffer), state_dtype(param, "momentum_buffer", choice)
            )
        }
    made = {key: zero_state(param, key, choice) for key in ("momentum_buffer", "momentum_scale")}
    if local_of(param).numel():
        kept = Quantized(*(local_of(value) for value in made.values()))
        kept.store_(local_of(buffer).to(kept.codes.device, torch.float32))
    return made


def _copied(param: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    copy = value.to(device=param.device, dtype=dtype, copy=True)
    return copy.contiguous() if dtype is torch.int8 else copy


def check_loadable(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raise unless `state_dict` is the state of a `Muon` over the same parameters.

    Raises:
        ValueError: every complaint at once. Nothing was changed.
    """
    refuse_load(list(load_complaints(groups, state_dict)))


def refuse_load(complaints: Sequence[str]) -> None:
    """Raise if there are complaints.

    Raises:
        ValueError: every complaint at once. Nothing was changed.
    """
    if complaints:
        raise ValueError(
            "This optimizer state cannot be loaded, and nothing was changed:\n  - "
            + "\n  - ".join(complaints)
            + "\nResume with the model and the options that wrote it, or start from its weights without the optimizer."
        )


def load_complaints(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> Iterator[str]:
    """Why `state_dict` is not the state of a `Muon` over the same parameters."""
    saved_groups = state_dict.get("param_groups")
    if not isinstance(saved_groups, list) or not isinstance(state_dict.get("state"), Mapping):
        yield f"it is not an optimizer's state_dict: its keys are {sorted(map(str, state_dict))}"
        return
    if any("use_muon" not in group for group in saved_groups):
        known = sorted(key for key in saved_groups[0] if key != "params")
        yield f"it was written by another optimizer: its param groups hold {known}, and `use_muon` is not among them"
        return
    counts = [len(group["params"]) for group in groups]
    saved_counts = [len(group["params"]) for group in saved_groups]
    routes = [bool(group["use_muon"]) for group in groups]
    saved_routes = [bool(group["use_muon"]) for group in saved_groups]
    moved = _moved(groups, saved_groups)
    if moved:
        yield from moved
        return
    if (counts, routes) != (saved_counts, saved_routes):
        yield (
            f"it has {_shape_of(saved_counts, saved_routes)}, this optimizer has {_shape_of(counts, routes)}: "
            "the model, what of it is trained, or the routing differs"
        )
        return
    for group, saved in zip(groups, saved_groups, strict=True):
        for name in GROUP_OPTIONS.keys() & saved.keys():
            try:
                check_option(name, saved[name])
            except ValueError as error:
                yield f"one of its param groups has {error}"
        for i, param in enumerate(group["params"]):
            if complaint := blocks_complaint(group, param):
                yield f"{describe(group, i)} {complaint}"
        names, saved_names = group.get("param_names"), saved.get("param_names")
        if names and saved_names and names != saved_names:
            yield "the same parameters stand in another order, and state is matched by position"
        yield from _state_complaints(group, saved, state_dict["state"])


def _shape_of(counts: Sequence[int], routes: Sequence[bool]) -> str:
    parts = [f"{count} {'Muon' if muon else 'AdamW'}" for count, muon in zip(counts, routes, strict=True)]
    return f"{sum(counts)} parameters in groups of {' + '.join(parts)}"


def _moved(groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Differences by name, where both sides have names."""
    if not all(group.get("param_names") for group in (*groups, *saved_groups)):
        return []
    here = {name: group["use_muon"] for group in groups for name in group["param_names"]}
    there = {name: group["use_muon"] for group in saved_groups for name in group["param_names"]}
    complaints = []
    missing = [name for name in here if name not in there]
    extra = [name for name in there if name not in here]
    changed = [name for name in here if name in there and here[name] != there[name]]
    if missing:
        complaints.append(f"it does not have {_few(missing)} ({len(there)} parameters, this optimizer {len(here)})")
    if extra:
        complaints.append(f"it has {_few(extra)}, which this optimizer does not train")
    if changed:
        routes = [f"{name} ({'Muon' if there[name] else 'AdamW'} there)" for name in changed]
        complaints.append(
            f"the routing changed for {_few(routes)}; accept_rerouted=True loads it with their moments at zero"
        )
    return complaints


def _state_complaints(group: Mapping[str, Any], saved: Mapping[str, Any], state: Mapping[Any, Any]) -> Iterator[str]:
    absent = []
    for i, key in enumerate(saved["params"]):
        found = state.get(key) or {}
        param = group["params"][i]
        keys = state_keys(saved, param)
        missing = [name for name in keys if name not in found]
        if missing:
            absent.append((describe(group, i), missing))
            continue
        for name in keys:
            codes = name == "momentum_buffer" and "momentum_scale" in keys
            complaint = _unfit(found[name], None if name == "step" else param, _state_shape(param, name), codes)
            if complaint:
                yield f"{describe(group, i)}: its {name} {complaint}"
    # A state saved before the first step is empty; half a state, or none after steps, means that moments were lost.
    if absent and (saved.get("step") or any(state.get(key) for key in saved["params"])):
        yield f"moments are missing: {_few([f'{name} lacks {m}' for name, m in absent])}"


def _unfit(value: Any, param: Tensor | None, shape: tuple[int, ...], codes: bool) -> str | None:
    """Why a saved value cannot be the state of a parameter (of none: a count of steps)."""
    value = torch.as_tensor(value)
    if param is not None and tuple(value.shape) != shape:
        return f"has shape {tuple(value.shape)}"
    if value.dtype is not torch.int8 if codes else not value.is_floating_point():
        return f"has dtype {value.dtype}"
    mesh = getattr(value, "device_mesh", None)
    if param is not None and mesh is not None and mesh != getattr(param, "device_mesh", None):
        return (
            f"is sharded over mesh {mesh.mesh.tolist()}, and the parameter is not. Load it through "
            "torch.distributed.checkpoint.state_dict, which moves state between layouts"
        )
    if not bool(local_of(value).isfinite().all()):
        return "is not finite"
    return None


def changed_options(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> str:
    """Options other than the learning rate, which schedulers own, in which a run differs from its checkpoint."""
    changes = {
        f"{name} {saved[name]!r}, not {group[name]!r}"
        for group, saved in zip(groups, state_dict["param_groups"], strict=True)
        for name in GROUP_OPTIONS
        if name not in ("lr", "momentum_dtype") and name in saved and check_option(name, saved[name]) != group[name]
    }
    return "; ".join(sorted(changes))


def changed_momentum(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> str:
    """How momentum was kept where the checkpoint was written, and how it is here, if that differs."""
    changes = {
        f"{there} in the checkpoint, {here} here"
        for group, saved in zip(groups, state_dict["param_groups"], strict=True)
        if group["use_muon"]
        and (there := _kept(saved).replace("auto", "fp32")) != (here := _kept(group).replace("auto", "fp32"))
    }
    return "; ".join(sorted(changes))


def changed_views(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> str:
    """Parameters that are seen as other matrices than when the checkpoint was written."""
    changes = [
        f"{describe(group, i)} {mine or 'as it is stored'!r}, there {other or 'as it is stored'!r}"
        for group, saved in zip(groups, state_dict["param_groups"], strict=True)
        for i, (mine, other) in enumerate(zip(views_of(group), views_of(saved), strict=True))
        if group["use_muon"] and mine != other
    ]
    return _few(changes)


def restore_storage_(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, dict[str, Any]], state_dict: Mapping[str, Any]
) -> None:
    """Store loaded moments as the step needs them, in memory of their own.

    `Optimizer.load_state_dict` casts them to the parameters' dtype; momentum is kept as `momentum_dtype` says, whatever
    was saved. Whole tensors of sharded parameters are cut.
    """
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for param, key in zip(group["params"], saved["params"], strict=True):
            loaded, original = state.get(param), state_dict["state"].get(key)
            if not loaded or not original:
                continue
            if group["use_muon"]:
                loaded.clear()  # the cast copies, before the next ones are made
                kept = {name: original[name] for name in state_keys(saved, param)}
                loaded.update(kept_momentum(param, kept, _kept(group)))
                continue
            for name in STATE_KEYS[False]:
                value = original[name]
                if name == "step":
                    if loaded[name] is value and isinstance(value, Tensor):
                        loaded[name] = value.clone()
                    continue
                loaded[name] = None  # the cast copy, before the next one is made
                value = _stored_like(param, value)
                loaded[name] = value.to(device=param.device, dtype=state_dtype(param, name), copy=True)


def _stored_like(param: Tensor, value: Tensor) -> Tensor:
    if not is_dtensor(param):
        return value
    if is_dtensor(value):
        return value.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined, no-any-return]
    from hf_muon.distributed.dtensor import sharded_like

    return sharded_like(param, value)  # type: ignore[arg-type]


def reroute(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same state in this optimizer's groups, with zero moments for parameters that have changed sides.

    Parameters are matched by name; where names are missing, or nothing has moved, the state stays as it is.
    """
    saved_groups = state_dict.get("param_groups") or []
    named = all(group.get("param_names") for group in groups)
    if not named or not all(group.get("param_names") and "use_muon" in group for group in saved_groups):
        return dict(state_dict)
    places = {
        name: (saved, key)
        for saved in saved_groups
        for name, key in zip(saved["param_names"], saved["params"], strict=True)
    }
    seen = {n: view for saved in saved_groups for n, view in zip(saved["param_names"], views_of(saved), strict=True)}
    here = {name: group["use_muon"] for group in groups for name in group["param_names"]}
    moved = [name for name in here if name in places and places[name][0]["use_muon"] != here[name]]
    if not moved or here.keys() != places.keys():
        return dict(state_dict)
    diagnostics.logger().warning("moments start from zero for %s, whose routing changed", _few(moved))
    state, rerouted = {}, []
    for group in groups:
        like = [saved for saved in saved_groups if saved["use_muon"] == group["use_muon"]]
        names = set(group["param_names"])
        # The group's options are those of the saved group that most of its parameters were in.
        origin = max(like, key=lambda saved: len(names & set(saved["param_names"])), default=group)
        options = {key: value for key, value in origin.items() if key not in ("params", "param_names")}
        options["step"] = max(options.get("step", 0), 1)
        options.setdefault("momentum_dtype", "auto")
        keys = [places[name][1] for name in group["param_names"]]
        names_and_views = {"param_names": list(group["param_names"]), "views": [seen[n] for n in group["param_names"]]}
        rerouted.append({**options, "params": keys, **names_and_views})
        for name, key, param in zip(group["param_names"], keys, group["params"], strict=True):
            if name in moved:
                there = {**options, "use_muon": group["use_muon"]}
                state[key] = {kind: zero_state(param, kind, _kept(there)) for kind in state_keys(there, param)}
            elif key in state_dict["state"]:
                state[key] = state_dict["state"][key]
    return {**state_dict, "state": state, "param_groups": rerouted}
