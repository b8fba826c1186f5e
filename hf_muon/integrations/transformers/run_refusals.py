"""Refuse Trainer runs in which `optim: muon` would not work, or warn."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_muon.integrations.names import is_set, refuse_failed, warn
from hf_muon.integrations.ulysses import refusals as ulysses
from hf_muon.versions import is_older

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments


def refuse_unsupported(args: TrainingArguments) -> None:
    """Raise if this version would train something other than Muon.

    Args:
        args: the arguments of the run.

    Raises:
        RuntimeError: the layout that was asked for, and what to do instead.
    """
    # Before a Trainer is made, accelerate has no state, and only the arguments and the environment tell the layout.
    state = accelerator_state()
    kind = state.distributed_type.value if state else None
    axes = [axis for axis in ("cp", "sp") if axis_size(args, axis) > 1]
    if getattr(args, "deepspeed", None) or is_set("accelerate", "ACCELERATE_USE_DEEPSPEED") or kind == "DEEPSPEED":
        refuse_deepspeed(args)
        if axes == ["sp"]:  # DeepSpeed's, with which Muon runs
            ulysses.refuse_arguments(args)
            axes = []
    # Only when accelerate has made its state is it known what it ignores.
    if state is not None and axis_size(args, "sp") == 1:
        ulysses.refuse_ignored_size()
    advice = "Train on one process, with DDP or with FSDP2, or choose another optimizer. [unsupported-layout]"
    if is_set("accelerate", "ACCELERATE_USE_MEGATRON_LM") or kind == "MEGATRON_LM":
        layout = "Megatron-LM, which brings an optimizer of its own"
    elif axes == ["sp"]:
        layout = "ParallelismConfig(sp_size) in this version of hf_muon without DeepSpeed"
        advice = (
            "Give TrainingArguments a DeepSpeed config (deepspeed:); see scripts/run_ulysses.sh. [sp-without-deepspeed]"
        )
    elif axes:
        layout = f"ParallelismConfig({', '.join(f'{axis}_size' for axis in axes)}) in this version of hf_muon"
    elif getattr(args, "fsdp", None) and isinstance(args.fsdp_config, dict) and args.fsdp_config.get("xla"):
        layout = "FSDP on XLA, which cuts matrices into slices"
    elif asks_for_fsdp(args) and fsdp_version(args) == 1:
        layout = "FSDP version 1, which keeps flat slices in which matrices have lost their shape"
        advice = (
            'Say version 2: fsdp_config={"version": 2} in TrainingArguments, fsdp_version: 2 in the fsdp_config of an '
            "accelerate config file, or accelerate launch --fsdp_version 2. [fsdp1]"
        )
    else:
        return
    raise RuntimeError(f"optim: muon does not run under {layout}. {advice}")


def refuse_failed_hooks(args: TrainingArguments) -> None:
    """Raise if a hook that a run needs has failed.

    Raises:
        RuntimeError: the hook, and what is lost with it.
    """
    # A run is not refused for hooks that it does not need, such as those of a layout that it is not in.
    state = accelerator_state()
    needed = {
        "callback of Trainer": True,
        "Ulysses": axis_size(args, "sp") > 1,
        "batches of Ulysses": axis_size(args, "sp") > 1,
        "Accelerator.prepare": state is not None and state.distributed_type.value == "DEEPSPEED",
        "whole states": asks_for_fsdp(args),
    }
    refuse_failed(*(name for name, is_needed in needed.items() if is_needed))


def refuse_parts_of_sequences(args: TrainingArguments, qk_clip: float | None) -> None:
    """Raise if attention logits are to be measured and each rank has a part of each sequence.

    Raises:
        RuntimeError: both options.
    """
    if qk_clip is not None and axis_size(args, "sp") > 1:
        raise RuntimeError(
            "optim: muon does not measure attention logits under ParallelismConfig(sp_size): each rank has a part of "
            f"each sequence. Remove qk_clip={qk_clip:g}, or sp_size [qk-clip-under-sp]"
        )


def refuse_plain_shards(model: nn.Module | None) -> None:
    """Raise for tensor parallelism in plain tensors, which transformers used before DTensors.

    Raises:
        RuntimeError: a shard would be orthogonalized as if it were the matrix.
    """
    ranks = getattr(model, "tp_size", None) or 1
    # A user's module may have a `tp_size` that is no number of ranks.
    if model is None or ranks == 1 or not isinstance(ranks, int):
        return
    from hf_muon.storage.tensors import is_dtensor

    if not any(is_dtensor(param) for param in model.parameters()):
        raise RuntimeError(
            f"optim: muon does not run under the tensor parallelism of this transformers: it cuts matrices for {ranks} "
            "ranks into plain tensors, which do not say what they are part of. Use a transformers that shards into "
            "DTensors (5.23 does), or train with FSDP2. [plain-shards]"
        )


def refuse_fp8_weights(accelerator: Any) -> None:
    """Raise if torchao will replace a model's weights by tensors of another class, for an all-gather in fp8.

    A run is refused when its optimizer has these weights; this is for those who ask before.

    Args:
        accelerator: accelerate's `Accelerator`, or None.

    Raises:
        RuntimeError: the option, and what to write.
    """
    recipe = getattr(getattr(accelerator, "ao_recipe_handler", None), "config", None)
    if getattr(recipe, "enable_fsdp_float8_all_gather", False):
        raise RuntimeError(
            "optim: muon does not step weights that torchao gathers in fp8, which are tensors of another class. Write "
            "enable_fsdp_float8_all_gather=False: in AORecipeKwargs, in fp8_config of an accelerate config file, or "
            "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false in the environment [unknown-tensor-class]"
        )


def refuse_deepspeed(args: TrainingArguments) -> None:
    """Raise if the run has a DeepSpeed config with which Muon does not work.

    Raises:
        RuntimeError: every complaint.
    """
    config = getattr(getattr(args, "deepspeed_plugin", None), "deepspeed_config", None)
    if isinstance(config, Mapping):
        from hf_muon.integrations.deepspeed.refusals import refuse_config

        refuse_config(config)


def warn_of_shards() -> None:
    """Log a warning on rank 0 if accelerate would save moments that it cannot load."""
    kind = getattr(getattr(accelerator_state(), "fsdp_plugin", None), "state_dict_type", "")
    version = importlib.metadata.version("accelerate")
    if "SHARDED" in str(kind) and is_older(version, "1.13"):
        warn(
            f"accelerate {version} saves the sharded moments of any optimizer and cannot load them again: a resumed "
            "run will be refused. Set FSDP_STATE_DICT_TYPE=FULL_STATE_DICT in the environment (fsdp_state_dict_type in "
            "an accelerate config file), or use accelerate 1.13 or newer [shards-not-loadable]"
        )


def accelerator_state() -> Any:
    """Return accelerate's state of this process; None before a Trainer has made its Accelerator."""
    from accelerate.state import AcceleratorState, is_initialized  # type: ignore[import-untyped]

    # Made here it would start process groups, and refuse the mixed precision that Trainer asks for later.
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
    # On the CPU accelerate runs DDP and has no plugin.
    plugin = getattr(accelerator_state(), "fsdp_plugin", None)
    if plugin is not None:
        return int(plugin.fsdp_version)
    if getattr(args, "fsdp", None):
        return int((args.fsdp_plugin_args or {}).get("fsdp_version", 1))
    return int(os.environ.get("FSDP_VERSION", "1"))
