"""Where parameters lie in fp32 partitions: in a checkpoint before it is loaded, and in memory afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.integrations.deepspeed.partitions import is_swapped
from hf_muon.routing.parameters import unwrapped

ORDERING = {"round_robin_gradients": False, "parameter_alignment": None, "sub_group_size": 1_000_000_000}
"""Options of zero_optimization that say where parameters lie in partitions, with DeepSpeed's defaults."""


def moved(engine: Any, weights: Mapping[str, Any]) -> list[str]:
    """Return the parameters that lie elsewhere in the partitions of a checkpoint than in this run's.

    A partition is cut from parameters in the order of `param_shapes`, which follows `round_robin_gradients`.
    DeepSpeed's `param_slice_mappings` do not.

    Args:
        engine: DeepSpeed's.
        weights: the content of the checkpoint's file of weights.
    """
    here, there = _positions(engine._get_zero_param_shapes()), _positions(weights.get("param_shapes"))
    if here.keys() != there.keys():
        return []  # another model; the check of the optimizer's state says more
    return [name for name, position in here.items() if there[name] != position]


def _positions(groups: Sequence[Iterable[str]] | None) -> dict[str, tuple[int, int]]:
    """Return for each parameter its group or sub-group, and its position there."""
    return {
        unwrapped(name): (i, position) for i, names in enumerate(groups or ()) for position, name in enumerate(names)
    }


def options_to_set(config: Mapping[str, Any], saved: Mapping[str, Any] | None) -> str:
    """Say which options of a DeepSpeed config to set, so that parameters lie where they do in a checkpoint."""
    here, there = ((one or {}).get("zero_optimization") or {} for one in (config, saved))
    options = [
        f"zero_optimization.{name} to {json.dumps(there.get(name, default))}, as it was"
        for name, default in ORDERING.items()
        if there.get(name, default) != here.get(name, default)
    ]
    return f"Set {' and '.join(options)}" if options else ""


def differing_masters(engine: Any) -> Iterator[str]:
    """Name the parameters that differ from their fp32 master weights on this rank, of Muon's groups and AdamW's.

    Rounding a master weight gives the parameter, so that both agree bit by bit after a load. Partitions on NVMe are
    skipped.
    """
    names = {param: name for name, param in engine.module.named_parameters()}
    for param, weight, master in _pairs(engine.optimizer):
        if not torch.equal(master.detach().to(weight), weight):
            yield names.get(param, f"a parameter of shape {tuple(param.shape)}")


def _pairs(zero: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each parameter, the elements of it that this rank steps, and their master weights."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        yield from _pairs_of_stage_3(zero)
    elif hasattr(zero, "single_partition_of_fp32_groups"):
        yield from _pairs_of_flat_groups(
            zero, zero.bit16_groups, zero.bit16_groups_flat, zero.single_partition_of_fp32_groups
        )
    elif hasattr(zero, "fp32_groups_flat_partition"):
        yield from _pairs_of_flat_groups(zero, zero.bf16_groups, zero.bf16_groups_flat, zero.fp32_groups_flat_partition)
    elif hasattr(zero, "fp32_groups"):
        for params, masters in zip(zero.fp16_groups, zero.fp32_groups, strict=True):
            yield from ((param, param.detach(), master) for param, master in zip(params, masters, strict=True))


def _pairs_of_flat_groups(
    zero: Any, groups: Any, wholes: Any, partitions: Any
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the pairs of groups that are one flat tensor each, cut into equal partitions."""
    for i, (params, whole, flat) in enumerate(zip(groups, wholes, partitions, strict=True)):
        begin = dist.get_rank(zero.real_dp_process_group[i]) * flat.numel()
        for param in params:
            offset = (param.data_ptr() - whole.data_ptr()) // whole.element_size() - begin
            first, last = max(-offset, 0), min(flat.numel() - offset, param.numel())
            if first < last:
                yield param, param.detach().reshape(-1)[first:last], flat[offset + first : offset + last]


def _pairs_of_stage_3(zero: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the pairs of ZeRO-3, whose partitions hold a rank's parts of a sub-group end to end, each with padding."""
    for i, (params, flat) in enumerate(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)):
        if is_swapped(zero, i):
            continue
        start = 0
        for param in params:
            size = param.partition_numel()
            rank = dist.get_rank(getattr(param, "ds_process_group", zero.dp_process_group))
            count = min(max(param.ds_numel - rank * size, 0), size)
            yield param, param.ds_tensor.detach().reshape(-1)[:count], flat[start : start + count]
            start += size
