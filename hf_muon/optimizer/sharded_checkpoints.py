"""Resuming with other state than a sharded checkpoint has: rules that were switched on since, moments in another dtype.

`torch.distributed.checkpoint` reads a checkpoint into the state that the optimizer offers, and refuses one that lacks
any of it. In `loading_from`, a `Muon` offers what the checkpoint has; `load_state_dict` then converts it, and says so,
as it does with a whole state.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from hf_muon.config import GROUP_OPTIONS
from hf_muon.math.moments import SCALES
from hf_muon.optimizer.rule_state import is_rule_key
from hf_muon.optimizer.state import DTYPE_OPTIONS, blocks_complaint, state_keys, zero_state
from hf_muon.rules import registry
from hf_muon.storage.factors import KEYS

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

Group = Mapping[str, Any]


@contextlib.contextmanager
def loading_from(optimizer: Optimizer, checkpoint: str | os.PathLike[str] | StorageReader) -> Iterator[None]:
    """Let an optimizer's state dict have what a sharded checkpoint has, while its state is loaded.

    Left out are the state of rules and the options of param groups that the checkpoint has for no parameter and no
    group. Moments are offered as 8-bit codes where the checkpoint has codes, and as fp32 numbers where it has none.
    Moments that the checkpoint lacks stay in the state dict, so that torch refuses the checkpoint. Use it around
    ``get_optimizer_state_dict(model, optimizer)`` for `torch.distributed.checkpoint.load`, not for whole states::

        with loading_from(optimizer, path):
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    Args:
        optimizer: a `Muon`.
        checkpoint: folder of the checkpoint, or what reads it. If its metadata cannot be read, the state dict is as
            ever: torch reads them again, and raises the error of one rank on all of them.
    """
    try:
        names = _names(checkpoint)
    except Exception:  # noqa: BLE001  raised here, by one rank alone, it would leave the others waiting in the load
        yield
        return
    hook = optimizer.register_state_dict_post_hook(functools.partial(_offered, names=names))
    try:
        yield
    finally:
        hook.remove()


def _names(checkpoint: str | os.PathLike[str] | StorageReader) -> Set[str]:
    """Return the names of everything in a checkpoint, such as ``optimizer.state.layers.0.weight.momentum_buffer``."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
    return reader.read_metadata().state_dict_metadata.keys()


def _has(names: Set[str], section: str, key: str) -> bool:
    """Return whether a checkpoint has a key for some parameter (section `state`) or group (`param_groups`)."""
    pattern = re.compile(rf"(?:^|\.){section}\..*\.{re.escape(key)}$")
    return any(pattern.search(name) for name in names if name.endswith(f".{key}"))


def _offered(optimizer: Optimizer, state_dict: dict[str, Any], *, names: Set[str]) -> dict[str, Any]:
    """Return a state dict of a `Muon` with what the checkpoint of these names has."""
    options = {key for key in (*GROUP_OPTIONS, *KEYS) if not _has(names, "param_groups", key)}
    rules = {key for key in registry.state_kinds() if not _has(names, "state", key)}
    scales = {key for key in SCALES if _has(names, "state", key)}
    groups, state = [], dict(state_dict["state"])
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        groups.append({key: value for key, value in packed.items() if key not in options})
        for param, key in zip(group["params"], packed["params"], strict=True):
            if key in state:
                own = {name: value for name, value in state[key].items() if name not in rules}
                state[key] = _with_moments_like(own, param, group, scales)
    return {**state_dict, "state": state, "param_groups": groups}


def _with_moments_like(own: dict[str, Any], param: Tensor, group: Group, scales: Set[str]) -> dict[str, Any]:
    """Return a parameter's state, with zeros for its moments where the checkpoint stores these differently.

    Args:
        own: the state.
        param: the parameter.
        group: its param group.
        scales: the keys of scales that the checkpoint has.
    """
    saved_group = {**group, DTYPE_OPTIONS[bool(group["use_muon"])]: "int8"}
    if not scales & set(state_keys(saved_group, param)):
        saved_group |= {DTYPE_OPTIONS[bool(group["use_muon"])]: "fp32"}
    keys = state_keys(saved_group, param)
    if set(keys) == set(state_keys(group, param)) or blocks_complaint(saved_group, param):
        return own  # codes whose blocks this layout would cut are refused at the load
    others = {name: value for name, value in own.items() if name == "step" or is_rule_key(name)}
    return others | {name: zero_state(param, name, saved_group) for name in keys if name != "step"}
