"""How transformers and accelerate lay a run out over processes, by the run's arguments and accelerate's state."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hf_muon.diagnostics.log import has_process_group
from hf_muon.integrations.names import is_set

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from transformers import TrainingArguments


def accelerator_state() -> Any:
    """Return what accelerate has decided for this process; None before a Trainer has made its Accelerator."""
    from accelerate.state import AcceleratorState, is_initialized  # type: ignore[import-untyped]

    return AcceleratorState() if is_initialized() else None


def replicate_group(model: nn.Module | None) -> ProcessGroup | None:
    """Return the group of all processes where Trainer wraps the model in DDP, so that each holds every parameter.

    Follows accelerate's decision: a process group that is initialized says nothing about replication. None in every
    other layout.

    Args:
        model: the model before it is wrapped, or None where transformers does not hand it over.
    """
    state = accelerator_state()
    if state is None or not state.distributed_type.value.startswith("MULTI_"):
        return None  # one process, or FSDP2, whose tensors know their own groups
    parallelism = getattr(state, "parallelism_config", None)
    if any((getattr(parallelism, f"{axis}_size", None) or 1) > 1 for axis in ("tp", "cp", "sp")):
        return None  # accelerate does not wrap these
    if (
        getattr(model, "is_distributed_loading_by_transformers", False)  # sharded while loading, and not wrapped either
        or getattr(model, "_ddp_params_and_buffers_to_ignore", None)  # some parameters may differ between the ranks
        or len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1  # several devices in one process
    ):
        return None
    import torch.distributed as dist

    return dist.group.WORLD if has_process_group() else None


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
