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
from hf_muon.diagnostics.log import logger
from hf_muon.math.moments import SCALES
from hf_muon.optimizer.rule_state import is_rule_key
from hf_muon.optimizer.state import DTYPE_OPTIONS, blocks_complaint, state_keys, zero_state
from hf_muon.rules import registry
from hf_muon.storage.factors import KEY

_STATE = re.compile(r"(?:^|(?<=\.))state\.")

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

Group = Mapping[str, Any]


@contextlib.contextmanager
def loading_from(optimizer: Optimizer, checkpoint: str | os.PathLike[str] | StorageReader) -> Iterator[None]:
    """Let an optimizer's state dict have what a sharded checkpoint has, while its state is loaded.

    Left out are the state of rules and the options of param groups that the checkpoint has for no parameter and no
    group; a flattened state (`flatten_optimizer_state_dict`) must have all options. Moments are offered as 8-bit codes
    where the checkpoint has codes, and as fp32 numbers where it has none. Moments that the checkpoint lacks stay in the
    state dict, so that torch refuses the checkpoint. Use it around ``get_optimizer_state_dict(model, optimizer)`` for
    `torch.distributed.checkpoint.load`, not for whole states::

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
        saved = _Saved(checkpoint)
    except Exception as error:  # noqa: BLE001  raised by one rank alone, it would leave the others waiting
        logger().warning(
            "%s: what it has cannot be read, so nothing is converted (%s) [unreadable-shards]", checkpoint, error
        )
        saved = None
    if saved is None:
        yield
        return
    hook = optimizer.register_state_dict_post_hook(functools.partial(_offered, saved=saved))
    try:
        yield
    finally:
        hook.remove()


class _Saved:
    """The names of everything in a checkpoint, such as ``optimizer.state.layers.0.weight.momentum_buffer``."""

    def __init__(self, checkpoint: str | os.PathLike[str] | StorageReader) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        reader = FileSystemReader(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
        self._names = reader.read_metadata().state_dict_metadata.keys()
        self._of_param: dict[str, set[str]] = {}  # the keys of the state, by the parameter's name
        for name in self._names:
            for match in _STATE.finditer(name):  # a parameter's name may have the word, too
                param, _, key = name[match.end() :].rpartition(".")
                self._of_param.setdefault(param, set()).add(key)

    def has(self, section: str, key: str) -> bool:
        """Return whether there is a key for some parameter (section `state`) or group (`param_groups`)."""
        pattern = re.compile(rf"(?:^|\.){section}\..*\.{re.escape(key)}$")
        return any(pattern.search(name) for name in self._names if name.endswith(f".{key}"))

    def scales(self, name: str) -> Set[str] | None:
        """Return the keys of the scales of a parameter's moments; None where no state has the parameter's name."""
        keys = self._of_param.get(name)
        return None if keys is None else keys & set(SCALES)


def _offered(optimizer: Optimizer, state_dict: dict[str, Any], *, saved: _Saved) -> dict[str, Any]:
    """Return a state dict of a `Muon` with what a checkpoint has."""
    options = {key for key in (*GROUP_OPTIONS, KEY) if not saved.has("param_groups", key)}
    rules = {key for key in registry.state_kinds() if not saved.has("state", key)}
    scales = {key for key in SCALES if saved.has("state", key)}
    dtypes = {
        side: {group[key] for group in optimizer.param_groups if bool(group["use_muon"]) is side}
        for side, key in DTYPE_OPTIONS.items()
    }
    groups, state = [], dict(state_dict["state"])
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        groups.append({key: value for key, value in packed.items() if key not in options})
        # Without names only a run with one dtype can tell how each of its moments was stored.
        unnamed = scales if len(dtypes[bool(group["use_muon"])]) == 1 else None
        names = group.get("param_names") or [""] * len(group["params"])
        for param, name, key in zip(group["params"], names, packed["params"], strict=True):
            if key in state:
                own = {name: value for name, value in state[key].items() if name not in rules}
                own_scales = saved.scales(name)
                own_scales = unnamed if own_scales is None else own_scales
                state[key] = own if own_scales is None else _with_moments_like(own, param, group, own_scales)
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
