"""The memory of a rank's device and of its host, and what a step moves between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hf_muon.plan.activations import Activations, autocast_copies, estimate_activations
from hf_muon.plan.parallelism import Cuts

OFFLOADS = {
    "none": "nothing",
    "optimizer": "DeepSpeed's offload_optimizer: state and fp32 weights on the host",
    "params": "FSDP2's CPUOffloadPolicy, DeepSpeed's offload_param: weights, gradients and state on the host",
}
# Elements that ZeRO-3 keeps gathered at most, DeepSpeed's stage3_max_live_parameters.
_LIVE = 10**9


@dataclass(frozen=True)
class Training:
    """How a run computes, as far as memory depends on it.

    Attributes:
        batch_size: sequences in a micro-batch on a rank.
        sequence_length: tokens in each of them.
        gradient_checkpointing: whether layers are recomputed in the backward pass.
        compute_dtype: of the forward and backward pass; with fp32 weights it is autocast's.
        frozen_dtype: of weights that are not trained.
        offload: what a framework keeps on the host, one of `OFFLOADS`.
    """

    batch_size: int = 1
    sequence_length: int = 2048
    gradient_checkpointing: bool = False
    compute_dtype: torch.dtype = torch.bfloat16
    frozen_dtype: torch.dtype = torch.bfloat16
    offload: str = "none"


@dataclass(frozen=True)
class Memory:
    """Bytes on each rank. Lists have a number for each rank; numbers are the same on all, or the largest.

    Attributes:
        weights: on the device, frozen ones and the fp32 weights of ZeRO included.
        gradients: on the device, from the backward pass to the step.
        state: of the optimizer, on the device.
        copies: weights and gradients that the layout has a second time: what FSDP2 and ZeRO-3 gather, DDP's buckets.
        activations: estimate of the most that the forward and backward pass need at once, autocast's copies of weights
            included.
        step: bound on the temporary tensors of the optimizer step; in one process they are counted.
        host: weights, gradients and state on the host.
        to_device, to_host: bytes over the bus in a step with one micro-batch.
        unknown: why activations are not estimated, and count as zero; empty if they are.
    """

    weights: list[int]
    gradients: list[int]
    state: list[int]
    copies: int
    activations: int
    step: int
    host: list[int]
    to_device: list[int]
    to_host: list[int]
    unknown: str = ""

    @property
    def resident(self) -> list[int]:
        """Weights, gradients and state on each rank's device."""
        return [sum(own) for own in zip(self.weights, self.gradients, self.state, strict=True)]

    @property
    def in_backward(self) -> int:
        """The most bytes on a device in the forward and backward pass, with gradients of earlier micro-batches."""
        return max(self.resident) + self.copies + self.activations

    @property
    def at_step(self) -> int:
        """The most bytes on a device in the optimizer step."""
        return max(self.resident) + self.step

    @property
    def peak(self) -> int:
        """The most bytes on a device."""
        return max(self.in_backward, self.at_step)

    def fits(self, nbytes: float) -> bool:
        """Return whether a device with this many bytes is large enough."""
        return self.peak <= nbytes


def offload_complaint(layout: str, offload: str) -> str | None:
    """Say why a layout has no such offload; None where it has."""
    if offload not in OFFLOADS:
        return f"offload={offload!r} is not valid. Valid: {', '.join(OFFLOADS)}"
    layouts = {
        "none": (layout,),
        "optimizer": ("zero1", "zero2", "zero3"),
        "params": ("fsdp", "hsdp", "zero3"),
    }[offload]
    if layout not in layouts:
        return f"offload={offload} needs layout {', '.join(layouts)}, and layout={layout}"
    return None


