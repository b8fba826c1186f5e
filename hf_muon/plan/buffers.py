"""The temporary memory of an optimizer step: what the step's own code has alive at most, on meta tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_muon.config import GROUP_OPTIONS, MuonConfig
from hf_muon.distributed.local import LocalExecutor
from hf_muon.distributed.units import Unit
from hf_muon.math.adamw import Stepped, adamw_
from hf_muon.math.moments import moment_bytes, with_scales
from hf_muon.math.rounding import chunk_size
from hf_muon.optimizer import rule_state
from hf_muon.optimizer.layout import GroupWork, StepLayout
from hf_muon.optimizer.state import STATE_KEYS, dtype_of, zero_state
from hf_muon.optimizer.step import MuonStep
from hf_muon.plan.live_bytes import LiveBytes

ACCELERATOR = torch.device("meta")
"""On which a plan has the products, so that units are those of accelerators."""
CHUNK = chunk_size(torch.empty(0, device=ACCELERATOR))
"""Elements that a step rounds at once on an accelerator."""


@dataclass(frozen=True)
class StepBuffers:
    """The temporary tensors of a step of one process.

    Attributes:
        temporary: the most bytes while Muon steps units together.
        numel: elements of the most that it steps together.
        of_adamw: the most bytes while AdamW steps a group, or a chunk of a parameter.
        moments: bytes of the moments of the most that moves together.
        of_chunks: bytes of the moments of two chunks of AdamW's, or of all if they are less.
    """

    temporary: int
    numel: int
    of_adamw: int
    moments: int
    of_chunks: int


def step_buffers(
    layout: StepLayout, groups: Sequence[Mapping[str, Any]], config: MuonConfig, ns_dtype: str
) -> StepBuffers:
    """Return the temporary tensors of a step on an accelerator that stores all matrices whole.

    Which matrices form a unit does not depend on the layout, so other layouts have the same units.

    Args:
        layout: of the groups in one process.
        groups: param groups, as `stand_ins.stored_groups` makes them.
        config: the options of the run.
        ns_dtype: of the products, as the option has it.
    """
    temporary = numel = 0
    for group, work in zip(groups, layout.works, strict=True):
        options = {name: config.value_of(name) for name in GROUP_OPTIONS} | {**group, "ns_dtype": ns_dtype}
        for executor in work.executors:
            assert isinstance(executor, LocalExecutor)
            buckets = executor.buckets(frozenset(executor.stored))
            kinds = {tuple(_kind(unit, work, group) for unit in bucket.units): bucket.units for bucket in buckets}
            for units in kinds.values():
                only = LocalExecutor(units, executor.stored, ACCELERATOR, config.max_batch_bytes)
                temporary = max(temporary, _peak_of_units(options, work, only, config.max_batch_bytes))
                numel = max(numel, sum(unit.numel for unit in units))
    of_adamw = _peak_of_adamw(groups, config)
    return StepBuffers(temporary, numel, of_adamw, *_largest_moments(layout, groups))


def _kind(unit: Unit, work: GroupWork, group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the buffers of a unit depend on."""
    params = (group["params"][work.matrices[one.matrix].param] for one in unit.ranges)
    return (
        unit.shape,
        tuple((one.stop - one.start, p.shape) for one, p in zip(unit.ranges, params, strict=True)),
    )


def _peak_of_units(group: Mapping[str, Any], work: GroupWork, executor: LocalExecutor, max_batch_bytes: int) -> int:
    indices = sorted({work.matrices[one.matrix].param for unit in executor.units for one in unit.ranges})
    params = [torch.empty(p.shape, dtype=p.dtype, device=ACCELERATOR) for p in group["params"]]
    state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    for i in indices:
        params[i].grad = torch.empty_like(params[i])
        state[params[i]] = _zeros(params[i], group)
    own = {**group, "params": params}
    rule_state.complete_(own, state)
    live = LiveBytes()
    with live:
        of_units = replace(work, executors=[executor])
        MuonStep(own, of_units, indices, state, 1, max_batch_bytes).take()
    return live.peak


def _largest_moments(layout: StepLayout, groups: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the bytes of the moments of the largest bucket, and of two chunks of AdamW's."""
    of_bucket = of_chunks = 0
    for group, work in zip(groups, layout.works, strict=True):
        keys = [key for key in STATE_KEYS[bool(group["use_muon"])] if key != "step"]

        def nbytes(param: Tensor, numel: int, group: Mapping[str, Any] = group, keys: Sequence[str] = keys) -> int:
            whole = sum(moment_bytes(param, key, dtype_of(group), param.shape) for key in keys)
            return whole * numel // max(1, param.numel())

        for executor in work.executors:
            assert isinstance(executor, LocalExecutor)
            for bucket in executor.buckets(frozenset(executor.stored)):
                members = [(group["params"][work.matrices[u.ranges[0].matrix].param], u) for u in bucket.units]
                of_bucket = max(of_bucket, sum(nbytes(param, unit.numel) for param, unit in members))
        if not group["use_muon"]:
            total = sum(param.numel() for param in group["params"])
            moments = sum(nbytes(param, param.numel()) for param in group["params"])
            of_chunks = max(of_chunks, moments * min(2 * CHUNK, total) // max(1, total))
    return of_bucket, of_chunks


def _peak_of_adamw(groups: Sequence[Mapping[str, Any]], config: MuonConfig) -> int:
    """Return the most bytes of temporary tensors of AdamW's step on an accelerator.

    torch's fused kernel, which steps weights and moments in fp32, needs none. Other moments are computed in the memory
    where they are, but for copies of small tensors, and of rows whose blocks of 8-bit codes are not full.
    """
    return max((_peak_of_group(group["params"], group, config) for group in groups if not group["use_muon"]), default=0)


def _peak_of_group(params: Sequence[Tensor], group: Mapping[str, Any], config: MuonConfig) -> int:
    stepped = []
    for param in params:
        own = torch.empty(param.shape, dtype=param.dtype, device=ACCELERATOR)
        stepped.append(Stepped(own, torch.empty_like(own), _zeros(own, group)))
    live = LiveBytes()
    with live:
        adamw_(
            stepped,
            lr=config.value_of("lr"),
            betas=config.adamw_betas,
            eps=config.adamw_eps,
            weight_decay=config.weight_decay,
            step=1,
            rounding=config.weight_rounding,
        )
    return live.peak


def _zeros(param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    keys = with_scales(STATE_KEYS[bool(group["use_muon"])], dtype_of(group), param.shape)
    return {key: zero_state(param, key, group) for key in keys}
