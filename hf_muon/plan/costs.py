"""What a step costs each rank: FLOPs, communication and optimizer state, without computing the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_muon.config import MuonConfig
from hf_muon.distributed.executor import Executor, StepCost
from hf_muon.distributed.local import LocalExecutor
from hf_muon.math import cost
from hf_muon.math.moments import moment_bytes
from hf_muon.optimizer.layout import GroupWork, StepLayout
from hf_muon.optimizer.rule_state import reduced_shape
from hf_muon.optimizer.state import STATE_KEYS, dtype_of
from hf_muon.plan.parallelism import Cuts
from hf_muon.routing.model_facts import expert_counts, text_config_of
from hf_muon.rules import registry
from hf_muon.storage.host import SMALLEST
from hf_muon.storage.regions import Region

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hf_muon.distributed.units import Unit

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")


def step_cost(
    layout: StepLayout,
    groups: Sequence[Mapping[str, Any]],
    ranks: int,
    ns_steps: int,
    ns_dtype: torch.dtype,
    config: MuonConfig,
    cuts: Cuts | None = None,
) -> StepCost:
    """Return what the executors of all param groups cost together, on each rank.

    Args:
        layout: of the param groups.
        groups: these.
        ranks: number of ranks.
        ns_steps: Newton-Schulz steps.
        ns_dtype: of the products.
        config: the options of the run.
        cuts: of tensor and expert parallelism, under which groups of some of the ranks store parameters.
    """

    def newton_schulz(unit: Unit) -> int:
        rows = cost.block_rows(min(unit.shape), ns_dtype, "cuda")
        return unit.count * cost.flops(unit.shape, cost.segments(unit.shape, ns_steps, ns_dtype), rows)

    flops, sent = [0] * ranks, [0] * ranks
    in_flight = largest = turn = 0
    of_groups = list(zip(groups, layout.works, strict=True))
    for group, work, executor in [(group, own, executor) for group, own in of_groups for executor in own.executors]:
        own = executor.cost(newton_schulz, ns_dtype)
        # Without a group every rank does all of it. Other groups of the same axes do the same as this rank's.
        places = _places(getattr(executor, "group", None), ranks, cuts)
        of_rules = _sent_by_rules(group, work, executor, len(own.sent_bytes))
        flops = [total + own.flops[place] for total, place in zip(flops, places, strict=True)]
        sent = [total + own.sent_bytes[k] + of_rules[k] for total, k in zip(sent, places, strict=True)]
        in_flight = max(in_flight, own.in_flight_bytes)  # executors step one after the other
        largest, turn = max(largest, own.unit_bytes), max(turn, own.turn)
    return StepCost(flops, sent, in_flight, largest, turn)


def _places(group: ProcessGroup | None, ranks: int, cuts: Cuts | None) -> list[int]:
    """Return each rank's place in the group over which it stores what this rank stores over `group`."""
    if group is None:
        return [0] * ranks
    from torch.distributed import get_process_group_ranks

    members = get_process_group_ranks(group)
    return list(range(ranks)) if cuts is None else cuts.places(members)


class StateBytes(NamedTuple):
    """Bytes of optimizer state on each rank.

    Attributes:
        own: all of it.
        adamw: what it would be if torch's AdamW had all weights.
        large: by `use_muon`, the part that `momentum_offload` moves to the host: moments of large parameters.
        matrices: not bytes, but elements of Muon's parameters.
    """

    own: list[int]
    adamw: list[int]
    large: dict[bool, list[int]]
    matrices: list[int]


