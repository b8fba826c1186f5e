"""The cost of one optimizer step on some ranks: work, memory and communication.

The code of the step itself assigns matrices to ranks, run on parameters without memory in a fake process group
(`stand_ins`). The rest is arithmetic on shapes (`costs`, `memory`, `activations`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_muon.config import MuonConfig
from hf_muon.math.precision import NS_DTYPES
from hf_muon.plan import costs, stand_ins
from hf_muon.plan.activations import model_flops
from hf_muon.plan.memory import Memory, Training, model_memory
from hf_muon.routing.route import Route, route_parameters

LAYOUTS = {
    "single": "one process",
    "ddp": "copies of the model on all ranks (DDP, ZeRO-0)",
    "fsdp": "FSDP2: each parameter cut along its first dim",
    "hsdp": "FSDP2 within a replica, several replicas",
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
        muon_weights, adamw_weights: number of trained weights by route.
        state_bytes: optimizer state, bytes.
        sent_bytes: updates, directions and state by row sent to other ranks, bytes.
        flops: multiplications and additions of Newton-Schulz.
        model_flops_per_token: products with weights, forward and backward, without those of attention scores.
        memory: on the device.
        adamw_memory: the same if torch's fused AdamW stepped all weights.
    """

    layout: str
    ranks: int
    muon_weights: int
    adamw_weights: int
    state_bytes: list[int]
    sent_bytes: list[int]
    flops: list[int]
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
        busiest = max(self.flops)
        return busiest / (busiest + self.model_flops_per_token * tokens / self.ranks) if busiest else 0.0


def plan_step(
    model: nn.Module,
    config: MuonConfig,
    layout: str,
    ranks: int,
    *,
    replicas: int = 2,
    dtype: torch.dtype = torch.float32,
    ns_dtype: torch.dtype = torch.float16,
    training: Training = Training(),  # noqa: B008 (frozen)
    routes: Sequence[Route] | None = None,
) -> Plan:
    """Plan a step of a model. Its weights need not be loaded.

    Args:
        model: on any device, the meta device included. It is not changed.
        config: the options of the run.
        layout: one of `LAYOUTS`.
        ranks: number of ranks.
        replicas: copies of the model under `hsdp`.
        dtype: the dtype of the stored weights, fp32 with bf16 mixed precision. ZeRO's own are in `compute_dtype`.
        ns_dtype: the meaning of `ns_dtype: auto` on the hardware of the ranks.
        training: how the run computes, for its memory.
        routes: the routes of the model's parameters, if they are known.

    Raises:
        ValueError: the layout is unknown, or `ranks` or `replicas` do not fit it.
        RuntimeError: this process is in a process group already, or the layout cannot have these options.
    """
    _check(layout, ranks, replicas)
    routes = route_parameters(model, config) if routes is None else routes
    products = NS_DTYPES[config.ns_dtype] or ns_dtype
    is_zero = layout.startswith("zero")
    shards = {"fsdp": ranks, "hsdp": ranks // replicas}.get(layout, 1)
    with stand_ins.fake_ranks(ranks):
        stored = torch.float32 if is_zero else dtype
        groups, made = stand_ins.stored_groups(routes, config, layout, replicas, stored)
        cost = costs.step_cost(groups, made, ranks, config, products)
        buffers = costs.step_buffers(groups, made, cost, config, products)
        state = costs.state_bytes(groups, made, ranks, shards)
    flats = [param.numel() for group in groups for param in group["params"]] if is_zero else []
    cut = ranks if layout == "zero3" else shards
    of_model = model_memory(model, layout, ranks, cut, sum(flats), dtype, training)
    fp32_gradients = 4 * max(flats, default=0)  # DeepSpeed makes those of one partition at a time
    weights = {side: sum(math.prod(r.shape) for r in routes if r.use_muon is side) for side in (True, False)}
    return Plan(
        layout=layout,
        ranks=ranks,
        muon_weights=weights[True],
        adamw_weights=weights[False],
        state_bytes=state.total,
        sent_bytes=cost.sent_bytes,
        flops=cost.flops,
        model_flops_per_token=model_flops(model),
        memory=replace(of_model, state=state.total, step=buffers + fp32_gradients),
        adamw_memory=replace(of_model, state=state.adamw, step=fp32_gradients),
    )


def _check(layout: str, ranks: int, replicas: int) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout} is not valid. Valid: {', '.join(LAYOUTS)} [invalid-value]")
    if ranks < 1:
        raise ValueError(f"{ranks} ranks are not valid: expected at least 1 [invalid-value]")
    if layout == "single" and ranks > 1:
        raise ValueError(
            f"layout single is one process, not {ranks} ranks. Valid layouts: {', '.join(LAYOUTS)} [ranks-of-single]"
        )
    if layout == "hsdp" and (replicas < 1 or ranks % replicas):
        raise ValueError(
            f"{replicas} replicas do not divide {ranks} ranks: each replica has as many ranks as the others "
            "[replicas-misfit]"
        )
