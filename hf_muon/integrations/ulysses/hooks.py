"""Patches for sequence parallelism: Trainer's loss and skipping of batches, and accelerate's adapter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hf_muon._autoload import Change
from hf_muon.integrations.ulysses import gradients
from hf_muon.integrations.ulysses.batches import ShardedLoader, completed
from hf_muon.integrations.ulysses.refusals import model_complaints, refuse_groups_of_gloo


def check_before_prepare(accelerator: Any, models: list[Any]) -> None:
    """Check the models before DeepSpeed wraps them.

    Raises:
        RuntimeError: what does not work with sequence parallelism.
    """
    size = size_of(accelerator)
    if size == 1:
        return
    refuse_groups_of_gloo(accelerator.device, accelerator.num_processes, size)
    complaints = [c for model in models for c in model_complaints(model.config, implementation_of(accelerator))]
    if complaints:
        raise RuntimeError("Muon does not run with sequence parallel here:\n  - " + "\n  - ".join(complaints))


def implementation_of(accelerator: Any) -> str:
    """Return the implementation of attention that DeepSpeed wraps."""
    return str(accelerator.parallelism_config.sp_handler.sp_attn_implementation)


def size_of(accelerator: Any) -> int:
    """Return the number of ranks that share a sequence."""
    return int(getattr(accelerator.parallelism_config, "sp_size", None) or 1)


def patch_adapter(module: ModuleType) -> Iterator[Change]:
    """Patch `Accelerator.deepspeed_ulysses_dl_adapter` to give complete batches that can be skipped, for Muon."""
    if not hasattr(module.ParallelismConfig, "sp_size"):
        return  # an accelerate without sequence parallel
    adapter = module.Accelerator.deepspeed_ulysses_dl_adapter

    @functools.wraps(adapter)
    def adapted(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(("dl", "model"), args, strict=False)) | kwargs
        if not hasattr(call.get("model"), gradients.GATHERED):  # no Muon, or ranks do not share sequences
            return adapter(self, *args, **kwargs)

        def adapt(loader: Any, skip: int) -> Any:
            return adapter(self, completed(loader, self.device, implementation_of(self), skip), call["model"])

        return ShardedLoader(call["dl"], adapt, size_of(self))

    yield module.Accelerator, "deepspeed_ulysses_dl_adapter", adapted


def patch_trainer(module: ModuleType) -> Iterator[Change]:
    """Patch Trainer to record gathered losses, and to skip batches of loaders of parts of sequences."""
    trainer = module.Trainer
    skip_first_batches = module.skip_first_batches

    @functools.wraps(skip_first_batches)
    def skip(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dataloader, ShardedLoader):
            return dataloader.skipping(*args, *kwargs.values())  # only the number of batches
        return skip_first_batches(dataloader, *args, **kwargs)

    skip.__module__ = module.__name__  # where pickle looks for it
    yield trainer, "compute_loss", gradients.noting(trainer.compute_loss)
    yield module, "skip_first_batches", skip
