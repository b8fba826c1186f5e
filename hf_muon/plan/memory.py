"""Memory on the device of a rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hf_muon.plan.activations import estimate_activations
from hf_muon.plan.costs import local_shapes

# Elements that ZeRO-3 keeps gathered at most, DeepSpeed's stage3_max_live_parameters.
_LIVE = 10**9


@dataclass(frozen=True)
class Training:
    """The settings of a run on which its memory depends.

    Attributes:
        batch_size: sequences in a micro-batch on a rank.
        sequence_length: tokens in each of them.
        gradient_checkpointing: whether layers are recomputed in the backward pass.
        compute_dtype: the dtype of the forward and backward pass; with fp32 weights it is autocast's.
        frozen_dtype: the dtype of weights that are not trained.
    """

    batch_size: int = 1
    sequence_length: int = 2048
    gradient_checkpointing: bool = False
    compute_dtype: torch.dtype = torch.bfloat16
    frozen_dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Memory:
    """Bytes on each rank. Lists have an entry for each rank; numbers are the maximum over ranks.

    Attributes:
        weights: on the device, frozen ones and the fp32 weights of ZeRO included.
        gradients: on the device, from the backward pass to the step.
        state: the optimizer's state.
        copies: second copies of weights and gradients: those that FSDP2 and ZeRO-3 gather, and DDP's buckets.
        activations: estimated peak of the forward and backward pass, with autocast's copies of weights; None for a
            model without an estimate, whose peaks do not include it.
        step: bound on the temporary tensors of the optimizer step.
    """

    weights: list[int]
    gradients: list[int]
    state: list[int]
    copies: int
    activations: int | None
    step: int

    @property
    def resident(self) -> list[int]:
        """Weights, gradients and state on each rank's device."""
        return [sum(bytes_of_rank) for bytes_of_rank in zip(self.weights, self.gradients, self.state, strict=True)]

    @property
    def in_backward(self) -> int:
        """Peak bytes on a device in the forward and backward pass, with gradients of earlier micro-batches."""
        return max(self.resident) + self.copies + (self.activations or 0)

    @property
    def at_step(self) -> int:
        """Peak bytes on a device in the optimizer step."""
        return max(self.resident) + self.step

    @property
    def peak(self) -> int:
        """Peak bytes on a device."""
        return max(self.in_backward, self.at_step)


def model_memory(
    model: nn.Module, layout: str, ranks: int, shards: int, masters: int, dtype: torch.dtype, training: Training
) -> Memory:
    """Return the memory of weights, gradients and activations; state and the step's buffers are zero.

    Args:
        model: on any device.
        layout: one of `step_plan.LAYOUTS`.
        ranks: number of ranks.
        shards: ranks among which FSDP2 or ZeRO-3 cut the weights; 1 where each rank has all.
        masters: number of elements of ZeRO's flat fp32 partitions on a rank; 0 outside of ZeRO.
        dtype: the dtype of the trained weights; under ZeRO those of the model are in `compute_dtype`.
        training: how the run computes.
    """
    compute = training.compute_dtype
    stored = compute if layout.startswith("zero") else dtype
    params = list(model.parameters())
    trained, frozen = ([param for param in params if param.requires_grad is side] for side in (True, False))

    def of_ranks(some: Iterable[nn.Parameter], itemsize: int) -> list[int]:
        return [numel * itemsize for numel in _stored(some, ranks, shards, rows=layout != "zero3")]

    gradients = of_ranks(trained, stored.itemsize)
    if layout in ("zero2", "zero3"):
        gradients = [masters * compute.itemsize] * ranks
    autocast = layout in ("single", "ddp") and dtype.itemsize > compute.itemsize and not frozen
    estimate = estimate_activations(
        model,
        training.batch_size * training.sequence_length,
        compute,
        autocast=autocast,
        checkpointing=training.gradient_checkpointing,
    )
    copies = 0
    if layout in ("fsdp", "hsdp"):
        copies = _gathered(model, compute.itemsize)
    elif layout == "zero3":
        copies = min(_LIVE, sum(param.numel() for param in params)) * compute.itemsize
    copies += max(gradients) if layout == "ddp" else 0
    weights = zip(of_ranks(trained, stored.itemsize), of_ranks(frozen, training.frozen_dtype.itemsize), strict=True)
    return Memory(
        weights=[of_trained + of_frozen + 4 * masters for of_trained, of_frozen in weights],
        gradients=gradients,
        state=[0] * ranks,
        copies=copies,
        activations=None if estimate is None else estimate.peak,
        step=0,
    )


def _stored(params: Iterable[nn.Parameter], ranks: int, shards: int, *, rows: bool) -> list[int]:
    """Return how many elements of parameters each rank stores, sharded along their first dim or anywhere."""
    total = [0] * ranks
    for shape, count in Counter(tuple(param.shape) for param in params).items():
        if not rows:
            total = [numel + count * -(-math.prod(shape) // shards) for numel in total]
            continue
        for rank, local in enumerate(local_shapes(shape, ranks, shards)):
            total[rank] += count * math.prod(local)
    return total


def _gathered(model: nn.Module, itemsize: int) -> int:
    """Return the bytes of unsharded weights and gradients that FSDP2 has at once, with each layer wrapped.

    Those of the root (embeddings, the head) remain from the forward pass to the end of the backward pass. Two layers
    are gathered at a time, and one of them has its unsharded gradients.
    """
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in names]
    of_layers = [list(layer.parameters()) for layer in layers]
    inside = {id(param) for params in of_layers for param in params}
    root = [param for param in model.parameters() if id(param) not in inside]

    def nbytes(params: Iterable[nn.Parameter]) -> int:
        """Return the bytes of two copies of the gathered weights plus the gradients of the trainable ones."""
        return sum(param.numel() * itemsize * (2 if param.requires_grad else 1) for param in params)

    largest = max(of_layers, key=nbytes, default=[])
    return nbytes(root) + nbytes(largest) + sum(param.numel() * itemsize for param in largest)
