"""How transformers and accelerate lay a run out over processes, by the run's arguments and accelerate's state."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hf_muon.integrations.names import is_set

if TYPE_CHECKING:
    from transformers import TrainingArguments


def accelerator_state() -> Any:
    """Return what accelerate has decided for this process; None before a Trainer has made its Accelerator."""
    from accelerate.state import AcceleratorState, is_initialized  # type: ignore[import-untyped]

    return AcceleratorState() if is_initialized() else None


def axis_size(args: TrainingArguments, axis: str) -> int:
    """Return the size of an axis of ParallelismConfig, as the arguments or `accelerate launch` set it."""
    configs = (getattr(args, "parallelism_config", None), getattr(accelerator_state(), "parallelism_config", None))
    return max(getattr(config, f"{axis}_size", None) or 1 for config in configs)


def asks_for_fsdp(args: TrainingArguments) -> bool:
    """Return whether the arguments or `accelerate launch` ask for FSDP."""
    return bool(getattr(args, "fsdp", None)) or is_set("accelerate", "ACCELERATE_USE_FSDP")


def fsdp_version(args: TrainingArguments) -> int:
    """Return the version of FSDP that runs, or would run on a GPU."""
    plugin = getattr(accelerator_state(), "fsdp_plugin", None)
    if plugin is not None:
        return int(plugin.fsdp_version)
    if getattr(args, "fsdp", None):
        return int((args.fsdp_plugin_args or {}).get("fsdp_version", 1))
    return int(os.environ.get("FSDP_VERSION", "1"))
