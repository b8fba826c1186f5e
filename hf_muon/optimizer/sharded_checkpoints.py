"""Resume with state that a sharded checkpoint lacks: rules that were switched on since, moments in another dtype.

`torch.distributed.checkpoint` reads a checkpoint into the state that the optimizer offers, and refuses one that lacks
any of it. In `loading_from`, a `Muon` offers what the checkpoint has; `load_state_dict` then converts it, and says so,
as it does with a whole state.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from hf_muon.diagnostics.log import logger
from hf_muon.math.moments import MOMENTS, SCALES
from hf_muon.optimizer.state import DTYPE_OPTIONS, blocks_complaint, entries_of, zero_state
from hf_muon.rules import registry

# A lookahead, so that matches may overlap: a parameter's name may have these words, too.
_NAME = re.compile(r"(?=(?:^|\.)state\.(.+)\.([^.]+)$)")

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader


@contextlib.contextmanager
def loading_from(optimizer: Optimizer, checkpoint: str | os.PathLike[str] | StorageReader) -> Iterator[None]:
    """Let an optimizer's state dict have what a sharded checkpoint has, while its state is loaded.

    State of rules that the checkpoint has for no parameter is left out. Moments are offered as 8-bit codes where the
    checkpoint has codes, and as fp32 numbers where it has none. Moments that the checkpoint lacks stay in the state
    dict, so that torch refuses the checkpoint. Use it around ``get_optimizer_state_dict(model, optimizer)`` for
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
    except Exception as error:  # noqa: BLE001  raised by one rank, it would leave the others waiting
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
    """The content of a checkpoint, by the names in it, such as ``optimizer.state.layers.0.weight.momentum_buffer``.

    Attributes:
        keys: the keys of the state of all parameters.
        of_param: the keys of the state of each parameter, by its name.
    """

    def __init__(self, checkpoint: str | os.PathLike[str] | StorageReader) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        reader = FileSystemReader(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
        self.of_param: dict[str, set[str]] = {}
        for name in reader.read_metadata().state_dict_metadata:
            for param, key in _NAME.findall(name):
                self.of_param.setdefault(param, set()).add(key)
        self.keys: set[str] = set().union(*self.of_param.values())


def _offered(optimizer: Optimizer, state_dict: dict[str, Any], *, saved: _Saved) -> dict[str, Any]:
    """Return a state dict of a `Muon` with what a checkpoint has."""
    rules = registry.state_kinds().keys() - saved.keys
    state = dict(state_dict["state"])
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        option = DTYPE_OPTIONS[bool(group["use_muon"])]
        dtypes = {other[option] for other in optimizer.param_groups if other["use_muon"] == group["use_muon"]}
        # Without names only a run with one dtype can tell how each of its moments was stored.
        unnamed = saved.keys if len(dtypes) == 1 else None
        names = group.get("param_names") or [""] * len(group["params"])
        numbers, codes = ({**group, option: dtype} for dtype in ("fp32", "int8"))
        entries = zip(entries_of(group), entries_of(numbers), entries_of(codes), strict=True)
        for param, name, key, (current, *both) in zip(group["params"], names, packed["params"], entries, strict=True):
            if key not in state:
                continue
            values = {name: value for name, value in state[key].items() if name not in rules}
            if (keys := saved.of_param.get(name, unnamed)) is not None:
                has_codes = not SCALES.keys().isdisjoint(keys & both[1].keys())
                offered, like = both[has_codes], codes if has_codes else numbers
                # Codes whose blocks this layout would cut are refused at the load.
                if offered.keys() != current.keys() and not blocks_complaint(like, param):
                    values = {name: value for name, value in values.items() if name not in {*MOMENTS, *SCALES}}
                    values |= {
                        name: zero_state(param, name, entry)
                        for name, entry in offered.items()
                        if name not in values and name not in rules
                    }
            state[key] = values
    return {**state_dict, "state": state}
