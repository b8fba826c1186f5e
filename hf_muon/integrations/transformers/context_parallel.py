"""Trainer's context parallel (`ParallelismConfig(cp_size)`): which runs have right gradients under it.

Ranks share each sequence. Trainer divides each rank's sum of losses by the tokens of the whole batch, and FSDP2 adds
the gradients up, so that they are those of one process. What depends on more than a rank's own tokens is refused: a
loss that is a mean, or that shifts labels itself, and a mask other than the causal one, which accelerate drops.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from hf_muon._autoload import Change
from hf_muon.integrations.names import is_muon


def patch_trainer(module: ModuleType) -> Iterator[Change]:
    """Patch `Trainer.training_step` to refuse what has wrong gradients under context parallel, for Muon."""
    trainer = module.Trainer
    compute_loss, training_step = trainer.compute_loss, trainer.training_step

    @functools.wraps(compute_loss)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self)["_hf_muon_own_loss"] = False
        return compute_loss(self, *args, **kwargs)

    @functools.wraps(training_step)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not shares_sequences(self):
            return training_step(self, *args, **kwargs)
        refuse_loss(self)
        refuse_batch(kwargs["inputs"] if "inputs" in kwargs else args[1])
        vars(self)["_hf_muon_own_loss"] = not has_known_loss(type(self))
        loss = training_step(self, *args, **kwargs)
        if vars(self)["_hf_muon_own_loss"]:
            raise RuntimeError(
                f"{type(self).__name__}.compute_loss does not call Trainer.compute_loss, so that under context "
                "parallel nobody knows whether its gradients are right. Call it, or train without cp_size"
            )
        return loss

    yield trainer, "compute_loss", noted
    yield trainer, "training_step", checked


def shares_sequences(trainer: Any) -> bool:
    """Return whether a Trainer trains with Muon under context parallel."""
    if not is_muon(trainer.args.optim):
        return False
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return (getattr(config, "cp_size", None) or 1) > 1


def has_known_loss(trainer: type) -> bool:
    """Return whether a trainer computes its own loss in a way that was compared with one process.

    TRL's SFTTrainer (1.16) does: it sums the losses of `shift_labels`, and divides by all tokens.
    """
    owner = next((kind for kind in trainer.__mro__ if "compute_loss" in vars(kind)), trainer)
    return (owner.__module__, owner.__name__) == ("trl.trainer.sft_trainer", "SFTTrainer")


def refuse_loss(trainer: Any) -> None:
    """Raise for a loss that is not a sum over a rank's own tokens, divided by the tokens of the whole batch.

    Raises:
        RuntimeError: the argument or the model, and what to do instead.
    """
    complaint = None
    if trainer.compute_loss_func is not None:
        complaint = "compute_loss_func is called with a part of each sequence, whose labels are not shifted"
    elif getattr(trainer, "label_smoother", None) is not None:
        complaint = "label_smoothing_factor shifts labels within a part of each sequence"
    elif not trainer.model_accepts_loss_kwargs:
        complaint = (
            f"{type(trainer.model).__name__} takes no num_items_in_batch, and the mean over each rank's tokens is not "
            "the mean over all tokens"
        )
    if complaint:
        raise RuntimeError(f"optim: muon refuses this run under context parallel: {complaint}. Train without cp_size")


def refuse_batch(inputs: Mapping[str, Any]) -> None:
    """Raise for a batch that causal attention to all earlier tokens is wrong for.

    Args:
        inputs: a batch of whole sequences, (batch, length); reads one number from the device for each tensor.

    Raises:
        RuntimeError: padding in front of or between tokens, or several texts in one sequence.
    """
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise RuntimeError(
            "optim: muon refuses this batch under context parallel: attention_mask has padding in front of tokens, and "
            'accelerate drops the mask, so that tokens attend to the padding. Pad at the end (padding_side="right")'
        )
    if isinstance(positions, torch.Tensor) and bool((positions.diff(dim=-1) < 0).any()):
        raise RuntimeError(
            "optim: muon refuses this batch under context parallel: position_ids start again within a sequence, and "
            "the texts in it would attend to one another. Do not pack texts, or train without cp_size"
        )
