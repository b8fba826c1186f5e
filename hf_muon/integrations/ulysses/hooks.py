"""What is patched for sequence parallelism: Trainer's skipping, accelerate's adapter, sdpa attention."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from hf_muon.integrations.names import is_ours, mark
from hf_muon.integrations.ulysses import gradients
from hf_muon.integrations.ulysses.batches import CompletedBatches, ShardedLoader
from hf_muon.integrations.ulysses.refusals import model_complaints, refuse_groups_of_gloo


@contextlib.contextmanager
def preparing(accelerator: Any, models: list[Any]) -> Iterator[None]:
    """Check the models before DeepSpeed wraps them, and have sdpa keep packed texts apart.

    sdpa stays so until the process ends, which changes nothing but rows that hold several texts and have no mask.

    Raises:
        RuntimeError: what does not work with sequence parallelism.
    """
    size = size_of(accelerator)
    if size == 1:
        yield
        return
    refuse_groups_of_gloo(accelerator.device, accelerator.num_processes, size)
    implementation = accelerator.parallelism_config.sp_handler.sp_attn_implementation
    complaints = [c for model in models for c in model_complaints(model.config, size, implementation)]
    if complaints:
        raise RuntimeError("Muon does not run with sequence parallel here:\n  - " + "\n  - ".join(complaints))
    if implementation != "sdpa":
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from hf_muon.integrations.ulysses.packed_texts import TextByText

    texts = TextByText()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = texts.inside(ALL_ATTENTION_FUNCTIONS["sdpa"])
    yield  # where DeepSpeed wraps it
    ALL_ATTENTION_FUNCTIONS["sdpa"] = texts.outside(ALL_ATTENTION_FUNCTIONS["sdpa"])


def size_of(accelerator: Any) -> int:
    """Return the ranks that share a sequence."""
    return int(getattr(accelerator.parallelism_config, "sp_size", None) or 1)


def patch_adapter(accelerator: Any) -> Callable[[], None] | None:
    """Patch `Accelerator.deepspeed_ulysses_dl_adapter` to give complete batches that can be skipped, for Muon."""
    adapter = getattr(accelerator, "deepspeed_ulysses_dl_adapter", None)
    if adapter is None or is_ours(adapter):
        return None

    @functools.wraps(adapter)
    def adapted(self: Any, dl: Any, model: Any) -> Any:
        if not hasattr(model, gradients.GATHERED):  # an engine without Muon, or whose ranks do not share sequences
            return adapter(self, dl, model)

        def adapt(loader: Any, skip: int) -> Any:
            return adapter(self, CompletedBatches(loader, self.device, skip), model)

        return ShardedLoader(dl, adapt, size_of(self))

    accelerator.deepspeed_ulysses_dl_adapter = mark(adapted)

    def undo() -> None:
        accelerator.deepspeed_ulysses_dl_adapter = adapter

    return undo


def patch_trainer(module: ModuleType) -> Callable[[], None] | None:
    """Patch Trainer's loss to be noted, and its skipping to know loaders of parts of sequences."""
    undo_loss = gradients.patch_trainer(module)
    if undo_loss is None:
        return None
    skip_first_batches = getattr(module, "skip_first_batches", None)
    if skip_first_batches is None:
        return undo_loss

    def skip(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, ShardedLoader):
            return dataloader.skipping(num_batches)
        return skip_first_batches(dataloader, num_batches)

    vars(module)["skip_first_batches"] = skip

    def undo() -> None:
        undo_loss()
        vars(module)["skip_first_batches"] = skip_first_batches

    return undo
