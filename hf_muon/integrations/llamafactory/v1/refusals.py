"""What `optim_config: {name: muon}` refuses of a run of LLaMA-Factory v1."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

INTERFACE = "llamafactory.v1.accelerator.interface"


def refuse_unsupported(args: Any) -> None:
    """Raise where a run of LLaMA-Factory v1 would train something that is not Muon.

    Args:
        args: v1's TrainingArguments, of 0.9.5 (context parallel keys in `dist_config`) or newer (at the top level).

    Raises:
        ValueError: context parallelism without FSDP2, where it is not read, or with a size that is no number of ranks.
        RuntimeError: a `dist_config` in which this version has not been shown to step.
    """
    dist_config = args.dist_config or {}
    name = dist_config.get("name")
    sizes = [keys("cp_size", 1) or 1 for keys in (dist_config.get, functools.partial(_get, args))]
    for size in sizes:
        if not str(size).isdigit():
            raise ValueError(f"cp_size: {size} is no number of ranks")
    if (ignored := {"cp_size", "cp_mode"} & dist_config.keys()) and hasattr(args, "cp_size"):
        raise ValueError(
            f"{' and '.join(sorted(ignored))} in dist_config: this LLaMA-Factory reads cp_size and cp_mode from the "
            "top level only. Move them there"
        )
    ranks = max(map(int, sizes))
    if ranks > 1 and name != "fsdp2":
        raise _partial_gradients(ranks)
    if name not in (None, "fsdp2"):
        raise RuntimeError(
            f"optim_config: muon does not run under dist_config: {name} in this version of hf_muon. Leave dist_config "
            "out for one process or DDP, or write dist_config: {name: fsdp2}. DeepSpeed works in v0: "
            "llamafactory-cli train without USE_V1, with optim: muon"
        )


def refuse_factors(peft_config: Any, optim_config: Mapping[str, Any]) -> None:
    """Raise if a run trains LoRA factors alone and does not say that Muon shall step them, before its model is loaded.

    Raises:
        ValueError: what LLaMA-Factory trains, and both ways out.
    """
    if (
        isinstance(peft_config, Mapping)
        and peft_config.get("name") == "lora"
        and not peft_config.get("modules_to_save")
        and not any(optim_config.get(name) for name in ("lora", "muon_patterns"))
    ):
        raise ValueError(
            "optim_config: muon has nothing to step in this run, which trains LoRA factors alone (peft_config: lora), "
            "and AdamW steps those unless you say otherwise. Leave peft_config out to train the matrices themselves, "
            "or write lora: muon into optim_config to orthogonalize each factor, which in hf_muon's own study took "
            "more time than AdamW and showed no difference in the loss"
        )


def _get(args: Any, name: str, default: Any) -> Any:
    return getattr(args, name, default)


def _partial_gradients(ranks: int) -> ValueError:
    return ValueError(
        f"cp_size: {ranks} needs dist_config: {{name: fsdp2}}. Without it nothing sums the gradients of the {ranks} "
        "parts of a sequence: every rank would train a model of its own on its part, with a loss that looks normal. "
        "Write name: fsdp2 in dist_config, or remove cp_size"
    )


def refuse_partial_gradients(model: nn.Module) -> None:
    """Raise where plain parameters on several ranks have nobody who reduces their gradients, whatever the arguments.

    Raises:
        ValueError: context parallelism without FSDP2.
        RuntimeError: a model that is neither wrapped in DDP nor sharded.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from hf_muon.diagnostics.log import has_process_group
    from hf_muon.storage.tensors import is_dtensor

    if not (has_process_group() and dist.get_world_size() > 1):
        return
    if any(is_dtensor(param) for param in model.parameters()):
        return
    interface = sys.modules.get(INTERFACE)
    if interface is not None:
        ranks = interface.DistributedInterface().get_world_size(interface.Dim.CP)
        if ranks > 1:
            raise _partial_gradients(ranks)
    if not isinstance(model, DistributedDataParallel):
        raise RuntimeError(
            f"{dist.get_world_size()} processes train a {type(model).__name__} that is neither wrapped in DDP nor "
            "sharded: nothing would reduce its gradients, and each would train a model of its own. Leave dist_config "
            "out for DDP, or write dist_config: {name: fsdp2}"
        )
