"""Read which slices of which parameters the partitions of a ZeRO optimizer hold, and verify that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics.log import first_few
from hf_muon.integrations.deepspeed.gradients import (
    mend_gradients,
    without_gradient,
    without_gradient_in_stage_2,
)
from hf_muon.optimizer.muon import Muon
from hf_muon.storage.partitions import Division, Partition, Slice

Reading = tuple[Tensor, dict[str, Any], Sequence[Tensor]]
"""A partition: the flat tensor, the arguments of `Partition`, and the values of its slices according to the parameters.

Valid until the next one.
"""

Names = Mapping[Tensor, str]


def read_partitions(engine: Any, device: torch.device) -> dict[Tensor, Partition] | None:
    """Return the partitions of an engine's optimizer, in the order in which ZeRO steps them; None without partitions.

    Compare every slice with the parameter itself, and have partitions hold the gradients of one step. Partitions that
    DeepSpeed swaps to NVMe get zero moments here, which DeepSpeed swaps together with them. All ranks must call this
    together.

    Args:
        engine: a DeepSpeed engine whose optimizer wraps a `Muon`.
        device: the device on which the engine computes.

    Raises:
        RuntimeError: the optimizer is not known or stores parameters in another way; raised on all ranks if a value
            differs.
    """
    from hf_muon.distributed.groups import root_group
    from hf_muon.distributed.ranks import Ranks

    wrapper = engine.optimizer
    reader = _reader(wrapper)
    if reader is None:
        return None
    names = {param: name for name, param in engine.module.named_parameters()}
    partitions: dict[Tensor, Partition] = {}
    complaints: list[str] = []
    try:
        for flat, arguments, truths in reader(wrapper, names):
            partitions[flat] = Partition(**arguments, device=device)
            complaints += _differences(flat, partitions[flat], truths)
        mend_gradients(wrapper)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise RuntimeError(_unknown(wrapper, f"{type(error).__name__}: {error}")) from error
    # A single rank must not raise: the others would wait for it in the next collective.
    root = root_group([partition.group for partition in partitions.values()])
    gathered = [line for lines in Ranks(root, engine.device).texts(complaints).values() for line in lines]
    if gathered:
        raise RuntimeError(_unknown(wrapper, first_few(dict.fromkeys(gathered), 5, "; ")))
    return partitions


def _differences(flat: Tensor, partition: Partition, truths: Sequence[Tensor]) -> Iterator[str]:
    """Yield the slices of a partition that differ from their parameters."""
    if flat.dtype != torch.float32:
        yield f"a partition has dtype {flat.dtype}: Muon needs fp32 master weights"
    for slice_, truth in zip(partition.slices, truths, strict=True):
        master = flat.detach()[slice_.elements(partition.rank)]
        # Rounding a master weight gives the parameter.
        if master.shape != truth.shape or not torch.equal(master.to(truth), truth):
            yield f"{slice_.name} does not lie where ZeRO's optimizer says"


def _reader(wrapper: Any) -> Callable[[Any, Names], Iterator[Reading]] | None:
    """Return the function that reads the layout of a DeepSpeed optimizer; None if parameters are whole.

    Raises:
        RuntimeError: the optimizer is not known. Subclasses are not, because they may store parameters in another way.
    """
    if isinstance(wrapper, Muon):
        return None
    path = f"{type(wrapper).__module__}.{type(wrapper).__name__}".removeprefix("deepspeed.runtime.")
    readers: dict[str, Callable[[Any, Names], Iterator[Reading]] | None] = {
        "fp16.unfused_optimizer.FP16_UnfusedOptimizer": None,
        "zero.stage_1_and_2.DeepSpeedZeroOptimizer": _read_stage_1_and_2,
        "bf16_optimizer.BF16_Optimizer": lambda zero, names: _contiguous(
            zero, names, zero.bf16_groups, zero.bf16_groups_flat, zero.fp32_groups_flat_partition
        ),
        "zero.stage3.DeepSpeedZeroOptimizer_Stage3": _read_stage_3,
    }
    if path not in readers:
        raise RuntimeError(
            f"Muon does not know how {type(wrapper).__name__} of {version()} stores parameters [unknown-zero-layout]"
        )
    return readers[path]


def _read_stage_1_and_2(zero: Any, names: Names) -> Iterator[Reading]:
    flats = zero.single_partition_of_fp32_groups
    for i, (flat, arguments, truths) in enumerate(
        _contiguous(zero, names, zero.bit16_groups, zero.bit16_groups_flat, flats)
    ):
        yield flat, {**arguments, "without_gradient": without_gradient_in_stage_2(zero, i)}, truths


def _contiguous(
    zero: Any, names: Names, groups: Sequence[Sequence[Tensor]], buffers: Sequence[Tensor], partitions: Sequence[Tensor]
) -> Iterator[Reading]:
    """Read param groups that are one flat tensor each, cut into equal partitions; parameters are views of it.

    The memory address of a parameter gives its position, whatever the group's order and padding.
    """
    import torch.distributed as dist

    for i, (params, buffer, flat) in enumerate(zip(groups, buffers, partitions, strict=True)):
        process_group = zero.real_dp_process_group[i]
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        slices: list[Slice] = []
        truths: list[Tensor] = []
        for param in params:
            offset = (param.data_ptr() - buffer.data_ptr()) // buffer.element_size()
            division = Division(param.numel(), flat.numel(), offset)
            first, last, _ = division.held(rank)
            slices.append(_slice_of(param, zero, names, division, ranks))
            truths.append(param.detach().reshape(-1)[first:last])
        yield flat, {"group": process_group, "rank": rank, "slices": slices}, truths


def _read_stage_3(zero: Any, names: Names) -> Iterator[Reading]:
    """Read parameters that are cut into equal parts; a partition holds a rank's parts of a sub-group, end to end."""
    import deepspeed
    import torch.distributed as dist

    group_of = [zero.sub_group_to_group_id[i] for i in range(len(zero.fp16_groups))]
    for i, (params, flat) in enumerate(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)):
        # One group for a sub-group's parameters; another number is a ValueError, and thereby [unknown-zero-layout].
        (process_group,) = {getattr(param, "ds_process_group", zero.dp_process_group) for param in params}
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        swapped = is_swapped(zero, i)
        if swapped:
            # Private, and what ZeRO's own step calls to have a sub-group's weights and moments in memory.
            zero._optimizer_states_and_gradient_swap_in(i)
        slices: list[Slice] = []
        truths: list[Tensor] = []
        ranges: list[tuple[Any, slice]] = []
        start = 0
        for param in params:
            size = param.partition_numel()
            ranges.append((zero.get_param_id(param), slice(start, start + size)))
            division = Division(param.ds_numel, size, start=start)
            first, last, _ = division.held(rank)
            # One at a time, and copied, because the whole parameter is freed at the end.
            with deepspeed.zero.GatheredParameters([param]):
                truths.append(param.detach().reshape(-1)[first:last].clone())
            slices.append(_slice_of(param, zero, names, division, ranks))
            start += size
        is_last = group_of[i] not in group_of[i + 1 :]
        arguments = {"group": process_group, "rank": rank, "slices": slices, "last": is_last}
        if zero.offload_optimizer:
            arguments["without_gradient"] = functools.partial(without_gradient, zero, ranges)
        yield flat, arguments, truths
        if swapped:
            # DeepSpeed restores from a checkpoint only the moments that exist now.
            param_group = zero.optimizer.param_groups[group_of[i]]
            params_of_group, param_group["params"] = param_group["params"], [flat]
            zero.optimizer.init_state()
            param_group["params"] = params_of_group
            zero._optimizer_states_and_gradient_swap_out(i)


