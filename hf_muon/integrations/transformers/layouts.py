"""How a Trainer run is laid out over processes, by its arguments and accelerate, and which layouts Muon refuses."""

from __future__ import annotations

import importlib.metadata
import os
from typing import TYPE_CHECKING, Any

from hf_muon.integrations.ulysses import hooks as ulysses

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from transformers import TrainingArguments


def refuse_unsupported(args: TrainingArguments, fsdp_plugin: Any = None) -> None:
    """Raise where this version would train something that is not Muon.

    Args:
        args: of the run.
        fsdp_plugin: accelerate's, where no Accelerator has been made yet.

    Raises:
        RuntimeError: what was asked for, and what to do instead.
    """
    asked, instead = None, "Train on one process, with DDP or with FSDP2, or choose another optimizer."
    state = _accelerator_state()
    kind = state.distributed_type.value if state else None
    sequence = [axis for axis in ("cp", "sp") if _size(args, axis) > 1]
    if getattr(args, "deepspeed", None) or _truthy("ACCELERATE_USE_DEEPSPEED") or kind == "DEEPSPEED":
        refuse_deepspeed(args)
        if sequence == ["sp"]:
            ulysses.refuse_arguments(args)
            sequence = []
    if _truthy("ACCELERATE_USE_MEGATRON_LM") or kind == "MEGATRON_LM":
        asked = "Megatron-LM, which brings an optimizer of its own"
    elif getattr(getattr(args, "parallel_mode", None), "value", None) == "sagemaker_model_parallel":
        asked = "SageMaker's model parallelism"
    elif sequence:
        asked = f"ParallelismConfig({', '.join(f'{axis}_size' for axis in sequence)}) in this version of hf_muon"
        if sequence == ["sp"]:
            asked += " without DeepSpeed"
            instead = "Give TrainingArguments a DeepSpeed config (deepspeed:); see scripts/run_ulysses.sh."
    elif getattr(args, "fsdp", None) and isinstance(args.fsdp_config, dict) and args.fsdp_config.get("xla"):
        asked = "FSDP on XLA, which cuts matrices into slices"
    elif _asks_for_fsdp(args) and _fsdp_version(args) == 1:
        asked = "FSDP version 1, which keeps flat slices in which matrices have lost their shape"
        instead = (
            'Say version 2: fsdp_config={"version": 2} in TrainingArguments, fsdp_version: 2 in the fsdp_config of an '
            "accelerate config file, or accelerate launch --fsdp_version 2."
        )
    elif _offloads(getattr(state, "fsdp_plugin", None) or fsdp_plugin):
        asked = "FSDP2 with its parameters on the CPU (offload) in this version of hf_muon"
        instead = "Leave cpu_offload and fsdp_offload_params out, or choose another optimizer."
    if asked:
        raise RuntimeError(f"optim: muon does not run under {asked}. {instead}")


def refuse_plain_shards(model: nn.Module | None) -> None:
    """Raise for tensor parallelism in plain tensors, as transformers had it before it took DTensors.

    Raises:
        RuntimeError: a part of a matrix would be orthogonalized as if it were the matrix.
    """
    ranks = getattr(model, "_tp_size", None) or 1
    if model is None or ranks == 1:
        return
    from hf_muon.storage.tensors import is_dtensor

    if not any(is_dtensor(param) for param in model.parameters()):
        raise RuntimeError(
            f"optim: muon does not run under the tensor parallelism of this transformers: it cuts matrices for {ranks} "
            "ranks into plain tensors, which do not say what they are part of. Take a transformers that cuts into "
            "DTensors (5.23 does), or train with FSDP2."
        )