def model_memory(
    model: nn.Module,
    layout: str,
    ranks: int,
    shards: int,
    masters: int,
    dtype: torch.dtype,
    training: Training,
    cuts: Cuts | None = None,
) -> Memory:
    """Return the memory of weights, gradients and activations; state and the step's buffers are zero.

    Args:
        model: on any device.
        layout: one of `step_plan.LAYOUTS`.
        ranks: number of ranks.
        shards: ranks among which FSDP2 or ZeRO-3 cut the weights; 1 where each rank has all.
        masters: number of elements of ZeRO's flat fp32 partitions on a rank; 0 outside of ZeRO.
        dtype: of the trained weights; under ZeRO those of the model are in `compute_dtype`.
        training: how the run computes.
        cuts: of tensor and expert parallelism, which then say what each rank stores, and not `shards`.
    """
    zero = layout.startswith("zero")
    compute = training.compute_dtype
    stored = compute if zero else dtype
    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    frozen = [param for param in params if not param.requires_grad]

    def of_ranks(some: Iterable[nn.Parameter], itemsize: int) -> list[int]:
        if cuts is not None:
            return [numel * itemsize for numel in cuts.stored(some)]
        numels = shares([param.shape for param in some], ranks, shards, rows=layout != "zero3")
        return [numel * itemsize for numel in numels]

    def gathered(param: Tensor) -> int:
        """Return the elements of a parameter with which a rank computes."""
        return param.numel() if cuts is None else cuts.gathered(param)

    weights = _sum(of_ranks(trained, stored.itemsize), of_ranks(frozen, training.frozen_dtype.itemsize))
    gradients = of_ranks(trained, stored.itemsize)
    if cuts is not None:
        gradients = [numel * stored.itemsize for numel in cuts.gradients(trained)]
    if layout in ("zero2", "zero3"):
        gradients = [masters * compute.itemsize] * ranks
    autocast = layout in ("single", "ddp", "tp") and dtype.itemsize > compute.itemsize and not frozen
    estimate = (
        estimate_activations(
            model,
            training.batch_size * training.sequence_length,
            compute,
            autocast=autocast,
            checkpointing=training.gradient_checkpointing,
        )
        if cuts is None
        else "activations are not estimated under tensor or expert parallelism"
    )
    if autocast:
        copies = 0 if isinstance(estimate, Activations) else autocast_copies(model, compute, gathered)
    elif layout in ("fsdp", "hsdp"):
        copies = _gathered(model, compute.itemsize, gathered)
    else:
        copies = min(_LIVE, sum(p.numel() for p in params)) * compute.itemsize if layout == "zero3" else 0
    copies += max(gradients) if layout == "ddp" else 0
    none = [0] * ranks
    on_device = Memory(
        weights=_sum(weights, [4 * masters] * ranks),
        gradients=gradients,
        state=none,
        copies=copies,
        activations=estimate.peak if isinstance(estimate, Activations) else 0,
        step=0,
        host=none,
        to_device=none,
        to_host=none,
        unknown="" if isinstance(estimate, Activations) else estimate,
    )
    if training.offload == "params":
        # Each micro-batch brings the weights in twice, forward and backward, and sends the gradients out.
        return replace(
            on_device,
            weights=none,
            gradients=none,
            host=_sum(on_device.weights, gradients),
            to_device=_sum(weights, weights),
            to_host=gradients,
        )
    if training.offload == "optimizer":
        # fp32 gradients lie beside the fp32 weights; the device gets back what the model computes with.
        own = [masters * compute.itemsize] * ranks
        return replace(on_device, weights=weights, host=[8 * masters] * ranks, to_device=own, to_host=own)
    return on_device


def with_state(
    memory: Memory, state: Sequence[int], step: int, training: Training, *, travels: Sequence[tuple[int, int]] = ()
) -> Memory:
    """Return the memory with an optimizer's state.

    Args:
        memory: of the model.
        state: bytes of optimizer state on each rank.
        step: bytes of temporary tensors of the step.
        training: how the run computes.
        travels: bytes of updates to the device and of directions back, for each rank, where state is on the host.
    """
    if training.offload == "none":
        return replace(memory, state=list(state), step=step)
    to_device, to_host = zip(*travels, strict=True) if travels else ([0] * len(state), [0] * len(state))
    return replace(
        memory,
        step=step,
        host=_sum(memory.host, state),
        to_device=_sum(memory.to_device, to_device),
        to_host=_sum(memory.to_host, to_host),
    )


def with_moments_on_host(
    memory: Memory, moments: Sequence[int], to_device: Sequence[int], to_host: Sequence[int]
) -> Memory:
    """Return the memory where moments are stored on the host and brought to the device in turns, which `step` counts.

    Args:
        memory: with the state on the device.
        moments: bytes of these moments on each rank.
        to_device, to_host: bytes over the bus in a step.
    """
    return replace(
        memory,
        state=[state - own for state, own in zip(memory.state, moments, strict=True)],
        host=_sum(memory.host, moments),
        to_device=_sum(memory.to_device, to_device),
        to_host=_sum(memory.to_host, to_host),
    )


def _sum(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]


def shares(shapes: Iterable[Sequence[int]], ranks: int, shards: int, *, rows: bool = True) -> list[int]:
    """Return how many elements of some tensors each rank stores.

    Args:
        shapes: of the tensors.
        ranks: number of ranks.
        shards: ranks that store a tensor together; 1 where each has all of it. The next ranks have copies.
        rows: whether a tensor is cut along its first dim, as by FSDP2, or anywhere, as by ZeRO-3.
    """
    total = torch.zeros(shards, dtype=torch.int64)
    for shape in shapes:
        numel = math.prod(shape)
        if shards == 1 or not rows:
            total += -(-numel // shards)
            continue
        length, rest = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        each = -(-length // shards)
        total += (length - each * torch.arange(shards)).clamp(0, each) * rest
    return [int(total[rank % shards]) for rank in range(ranks)]


def _gathered(model: nn.Module, itemsize: int, numel_of: Callable[[Tensor], int]) -> int:
    """Return the bytes of the whole weights and gradients that FSDP2 has at once, with each layer wrapped.

    The root's (embeddings, the head) stay from the forward to the end of the backward pass, and so do their gradients.
    Of the layers, two are gathered, and one has its whole gradients.

    Args:
        model: on any device.
        itemsize: bytes of an element in the forward and backward pass.
        numel_of: returns the elements of a parameter that FSDP2 gathers.
    """
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in names]
    of_layers = [list(layer.parameters()) for layer in layers]
    inside = {id(param) for params in of_layers for param in params}
    root = [param for param in model.parameters() if id(param) not in inside]

    def nbytes(params: Iterable[nn.Parameter]) -> int:
        """Return the bytes of weights twice, and of the gradients of those that are trained, on top of one of them."""
        return sum(numel_of(param) * itemsize * (2 if param.requires_grad else 1) for param in params)

    largest = max(of_layers, key=nbytes, default=[])
    return nbytes(root) + nbytes(largest) + sum(numel_of(param) * itemsize for param in largest)
