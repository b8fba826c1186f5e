"""Correct the gradients that DeepSpeed passes to a Muon: the sum over the micro-batches of a step, not orthogonalized.

ZeRO does not always pass the gradient of the step. It runs its own Newton-Schulz for optimizers with "muon" in the
name of their class, keeps old gradients of tensors that a later step does not reach, and, with the optimizer offloaded,
loses those of some micro-batches. Each function here fixes one of these for a ZeRO optimizer.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.optimizer.muon import Muon
from hf_muon.versions import is_older


class OrthogonalizedMomentum(Muon):
    """The class that DeepSpeed sees in place of `Muon`.

    ZeRO-1 and 2 orthogonalize the gradients of parameters with an attribute `use_muon`, which DeepSpeed's documentation
    asks for, where "muon" is in the name of the optimizer's class. The attribute may be set at any time.
    """


def hide_name(optimizer: Muon) -> None:
    """Give an optimizer that DeepSpeed is about to wrap a class without "muon" in its name."""
    kind = type(optimizer)
    if "muon" in kind.__name__.lower():
        hidden = OrthogonalizedMomentum if kind is Muon else type(OrthogonalizedMomentum.__name__, (kind,), {})
        optimizer.__class__ = hidden


def mend_gradients(zero: Any) -> None:
    """Make the partitions of a ZeRO optimizer hold the gradient sum of all micro-batches of one step."""
    if type(zero).__name__ == "DeepSpeedZeroOptimizer_Stage3":
        # Fails here, where `read_partitions` refuses the engine by name, and not in a step, if DeepSpeed renames it.
        zero.grad_partitions_flat_buffer.zero_()
        complete = functools.partial(_complete_stage_3, zero) if zero.offload_optimizer else None
        # The first micro-batch overwrites this buffer, later ones add to it. Elements without a gradient would remain.
        _around_step(zero, complete, lambda: zero.grad_partitions_flat_buffer.zero_())
    elif type(zero).__name__ == "DeepSpeedZeroOptimizer" and zero.cpu_offload:
        reached: set[Any] = set()
        _accumulate_all(zero, reached)
        _around_step(
            zero, functools.partial(_complete_stage_2, zero, reached), functools.partial(_forget_stage_2, zero, reached)
        )


def _around_step(zero: Any, complete: Callable[[], Any] | None, forget: Callable[[], Any]) -> None:
    """Complete gradients before each step of a ZeRO optimizer; drop them after it, and when the user zeroes them.

    A step may be taken, skipped or refused. DeepSpeed itself calls `zero_grad` before the step has read the gradients:
    in the step, and before 0.18.9 at the end of each backward pass of ZeRO-1 and 2, too.
    """
    upstream_step, upstream_zero_grad = zero.step, zero.zero_grad
    upstream_epilogue = zero.independent_gradient_partition_epilogue
    internal = False

    def internally(upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal internal
        internal = True
        try:
            return upstream(*args, **kwargs)
        finally:
            internal = False

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if complete is not None:
            complete()
        try:
            return internally(upstream_step, *args, **kwargs)
        finally:
            forget()

    def epilogue(self: Any, *args: Any, **kwargs: Any) -> Any:
        return internally(upstream_epilogue, *args, **kwargs)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = upstream_zero_grad(*args, **kwargs)
        if not internal:
            forget()
            getattr(zero, "norm_for_param_grads", {}).clear()  # only with the optimizer offloaded
        return result

    zero.step = types.MethodType(step, zero)  # schedulers ask for the function of a bound method
    zero.independent_gradient_partition_epilogue = types.MethodType(epilogue, zero)
    zero.zero_grad = types.MethodType(zero_grad, zero)


# --- ZeRO-1 and 2 with the optimizer offloaded


def _accumulate_all(zero: Any, reached: set[Any]) -> None:
    """Accumulate the gradients of micro-batches in memory that is zeroed before each step.

    Args:
        zero: DeepSpeed's optimizer.
        reached: gets DeepSpeed's numbers of the parameters that have a gradient in this step.
    """
    import deepspeed

    upstream = zero.async_accumulate_grad_in_cpu_via_gpu
    is_before_0_19 = is_older(deepspeed.__version__, "0.19")

    def accumulate(param: Tensor) -> None:
        number = zero.get_param_id(param)
        # DeepSpeed overwrites this memory in micro-batch 0 and adds to it later. A parameter that a later one reaches
        # first would be added to the gradient of an earlier step.
        if number not in reached and zero.micro_step_id > 0 and number in zero.accumulated_grads_in_cpu:
            zero.accumulated_grads_in_cpu[number].zero_()
        reached.add(number)
        upstream(param)
        # DeepSpeed before 0.19 leaves the sum in the gradient, where it is lost.
        if is_before_0_19 and zero.micro_step_id > 0:
            total = zero.get_param_gradient_attribute(param)
            zero.accumulated_grads_in_cpu[number].copy_(total.view(-1), non_blocking=True)

    zero.async_accumulate_grad_in_cpu_via_gpu = accumulate


def _complete_stage_2(zero: Any, reached: set[Any]) -> None:
    """Copy gradients of earlier micro-batches to partitions that got none from the last micro-batch."""
    from deepspeed.accelerator import get_accelerator

    missing = [number for number in reached if number not in zero.norm_for_param_grads]
    if missing:
        get_accelerator().synchronize()  # with copies to the CPU, which DeepSpeed starts and does not wait for
    for number in missing:
        group, first, start, count = zero.grad_position[number]
        grad = zero.accumulated_grads_in_cpu[number].view(-1).narrow(0, int(first), int(count))
        zero.norm_for_param_grads[number] = grad.to(torch.float64).norm(2)
        zero.update_offload_overflow_tracker(grad)
        zero.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, int(start), int(count)).copy_(grad)
    # After 0.19.0, gradients of bf16 that are added up in fp32 are in a flat partition.
    flat = getattr(zero, "_use_compact_grad_partition_buffer", lambda group: False)
    for group, params in enumerate(zero.params_in_partition):
        for param in params if flat(group) else ():
            number = zero.get_param_id(param)
            if number in zero._offload_accumulated_param_ids and number not in zero.norm_for_param_grads:
                zero.copy_grads_in_partition(param, group)


def _forget_stage_2(zero: Any, reached: set[Any]) -> None:
    """Drop gradients. Those accumulated in fp32 would remain after a step that overflowed or was refused."""
    reached.clear()
    for group in zero.averaged_gradients:
        zero.averaged_gradients[group] = None


def without_gradient_in_stage_2(zero: Any, group: int) -> Callable[[], Sequence[slice]] | None:
    """Return a function that lists the elements of a partition without a gradient; None if those are zeros."""
    if not zero.cpu_offload:
        return None
    ranges = []
    for param in zero.params_in_partition[group]:
        number = zero.get_param_id(param)
        _, _, start, count = zero.grad_position[number]
        ranges.append((number, slice(int(start), int(start) + int(count))))
    return functools.partial(without_gradient, zero, ranges)


# --- ZeRO-3 with the optimizer offloaded


def _complete_stage_3(zero: Any) -> None:
    """Copy gradients of earlier micro-batches to ZeRO-3's partitions that got none from the last micro-batch."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()  # with copies to the CPU, which DeepSpeed starts and does not wait for
    start = 0
    written: dict[int, tuple[list[Tensor], list[int]]] = {}
    for params in zero.fp16_groups:
        for param in params:
            number, size = zero.get_param_id(param), int(param.partition_numel())
            grad = zero.grad_partitions_flat_buffer.narrow(0, start, size)
            start += size
            # `_around_step` zeroes the buffer: zeros are a parameter that no micro-batch of this step has reached.
            if number in zero.norm_for_param_grads or not bool(grad.any()):
                continue
            group, offset, _ = zero.grad_position[number]
            # DeepSpeed adds the norms of all parameters, and those of others may be on a device: a number fits all.
            zero.norm_for_param_grads[number] = float(grad.to(torch.float64).norm(2))
            flat = zero.fp32_partitioned_groups_flat[group]
            if zero._swappable_optimizer_subgroup(group):
                tensors, offsets = written.setdefault(group, ([], []))
                tensors.append(grad.to(flat.dtype))
                offsets.append(int(offset))
            else:
                flat.grad.narrow(0, int(offset), size).copy_(grad)
    for group, (tensors, offsets) in written.items():
        flat = zero.fp32_partitioned_groups_flat[group]
        zero.optimizer_swapper.swap_out_gradients(parameter=flat, gradient_offsets=offsets, gradient_tensors=tensors)


def without_gradient(zero: Any, ranges: Sequence[tuple[Any, slice]]) -> list[slice]:
    """Return the ranges that DeepSpeed did not write in this step; their memory is stale."""
    return [elements for number, elements in ranges if number not in zero.norm_for_param_grads]
