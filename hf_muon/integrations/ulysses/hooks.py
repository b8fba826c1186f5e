"""What is patched for sequence parallelism: Trainer's loss and its skipping, accelerate's adapter, sdpa attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_muon._autoload import Change
from hf_muon.integrations.names import is_ours, mark
from hf_muon.integrations.ulysses.batches import CompletedBatches, ShardedLoader
from hf_muon.integrations.ulysses.gradients import factor_of
from hf_muon.integrations.ulysses.layout import is_concerned, is_corrected, size_of
from hf_muon.integrations.ulysses.refusals import model_complaints

if TYPE_CHECKING:
    from torch import Tensor


def before_prepare(accelerator: Any, models: list[Any]) -> None:
    """Check the models, and patch sdpa attention to separate packed texts, before DeepSpeed patches attention.

    The patch stays until the process ends: it does nothing but for rows that hold several texts and no mask.

    Raises:
        RuntimeError: what does not work with sequence parallelism.
    """
    size = size_of(accelerator.parallelism_config)
    if size == 1:
        return
    implementation = accelerator.parallelism_config.sp_handler.sp_attn_implementation
    complaints = [c for model in models for c in model_complaints(model.config, size, implementation)]
    if complaints:
        raise RuntimeError("Muon does not run with sequence parallel here:\n  - " + "\n  - ".join(complaints))
    if implementation == "sdpa":
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        if not is_ours(attend):
            ALL_ATTENTION_FUNCTIONS["sdpa"] = within_texts(attend)


def within_texts(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention that masks other texts of a packed row, in which `position_ids` restart with each text.

    DeepSpeed drops the mask that would do so; flash attention reads the positions itself, sdpa does not.
    """

    @functools.wraps(attend)
    def attend_within_texts(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        positions = kwargs.get("position_ids")
        if attention_mask is None and positions is not None and positions.shape[-1] == query.shape[2]:
            starts = positions[:, 1:] != positions[:, :-1] + 1
            if starts.any():
                import torch

                text = torch.nn.functional.pad(starts.cumsum(1), (1, 0))
                same = text[:, None, :, None] == text[:, None, None, :]
                attention_mask = same.tril()  # (batch, 1, length, length)
        return attend(module, query, key, value, attention_mask, *args, **kwargs)

    return mark(attend_within_texts)


def patch_adapter(module: ModuleType) -> Iterator[Change]:
    """Patch `Accelerator.deepspeed_ulysses_dl_adapter` to give complete batches that can be skipped, for Muon."""
    if not hasattr(module.ParallelismConfig, "sp_size"):
        return  # an accelerate without sequence parallel
    adapter = module.Accelerator.deepspeed_ulysses_dl_adapter

    @functools.wraps(adapter)
    def adapted(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(("dl", "model"), args, strict=False)) | kwargs
        if not is_corrected(call.get("model")) or size_of(self.parallelism_config) == 1:
            return adapter(self, *args, **kwargs)

        def adapt(loader: Any, skip: int) -> Any:
            return adapter(self, CompletedBatches(loader, self.device, skip), call["model"])

        return ShardedLoader(call["dl"], adapt, size_of(self.parallelism_config))

    yield module.Accelerator, "deepspeed_ulysses_dl_adapter", adapted


def patch_trainer(module: ModuleType) -> Iterator[Change]:
    """Patch `Trainer.compute_loss` to divide gradients by the measured factor, and Trainer's skipping, for Muon."""
    trainer = module.Trainer
    compute_loss, training_step = trainer.compute_loss, trainer.training_step
    skip_first_batches = module.skip_first_batches

    @functools.wraps(compute_loss)
    def corrected(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_concerned(self) or not self.model.training:
            return compute_loss(self, *args, **kwargs)
        if self.compute_loss_func is not None:
            raise RuntimeError("compute_loss_func is ignored under sequence parallel. Override compute_loss")
        notes = vars(self)
        if "_hf_muon_factor" not in notes:
            notes["_hf_muon_factor"] = factor_of(self, compute_loss)
        factor = notes["_hf_muon_factor"]
        result = compute_loss(self, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if factor != 1 and loss.requires_grad:
            loss.register_hook(lambda grad: grad / factor)
        notes["_hf_muon_reached"] = True
        return result

    @functools.wraps(training_step)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_concerned(self):
            return training_step(self, *args, **kwargs)
        vars(self)["_hf_muon_reached"] = False
        loss = training_step(self, *args, **kwargs)
        if not vars(self)["_hf_muon_reached"]:
            raise RuntimeError(
                f"{type(self).__name__}.compute_loss does not call Trainer.compute_loss, so that under sequence "
                "parallel nobody knows whether its gradients are right. Call it, or train without sequence parallel"
            )
        return loss

    @functools.wraps(skip_first_batches)
    def skip(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dataloader, ShardedLoader):
            return dataloader.skipping(*args, *kwargs.values())  # the number of batches alone
        return skip_first_batches(dataloader, *args, **kwargs)

    yield trainer, "compute_loss", corrected
    yield trainer, "training_step", checked
    yield module, "skip_first_batches", skip
