"""Load with `torch.distributed.checkpoint`: a `Muon` gets exactly the state that the checkpoint has.

With `full_state_dict=True`, torch copies a checkpoint over the existing state of the optimizer, or over zeros. If the
checkpoint lacks a moment, the old one would silently remain. For parameters that have been frozen since, torch would
not load moments. Sharded checkpoints are converted like whole states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_muon._autoload import Change, everywhere
from hf_muon.integrations.names import muons_in

# The arguments of `_load_optim_state_dict` that we read, and the fields of its `info`.
_READ = ("optimizers", "state_dict", "info")
_READ_OF_INFO = ("fsdp_modules", "full_state_dict", "broadcast_from_rank0", "fqn_param_mapping")


def patch_loading(module: ModuleType) -> Iterator[Change]:
    """Patch the loading of `set_optimizer_state_dict` and `set_state_dict`: `Muon` refuses states that lack moments."""
    # Private, because the optimizer's hooks get what torch has filled in, and both public functions end here. An error
    # marks this hook as failed, and runs that need it are refused.
    load = module._load_optim_state_dict
    signature = inspect.signature(load)
    missing = [name for name in _READ if name not in signature.parameters]
    fields = {field.name for field in dataclasses.fields(module._StateDictInfo)}
    if missing := missing or [f"info.{name}" for name in _READ_OF_INFO if name not in fields]:
        raise TypeError(f"_load_optim_state_dict has no argument {', '.join(missing)}")

    @functools.wraps(load)
    def load_without_template(*args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        muons = muons_in(value for argument in arguments if isinstance(argument, (tuple, list)) for value in argument)
        call = signature.bind(*args, **kwargs) if muons else None
        # FSDP1 converts states by itself; Muon refuses its flat parameters.
        if call is None or call.arguments["info"].fsdp_modules:
            return load(*args, **kwargs)
        info = call.arguments["info"]
        call.arguments["state_dict"] = _nested(call.arguments["state_dict"], call.arguments["optimizers"], info)
        params = [param for muon in muons for group in muon.param_groups for param in group["params"]]
        with contextlib.ExitStack() as stack:
            if info.full_state_dict and (names := _names_on_all_ranks(call.arguments["state_dict"], info)) is not None:
                expected = [name for param in params for name in info.fqn_param_mapping.get(param, ())]
                call.arguments["state_dict"] = _with_empty_states(call.arguments["state_dict"], expected)
                hook = functools.partial(_of_checkpoint, names=names)
                # Before users' hooks, which shall see what is loaded.
                for muon in muons:
                    stack.callback(muon.register_load_state_dict_pre_hook(hook, prepend=True).remove)
            for param in params:
                if not param.requires_grad:
                    stack.callback(param.requires_grad_, False)
                    param.requires_grad_()
            return load(*call.args, **call.kwargs)

    yield module, "_load_optim_state_dict", load_without_template


def patch_accelerate(module: ModuleType) -> Iterator[Change]:
    """Patch the functions with which accelerate and Trainer load shards.

    Args:
        module: `accelerate.utils.fsdp_utils`.
    """

    def folder_of(call: Mapping[str, Any]) -> Path | None:
        kind = call["fsdp_plugin"].state_dict_type
        if (kind is not None and kind.name == "FULL_STATE_DICT") or not call.get("use_dcp", True):
            return None
        folder, name = Path(call["input_dir"]), f"optimizer_{call.get('optimizer_index', 0)}"
        # As accelerate looks for it: users pass the folder of the checkpoint or this one.
        return folder if folder.name == name else folder / name

    yield from _converting(module, "load_fsdp_optimizer", ("fsdp_plugin", "input_dir"), folder_of)


def patch_llamafactory(module: ModuleType) -> Iterator[Change]:
    """Patch the function with which LLaMA-Factory v1 loads shards.

    Args:
        module: `...trainer_plugins.distributed.fsdp2`.
    """
    yield from _converting(module, "load_checkpoint", ("ckpt_dir",), lambda call: Path(call["ckpt_dir"]) / "optimizer")


def _converting(
    module: ModuleType, name: str, read: Sequence[str], folder_of: Callable[[Mapping[str, Any]], Path | None]
) -> Iterator[Change]:
    """Yield the changes that make a function convert the shards that it loads for a `Muon`.

    Args:
        module: has the function.
        name: the name of the function.
        read: arguments of the function that `folder_of` reads.
        folder_of: returns the folder of the optimizer's shards, from a call's arguments; None where there are none.
    """
    load = getattr(module, name)
    signature = inspect.signature(load)
    if missing := [argument for argument in read if argument not in signature.parameters]:
        raise TypeError(f"{name} has no argument {', '.join(missing)}")

    @functools.wraps(load)
    def load_converted(*args: Any, **kwargs: Any) -> Any:
        muons = muons_in((*args, *kwargs.values()))
        folder = folder_of(signature.bind(*args, **kwargs).arguments) if muons else None
        if folder is None:
            return load(*args, **kwargs)
        from hf_muon.optimizer.sharded_checkpoints import loading_from

        with loading_from(muons[0], folder):
            return load(*args, **kwargs)

    yield from everywhere(module, name, load_converted)


def _nested(state_dict: Any, optimizers: Sequence[Any], info: Any) -> Any:
    """Return a flattened state dict in torch's other form.

    torch looks for a key of each live option, and the file has all options in one text.
    """
    if not isinstance(state_dict, Mapping) or not state_dict or "state" in state_dict:
        return state_dict
    sections: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    names_of_model = {name for names in info.fqn_param_mapping.values() if isinstance(names, set) for name in names}
    for name, value in state_dict.items():
        section, _, path = str(name).partition(".")
        components = path.split(".")
        # The longest name of a parameter: keys may have dots, and states of other optimizers are nested.
        ends = (end for end in range(len(components) - 1, 0, -1) if ".".join(components[:end]) in names_of_model)
        end = next(ends, len(components) - 1)
        values = sections.setdefault(section, {}).setdefault(".".join(components[:end]), {})
        keys = components[end:] if section == "state" else [".".join(components[end:])]
        for key in keys[:-1]:
            values = values.setdefault(key, {})
        values[keys[-1]] = value
    # An optimizer may keep no state, as SGD without momentum. Muon refuses the load if moments are missing.
    for name in sections["param_groups"]:
        sections["state"].setdefault(name, {})
    groups = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        names = [name for param in group["params"] for name in info.fqn_param_mapping[param]]
        names = [name for name in names if name in sections["param_groups"]]
        groups.append({**(sections["param_groups"][names[0]] if names else {}), "params": names})
    return {"state": sections["state"], "param_groups": groups}


def _names(state_dict: Any) -> Set[str] | None:
    """Return the names of everything in a state dict, as torch flattens it; None if it is not an optimizer's.

    Examples: ``state.layers.0.weight.momentum_buffer``, ``param_groups.layers.0.weight.step``.
    """
    if not state_dict:
        return frozenset()
    try:
        state = {f"state.{param}.{key}" for param, values in state_dict["state"].items() for key in values}
        groups = state_dict["param_groups"]
        return state | {f"param_groups.{param}.{key}" for group in groups for param in group["params"] for key in group}
    except (AttributeError, KeyError, TypeError):
        return None  # torch's own error, for the same state dict, says more


def _names_on_all_ranks(state_dict: Any, info: Any) -> Set[str] | None:
    """Return the names of everything in the state dict that is loaded; from rank 0 if only rank 0 has it."""
    box = [_names(state_dict)]
    if info.broadcast_from_rank0:
        import torch.distributed as dist

        dist.broadcast_object_list(box, src=0)
    return box[0]


def _with_empty_states(state_dict: Any, expected: Sequence[str]) -> Any:
    """Return a state dict with an empty state for each of these parameters that it lacks; torch requires one."""
    state = state_dict.get("state") if state_dict else None  # ranks for which rank 0 reads may have None
    if not state or all(isinstance(key, int) for key in state):  # torch takes positions for parameters as they are
        return state_dict
    return {**state_dict, "state": {**{name: {} for name in expected}, **state}}


def _of_checkpoint(optimizer: Any, state_dict: Mapping[str, Any], *, names: Set[str]) -> dict[str, Any]:
    """Return a state dict without the entries that torch took from the optimizer because the checkpoint lacks them.

    Keys of param groups that are not of this package, such as those of schedulers, remain.
    """
    from hf_muon.optimizer.checkpoint_format import KEY

    if not names:
        return {}
    state = {
        param: {key: value for key, value in values.items() if f"state.{param}.{key}" in names}
        for param, values in state_dict["state"].items()
    }
    checked = {"use_muon", "step", KEY}
    groups = [
        {
            key: value
            for key, value in group.items()
            if key not in checked
            or not group["params"]
            or any(f"param_groups.{param}.{key}" in names for param in group["params"])
        }
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": groups}
