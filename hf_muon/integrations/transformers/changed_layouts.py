"""Trainer's checkpoints in another layout: what Trainer cannot load is refused, on all ranks, with what to do.

Trainer writes three kinds of checkpoints, and a run reads its own kind only. Where it looks for files of the other
kind, it fails on the rank that reads them, and the others wait.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_muon._autoload import Change
from hf_muon.integrations.names import is_muon

# accelerate's names. `_MODEL` is a file of FULL_STATE_DICT, and begins the name of a folder of SHARDED_STATE_DICT.
_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer.bin"
_WITHOUT_FSDP = ("model.safetensors", "pytorch_model.bin", "optimizer.pt")
_KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")


def patch_loading(module: ModuleType) -> Iterator[Change]:
    """Patch `Trainer._load_from_checkpoint`, the first to read a checkpoint, to refuse kinds that it cannot load."""
    trainer = module.Trainer
    load = trainer._load_from_checkpoint

    @functools.wraps(load)
    def load_own_kind(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = next(iter((*args, *kwargs.values())), None)
        if is_muon(self.args.optim) and isinstance(checkpoint, (str, Path)):
            complaint = kind_complaint(self, Path(checkpoint))
            if complaint:
                raise ValueError(complaint)
        return load(self, *args, **kwargs)

    yield trainer, "_load_from_checkpoint", load_own_kind


def kind_complaint(trainer: Any, checkpoint: Path) -> str | None:
    """Say why a run cannot load a checkpoint of Trainer, by its kind; None where it can, or nobody knows."""
    saved, own = kind_of(checkpoint), ""
    if trainer.is_fsdp_enabled:
        own = getattr(trainer.accelerator.state.fsdp_plugin.state_dict_type, "name", "")
        if own not in _KINDS:
            return None
    if saved is None or saved == own:
        return None
    if not saved:
        advice = "Resume without FSDP, or start a new run from the checkpoint's weights, whose moments start from zero"
    elif own:
        advice = f"Set FSDP's state_dict_type to {saved}, which resumes on any number of ranks"
    elif saved == _KINDS[0]:
        advice = f"To load it without FSDP, remove its {_MODEL}.bin and rename its {_OPTIMIZER} to optimizer.pt"
    else:
        advice = f"Resume with FSDP; only one that was saved with {_KINDS[0]} can be loaded without"
    run = f"with FSDP and {own}" if own else "without FSDP"
    what = f"a {saved}" if saved else "no state dict"
    return f"{checkpoint} has {what} of FSDP, and a run {run} cannot resume from it. {advice}"


def kind_of(checkpoint: Path) -> str | None:
    """Return the state dict type of FSDP, "" for a checkpoint without FSDP, None where Trainer may know more."""
    if (checkpoint / f"{_MODEL}.bin").is_file():
        return _KINDS[0]
    if any(path.is_dir() for path in checkpoint.glob(f"{_MODEL}*")):
        return _KINDS[1]
    return "" if any((checkpoint / name).is_file() for name in _WITHOUT_FSDP) else None