def state_bytes(
    layout: StepLayout, groups: Sequence[dict[str, Any]], ranks: int, cuts: Cuts | None = None
) -> StateBytes:
    """Return the bytes of optimizer state on each rank; for `cuts` see `step_cost`."""
    # Elements and bytes of moments on each rank, by the identity of the regions and the route.
    known: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
    own = torch.zeros(ranks, dtype=torch.int64)
    adamw = torch.zeros(ranks, dtype=torch.int64)
    matrices = torch.zeros(ranks, dtype=torch.int64)
    large = {side: torch.zeros(ranks, dtype=torch.int64) for side in (True, False)}
    for group, work in zip(groups, layout.works, strict=True):
        use_muon = bool(group["use_muon"])
        of_weights = 4 * sum(kind == "weight" for kind in registry.state_of(group).values())
        own += sum(_reduced_bytes(group, work, k) for k in range(len(work.matrices)))
        for param, storage in zip(group["params"], work.shared, strict=True):
            if storage is None or not storage.regions:  # whole, or a partition, which has one size on all ranks
                numel = torch.full((ranks,), param.numel())
                moments = torch.full((ranks,), _moment_bytes(group, param, param.shape))
            else:
                key = id(storage.regions), use_muon
                if key not in known:
                    shapes = [region.shape for region in storage.regions if isinstance(region, Region)]
                    nbytes = {shape: _moment_bytes(group, param, shape) for shape in set(shapes)}
                    places = _places(storage.group, ranks, cuts)
                    known[key] = (
                        torch.tensor([math.prod(shape) for shape in shapes])[places],
                        torch.tensor([nbytes[shape] for shape in shapes])[places],
                    )
                numel, moments = known[key]
            step = 4  # a number in fp32
            adamw += numel * 2 * param.dtype.itemsize + step
            own += moments + (0 if use_muon else step)
            own += numel * of_weights
            if use_muon:
                matrices += numel
            if param.numel() >= SMALLEST:
                large[use_muon] += moments
    large_bytes = {side: nbytes.tolist() for side, nbytes in large.items()}
    return StateBytes(own.tolist(), adamw.tolist(), large_bytes, matrices.tolist())


def _sent_by_rules(group: Mapping[str, Any], work: GroupWork, executor: Executor, ranks: int) -> list[int]:
    """Return the bytes of the small state of rules that each rank of an executor copies to all others in a step."""
    sent = [0] * ranks
    if registry.state_of(group) and not isinstance(executor, LocalExecutor):
        from hf_muon.distributed.exchange import Exchange

        assert isinstance(executor, Exchange)
        for unit, owner in executor.schedule.owned:
            for matrix, start, stop in unit.ranges:
                own = (stop - start) * _reduced_bytes(group, work, matrix, per_matrix=True)
                sent[owner] += (ranks - 1) * own
    return sent


def _reduced_bytes(group: Mapping[str, Any], work: GroupWork, matrix: int, *, per_matrix: bool = False) -> int:
    """Return the bytes of the small state that rules keep for a stack of matrices, or for each matrix of it."""
    one = work.matrices[matrix]
    shape = one.shape[-2:] if per_matrix else one.shape
    kinds = [kind for kind in registry.state_of(group).values() if kind != "weight"]
    return len(kinds) * 4 * math.prod(reduced_shape(shape, transposed=one.transposed))


def _moment_bytes(group: Mapping[str, Any], param: Tensor, shape: Sequence[int]) -> int:
    """Return the bytes of the moments of a parameter, or of a shard of it of this shape."""
    keys = [key for key in STATE_KEYS[bool(group["use_muon"])] if key != "step"]
    return sum(moment_bytes(param, key, dtype_of(group), shape) for key in keys)


def model_flops(model: nn.Module) -> int:
    """Return the FLOPs of a model's products with weights, for one token, forward and backward.

    Per weight: 2 forward, 2 for the input's gradient, and if it is trained 2 for its own gradient. Of experts, only
    those that a token is routed to count. An input embedding is looked up, not multiplied.
    """
    config = text_config_of(getattr(model, "config", None))
    experts = next(iter(expert_counts(config)), 0)
    routed = experts_per_token(model) or experts
    tied = bool(getattr(config, "tie_word_embeddings", False))
    looked_up = (
        {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} if not tied else set()
    )
    total = 0
    for name, param in model.named_parameters():
        if param.ndim < 2 or id(param) in looked_up:
            continue
        numel = param.numel()
        if experts and "experts." in name and "shared" not in name:
            numel = numel * routed // experts
        total += numel * (6 if param.requires_grad else 4)
    return total


def experts_per_token(model: nn.Module) -> int:
    """Return the number of experts that a token is routed to; 0 if the model's configuration does not say."""
    config = text_config_of(getattr(model, "config", None))
    return next((n for name in _EXPERTS_PER_TOKEN if isinstance(n := getattr(config, name, None), int)), 0)