def warn_of_fsdp(args: TrainingArguments) -> None:
    """Tell on rank 0 where FSDP was asked for and does not run, or saves what it cannot load again."""
    from hf_muon.diagnostics import log as diagnostics

    state = _accelerator_state()
    if state is None or not diagnostics.is_rank_zero():
        return
    kind = state.distributed_type.value
    if kind != "FSDP" and _asks_for_fsdp(args):
        diagnostics.logger().warning(
            "FSDP was asked for, and accelerate runs %s: nothing is sharded, each process holds the whole model. "
            "accelerate has FSDP on GPUs and other accelerators only, in processes of their own (torchrun, "
            "accelerate launch)",
            "one process" if kind == "NO" else f"DDP ({kind})",
        )
    sharded = "SHARDED" in str(getattr(getattr(state, "fsdp_plugin", None), "state_dict_type", ""))
    version = importlib.metadata.version("accelerate")
    if sharded and tuple(int(part) for part in version.split(".")[:2]) < (1, 13):
        diagnostics.logger().warning(
            "accelerate %s saves the sharded moments of any optimizer and cannot load them again: a resumed run will "
            "be refused. Set FSDP_STATE_DICT_TYPE=FULL_STATE_DICT in the environment (fsdp_state_dict_type in an "
            "accelerate config file), or take accelerate 1.13 or newer",
            version,
        )


def replicate_group(model: nn.Module | None) -> ProcessGroup | None:
    """The processes that hold copies of every parameter: all, where Trainer wraps the model in DDP; None elsewhere.

    That follows accelerate's decision, because an initialized process group alone does not say so.

    Args:
        model: the model before it is wrapped, or None where transformers does not hand it over.
    """
    state = _accelerator_state()
    if state is None or not state.distributed_type.value.startswith("MULTI_"):
        return None  # one process, or FSDP2, whose tensors know their own groups
    parallelism = getattr(state, "parallelism_config", None)
    if any((getattr(parallelism, f"{axis}_size", None) or 1) > 1 for axis in ("tp", "cp", "sp")):
        return None  # accelerate does not wrap these
    if (
        getattr(model, "is_distributed_loading_by_transformers", False)  # cut as it was loaded, and not wrapped either
        or getattr(model, "_ddp_params_and_buffers_to_ignore", None)  # some parameters may differ between the ranks
        or len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1  # several devices in one process
    ):
        return None
    import torch.distributed as dist

    from hf_muon.diagnostics.log import has_process_group

    return dist.group.WORLD if has_process_group() else None


def _accelerator_state() -> Any:
    """What accelerate has decided for this process; None before a Trainer has made its Accelerator."""
    from accelerate.state import AcceleratorState, is_initialized  # type: ignore[import-untyped]

    return AcceleratorState() if is_initialized() else None


def _size(args: TrainingArguments, axis: str) -> int:
    """An axis of ParallelismConfig, from the arguments or from `accelerate launch`."""
    configs = (getattr(args, "parallelism_config", None), getattr(_accelerator_state(), "parallelism_config", None))
    return max(getattr(config, f"{axis}_size", None) or 1 for config in configs)


def _asks_for_fsdp(args: TrainingArguments) -> bool:
    return bool(getattr(args, "fsdp", None)) or _truthy("ACCELERATE_USE_FSDP")


def _fsdp_version(args: TrainingArguments) -> int:
    """The version that runs, or would run on a GPU."""
    plugin = getattr(_accelerator_state(), "fsdp_plugin", None)
    if plugin is not None:
        return int(plugin.fsdp_version)
    if getattr(args, "fsdp", None):
        return int((args.fsdp_plugin_args or {}).get("fsdp_version", 1))
    return int(os.environ.get("FSDP_VERSION", "1"))


def _offloads(fsdp_plugin: Any) -> bool:
    """Newton-Schulz would run on the CPU, and pieces travel over a backend that the process group may not have."""
    return type(getattr(fsdp_plugin, "cpu_offload", None)).__name__ == "CPUOffloadPolicy"


def refuse_deepspeed(args: TrainingArguments) -> None:
    """Raise where a DeepSpeed config, if there is one, holds something that Muon does not go with.

    Raises:
        RuntimeError: every complaint.
    """
    if getattr(args, "deepspeed_plugin", None) is not None:
        from hf_muon.integrations.deepspeed.engine import refuse_arguments

        refuse_arguments(args)


def _truthy(variable: str) -> bool:
    return os.environ.get(variable, "false").strip().lower() in ("1", "true", "yes", "on")
