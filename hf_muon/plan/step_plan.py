"""The cost of one optimizer step on some ranks: work, memory and communication.

The plan comes from the code that the step itself uses, run on stand-ins for the weights in a fake process group
(`stand_ins`); the numbers come from its executors and from the shapes that ranks store (`costs`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_muon.config import COMM_DTYPES, MuonConfig
from hf_muon.math.coefficients import resolve
from hf_muon.math.precision import NS_DTYPES
from hf_muon.plan import buffers, costs, stand_ins
from hf_muon.plan.memory import (
    Memory,
    Training,
    model_memory,
    offload_complaint,
    with_moments_on_host,
    with_state,
)
from hf_muon.plan.parallelism import sizes_of
from hf_muon.routing.route import Route, route_parameters

LAYOUTS = {
    "single": "one process",
    "ddp": "copies of the model on all ranks (DDP, ZeRO-0)",
    "fsdp": "FSDP2: each parameter cut along its first dim",
    "hsdp": "FSDP2 within a replica, several replicas",
    "tp": "tensor parallel: each parameter cut as the model's tp_plan says",
    "zero1": "DeepSpeed ZeRO-1: flat partitions",
    "zero2": "DeepSpeed ZeRO-2: flat partitions",
    "zero3": "DeepSpeed ZeRO-3: each parameter cut into flat slices",
}


@dataclass(frozen=True)
class Plan:
    """The cost of a step. Lists have a number for each rank.

    Attributes:
        layout: one of `LAYOUTS`.
        ranks: number of ranks.
        tp_size: ranks that cut a matrix by tensor parallelism; 1 without it.
        ep_size: ranks among which expert parallelism distributes experts; 1 without it.
        muon_weights, adamw_weights: number of trained weights by route.
        state_bytes: optimizer state, bytes.
        adamw_state_bytes: optimizer state if torch's AdamW had all weights, bytes.
        sent_bytes: updates and directions sent to other ranks, bytes.
        flops: multiplications and additions of Newton-Schulz.
        working_bytes: bound on the temporary memory of updates and directions on a rank, bytes.
        model_flops_per_token: of the model's products with weights, forward and backward; attention scores not counted.
        memory: on the device and on the host.
        adamw_memory: the same if torch's AdamW, with its fused kernel, had all weights.
    """

    layout: str
    ranks: int
    tp_size: int
    ep_size: int
    muon_weights: int
    adamw_weights: int
    state_bytes: list[int]
    adamw_state_bytes: list[int]
    sent_bytes: list[int]
    flops: list[int]
    working_bytes: int
    model_flops_per_token: int
    memory: Memory
    adamw_memory: Memory

    @property
    def balance(self) -> float:
        """Newton-Schulz FLOPs of the busiest rank over the mean; 1 if no rank waits."""
        return max(self.flops) * self.ranks / (sum(self.flops) or 1)

    def share(self, tokens: int) -> float:
        """Return the fraction of a training step's FLOPs that Newton-Schulz takes on the busiest rank.

        Args:
            tokens: per step, of all ranks and all accumulated batches together.
        """
        own = max(self.flops)
        return own / (own + self.model_flops_per_token * tokens / self.ranks) if own else 0.0


def plan_step(
    model: nn.Module,
    config: MuonConfig,
    layout: str,
    ranks: int,
    *,
    replicas: int = 2,
    tp_size: int | None = None,
    ep_size: int = 1,
    dtype: torch.dtype = torch.float32,
    ns_dtype: torch.dtype = torch.float16,
    training: Training = Training(),  # noqa: B008 (frozen)
) -> Plan:
    """Plan a step of a model, whose weights need not be loaded.

    Args:
        model: on any device, the meta device included. It is not changed.
        config: the options of the run.
        layout: one of `LAYOUTS`.
        ranks: number of ranks.
        replicas: copies of the model under `hsdp`.
        tp_size: ranks that cut a matrix, under `fsdp` and `hsdp`; under `tp` it is all of them.
        ep_size: ranks among which experts are distributed, under `tp`, `fsdp` and `hsdp`.
        dtype: of the stored weights; with bf16 mixed precision they are fp32. ZeRO's own are in `compute_dtype`.
        ns_dtype: that `ns_dtype: auto` means on the hardware of the ranks.
        training: how the run computes, for its memory.

    Raises:
        ValueError: the layout is unknown, or `ranks`, `replicas`, `training.offload` or the sizes do not fit it.
        RuntimeError: this process is in a process group already, or the model has no plan for tensor or expert
            parallelism.
    """
    _check(config, layout, ranks, replicas, training)
    sizes = sizes_of(layout, ranks, replicas, tp_size, ep_size)
    routes = route_parameters(model, config)
    products = NS_DTYPES[config.ns_dtype] or ns_dtype
    cuts = stand_ins.cuts_on(model, sizes)
    with stand_ins.fake_ranks(ranks):
        groups, partitions, replicate_group = stand_ins.stored_groups(routes, config, layout, replicas, dtype, cuts)
        step = stand_ins.step_layout(groups, partitions, replicate_group, config, buffers.ACCELERATOR)
        steps = len(resolve(config.ns_coefficients, config.ns_steps))
        cost = costs.step_cost(step, groups, ranks, steps, products, config, cuts)
        state = costs.state_bytes(step, groups, ranks, cuts)
    shards = {"fsdp": ranks, "hsdp": ranks // replicas, "zero3": ranks}.get(layout, 1)
    flats = [param.numel() for group in groups for param in group["params"]] if partitions is not None else []
    of_model = model_memory(model, layout, ranks, shards, sum(flats), dtype, training, cuts)
    if cuts is not None:  # the fewest ranks that store a matrix together
        shards = min((math.prod(r.shape) // max(cuts.stored([r.parameter])) for r in routes if r.use_muon), default=1)
    in_flight = cost.in_flight_bytes
    # DeepSpeed makes fp32 gradients of one partition at a time.
    fp32_gradients = 4 * max(flats, default=0) if training.offload == "none" else 0
    matrices = state.matrices
    unit = _step_buffers(routes, config, torch.float32 if flats else dtype, products)
    temporary, in_turn = unit.temporary, unit.numel
    if ranks > 1:
        in_turn = min(max(matrices), max(cost.turn, unit.numel // shards))
        # Updates as they arrive lie beside the batch. The pieces of a bucket need as much per element as units.
        temporary = max(unit.temporary, unit.temporary * in_turn // max(1, unit.numel))
        temporary += in_flight + cost.unit_bytes
        if dtype.itemsize < 4:  # copies of small pieces
            temporary += 8 * min(in_turn, buffers.CHUNK)
    of_adamw = unit.of_adamw
    if config.momentum_offload == "cpu":  # two turns
        temporary += min(2 * unit.moments * in_turn // max(1, unit.numel), max(state.large[True]))
        of_adamw += unit.of_chunks
    memory = with_state(
        of_model,
        state.own,
        max(temporary, of_adamw) + fp32_gradients,
        training,
        travels=_travels(matrices, config, products),
    )
    if config.momentum_offload == "cpu":
        there = back = state.large[True]
        memory = with_moments_on_host(
            memory,
            [sum(own) for own in zip(*state.large.values(), strict=True)],
            *([a + b for a, b in zip(way, state.large[False], strict=True)] for way in (there, back)),
        )
    weights = {side: sum(math.prod(r.shape) for r in routes if r.use_muon is side) for side in (True, False)}
    return Plan(
        layout=layout,
        ranks=ranks,
        tp_size=sizes.tp if sizes else 1,
        ep_size=ep_size,
        muon_weights=weights[True],
        adamw_weights=weights[False],
        state_bytes=state.own,
        adamw_state_bytes=state.adamw,
        sent_bytes=cost.sent_bytes,
        flops=cost.flops,
        working_bytes=in_flight + cost.unit_bytes,
        model_flops_per_token=costs.model_flops(model),
        memory=memory,
        adamw_memory=with_state(of_model, state.adamw, fp32_gradients, training),
    )


def _check(config: MuonConfig, layout: str, ranks: int, replicas: int, training: Training) -> None:
    if layout not in LAYOUTS:
        near = difflib.get_close_matches(layout, LAYOUTS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"layout={layout!r} is not valid.{hint} Valid: {', '.join(LAYOUTS)}")
    if ranks < 1:
        raise ValueError(f"ranks={ranks} is not valid: expected an integer of at least 1")
    if layout == "single" and ranks > 1:
        raise ValueError(f"layout=single is one process, and ranks={ranks}. Valid layouts: {', '.join(LAYOUTS)}")
    if layout == "hsdp" and (replicas < 1 or ranks % replicas):
        raise ValueError(
            f"replicas={replicas} do not divide ranks={ranks}: each replica has as many ranks as the others"
        )
    if complaint := offload_complaint(layout, training.offload):
        raise ValueError(complaint)


def _step_buffers(
    routes: Sequence[Route], config: MuonConfig, dtype: torch.dtype, ns_dtype: torch.dtype
) -> buffers.StepBuffers:
    """Return the temporary tensors of one process's step."""
    groups, partitions, replicate_group = stand_ins.stored_groups(routes, config, "single", 1, dtype)
    layout = stand_ins.step_layout(groups, partitions, replicate_group, config, buffers.ACCELERATOR)
    name = next(name for name, own in NS_DTYPES.items() if own == ns_dtype)
    return buffers.step_buffers(layout, groups, config, name)


def _travels(matrices: Sequence[int], config: MuonConfig, ns_dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return the bytes of updates to the device and of directions back, where the state of a rank is on the host."""
    there = (COMM_DTYPES[config.comm_dtype] or torch.float32).itemsize
    return [(numel * there, numel * min(there, ns_dtype.itemsize)) for numel in matrices]