def _slice_of(param: Any, zero: Any, names: Names, division: Division, ranks: int) -> Slice:
    """Return the slice of a parameter in the partitions.

    Raises:
        ValueError: the parameter is not known, or the ranks do not hold all of it.
    """
    shape = tuple(getattr(param, "ds_shape", param.shape))
    muon = zero.optimizer.partitioned
    if param not in names or param not in muon.views:
        raise ValueError(f"a parameter of shape {shape} is not in the model, or was not in the optimizer at the start")
    bounds = division.bounds(ranks)
    if (bounds[0][0], bounds[-1][1]) != (0, division.numel):
        raise ValueError(f"the ranks' partitions do not hold {names[param]} whole")
    return Slice(shape, division, ranks, muon.views[param], names[param], muon.factors[param])


def is_swapped(zero: Any, sub_group: int) -> bool:
    """Return whether DeepSpeed keeps a sub-group of ZeRO-3 on NVMe; small ones stay in memory."""
    return bool(zero.swap_optimizer and zero._swappable_optimizer_subgroup(sub_group))


def _unknown(wrapper: Any, reason: str) -> str:
    return (
        f"{version()} stores parameters or gradients in its {type(wrapper).__name__} in a way that this version of "
        f"hf_muon does not know, so that Muon does not step them: {reason} [unknown-zero-layout]"
    )


def version() -> str:
    """Return DeepSpeed's name and version."""
    import deepspeed

    return f"DeepSpeed {deepspeed.__version__}"
