"""What a step will cost on some ranks. It is planned by the code that the step itself uses, over stand-ins for weights.

A stand-in has a parameter's shape and no memory, and the ranks exist in name only (torch's fake process group).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_muon.build import groups_of
from hf_muon.config import COMM_DTYPES, MuonConfig
from hf_muon.diagnostics.log import has_process_group
from hf_muon.distributed.exchange import Exchange
from hf_muon.distributed.local import LocalExecutor
from hf_muon.math import cost
from hf_muon.math.momentum import state_bytes
from hf_muon.math.precision import NS_DTYPES
from hf_muon.optimizer.layout import StepLayout
from hf_muon.routing.model_facts import expert_counts, text_config_of
from hf_muon.routing.route import Route, route_parameters
from hf_muon.storage import views
from hf_muon.storage.partitions import Partition, Slice, partition_bounds
from hf_muon.storage.regions import Region

if TYPE_CHECKING:
    from hf_muon.distributed.units import Unit

LAYOUTS = {
    "single": "one process",
    "ddp": "copies of the model on all ranks (DDP, ZeRO-0)",
    "fsdp": "FSDP2: each parameter cut along its first dim",
    "hsdp": "FSDP2 within a replica, several replicas",
    "zero1": "DeepSpeed ZeRO-1: flat partitions",
    "zero2": "DeepSpeed ZeRO-2: flat partitions",
    "zero3": "DeepSpeed ZeRO-3: each parameter cut into flat parts",
}
_SUB_GROUP = 10**9  # DeepSpeed's sub_group_size
_ALIGNMENT = 2  # elements; DeepSpeed pads a group to it on every rank


@dataclass(frozen=True)
class Plan:
    """What a step costs. Lists hold a number for each rank.

    Attributes:
        layout: one of `LAYOUTS`.
        ranks: number of ranks.
        muon_weights, adamw_weights: trained weights by route.
        state_bytes: optimizer state, bytes.
        adamw_state_bytes: what AdamW alone would hold, bytes.
        sent_bytes: updates and directions sent to other ranks in a step, bytes.
        flops: Newton-Schulz, multiplications and additions in a step.
        working_bytes: bound on what updates and directions take besides during a step, bytes.
        model_flops_per_token: of the model's own products, forward and backward, without attention's scores.
    """

    layout: str
    ranks: int
    muon_weights: int
    adamw_weights: int
    state_bytes: list[int]
    adamw_state_bytes: list[int]
    sent_bytes: list[int]
    flops: list[int]
    working_bytes: int
    model_flops_per_token: int

    @property
    def balance(self) -> float:
        """Newton-Schulz of the busiest rank over the mean; one where nobody waits."""
        return max(self.flops) * self.ranks / (sum(self.flops) or 1)

    def share(self, tokens: int) -> float:
        """The part of a step that Newton-Schulz takes, by FLOPs of the busiest rank.

        Args:
            tokens: in a step of all ranks together, accumulation included.
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
    dtype: torch.dtype = torch.float32,
    ns_dtype: torch.dtype = torch.bfloat16,
) -> Plan:
    """Plan a step of a model that need not have its weights.

    Args:
        model: on any device, the meta device included. It is not changed.
        config: the options of the run.
        layout: one of `LAYOUTS`.
        ranks: number of ranks.
        replicas: copies of the model under `hsdp`.
        dtype: of weights while they are trained; fp32 also under bf16 mixed precision.
        ns_dtype: what `ns_dtype: auto` means on the ranks' hardware.

    Raises:
        ValueError: a layout that is not known, or numbers that do not go with it.
        RuntimeError: this process is a rank of a process group itself.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not valid. Valid: {', '.join(LAYOUTS)}")
    if ranks < 1:
        raise ValueError(f"ranks={ranks} is not valid: expected an integer of at least 1")
    if layout == "single" and ranks > 1:
        raise ValueError(f"layout=single is one process, and ranks={ranks}. Valid layouts: {', '.join(LAYOUTS)}")
    if layout == "hsdp" and (replicas < 1 or ranks % replicas):
        raise ValueError(
            f"replicas={replicas} do not divide ranks={ranks}: each replica has as many ranks as the others"
        )
    routes = route_parameters(model, config)
    with _pretended(ranks):
        groups, partitions, replicate_group = _stored(routes, config, layout, replicas, dtype)
        found = StepLayout(groups, replicate_group, config.max_bucket_bytes, COMM_DTYPES[config.comm_dtype], partitions)
        if found.complaints:
            raise RuntimeError("\n".join(found.complaints))
        flops, sent, largest, travelling = _work(found, ranks, config, NS_DTYPES[config.ns_dtype] or ns_dtype)
        state, adamw = _state(found, groups, ranks)
    weights = {side: sum(math.prod(r.shape) for r in routes if r.use_muon is side) for side in (True, False)}
    return Plan(
        layout=layout,
        ranks=ranks,
        muon_weights=weights[True],
        adamw_weights=weights[False],
        state_bytes=state,
        adamw_state_bytes=adamw,
        sent_bytes=sent,
        flops=flops,
        working_bytes=min(config.max_bucket_bytes, travelling) + largest,
        model_flops_per_token=_model_flops(model),
    )


@contextlib.contextmanager
def _pretended(ranks: int) -> Iterator[None]:
    """Be rank 0 of a process group that sends nothing."""
    import torch.distributed as dist

    if ranks == 1:
        yield
        return
    if not dist.is_available():
        raise RuntimeError("a plan for several ranks needs a torch with torch.distributed, and this one has none")
    if dist.is_initialized():
        raise RuntimeError("a plan pretends to be on other ranks: make it in a process that is in no process group")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- stand-ins


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of any shape that takes the memory of one number."""
    return torch.zeros((), dtype=dtype).expand(tuple(shape))


def _stored(
    routes: Sequence[Route], config: MuonConfig, layout: str, replicas: int, dtype: torch.dtype
) -> tuple[list[dict[str, Any]], dict[Tensor, Partition] | None, Any]:
    """Param groups as a framework stores them, partitions of ZeRO, and the group over which plain ones are copied."""
    import torch.distributed as dist

    alone = not has_process_group()
    if alone or layout == "ddp":
        stand_ins = [nn.Parameter(_empty(route.shape, dtype)) for route in routes]
        return _groups(routes, stand_ins, config), None, None if alone else dist.group.WORLD
    if layout in ("fsdp", "hsdp"):
        return _groups(routes, _sharded(routes, replicas if layout == "hsdp" else 1, dtype), config), None, None
    stand_ins = [nn.Parameter(_empty(route.shape, torch.float32)) for route in routes]
    groups, partitions = _partitioned(_groups(routes, stand_ins, config), layout)
    return groups, partitions, None


def _groups(routes: Sequence[Route], stand_ins: Sequence[nn.Parameter], config: MuonConfig) -> list[dict[str, Any]]:
    stored = [dataclasses.replace(route, parameter=p) for route, p in zip(routes, stand_ins, strict=True)]
    groups = groups_of(stored, config)
    for group in groups:  # as torch.optim.Optimizer takes them
        names, params = zip(*group["params"], strict=True)
        group["param_names"], group["params"] = list(names), list(params)
        group["momentum_dtype"] = config.momentum_dtype
    return groups


def _sharded(routes: Sequence[Route], replicas: int, dtype: torch.dtype) -> list[nn.Parameter]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    ranks = dist.get_world_size()
    placements: list[Placement] = [Shard(0)] if replicas == 1 else [Replicate(), Shard(0)]
    mesh = init_device_mesh("cpu", (ranks,) if replicas == 1 else (replicas, ranks // replicas))
    found = []
    for route in routes:
        rows = -(-route.shape[0] // mesh.size(-1)) if route.shape else 0  # rank 0 is never short of rows
        stride = torch.empty(route.shape, device="meta").stride()
        local = _empty((min(rows, route.shape[0]), *route.shape[1:]), dtype)
        whole = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(route.shape), stride=stride
        )
        found.append(nn.Parameter(whole))
    return found


def _partitioned(groups: Sequence[dict[str, Any]], layout: str) -> tuple[list[dict[str, Any]], dict[Tensor, Partition]]:
    """Flat partitions in the place of parameters, as DeepSpeed puts them; sub-groups of ZeRO-3 are groups here."""
    import torch.distributed as dist

    ranks, world = dist.get_world_size(), dist.group.WORLD
    assert world is not None
    flat_groups: list[dict[str, Any]] = []
    partitions: dict[Tensor, Partition] = {}

    def add(group: dict[str, Any], size: int, slices: list[Slice]) -> None:
        flat = nn.Parameter(_empty((size,), torch.float32))
        partitions[flat] = Partition(world, 0, slices if group["use_muon"] else [], torch.device("cpu"))
        flat_groups.append({**group, "params": [flat], "param_names": ["flat"]})

    for group in groups:
        sizes = [param.numel() for param in group["params"]]
        seen = [views.parse(text) for text in views.views_of(group)]
        if layout != "zero3":
            unit = _ALIGNMENT * ranks
            size = -(-sum(sizes) // unit) * unit // ranks
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            add(
                group,
                size,
                [
                    Slice(
                        tuple(param.shape), partition_bounds(n, size, ranks, start), start if start < size else 0, view
                    )
                    for param, n, start, view in zip(group["params"], sizes, starts, seen, strict=True)
                ],
            )
            continue
        slices: list[Slice] = []
        filled = 0
        for i, (param, n, view) in enumerate(zip(group["params"], sizes, seen, strict=True)):
            part = -(-n // ranks)
            slices.append(Slice(tuple(param.shape), partition_bounds(n, part, ranks), filled, view))
            filled += part
            if filled >= _SUB_GROUP or i + 1 == len(sizes):
                add(group, filled, slices)
                slices, filled = [], 0
    return flat_groups, partitions


# --- what it comes to


def _work(
    layout: StepLayout, ranks: int, config: MuonConfig, ns_dtype: torch.dtype
) -> tuple[list[int], list[int], int, int]:
    """FLOPs and bytes sent of each rank; bytes of the largest unit and of all that is ever under way on a rank."""
    flops = [0] * ranks
    sent = [0] * ranks
    largest = travelling = 0

    def unit_flops(unit: Unit) -> int:
        rows = cost.block_rows(min(unit.shape), ns_dtype, "cuda")
        return unit.count * cost.flops(unit.shape, cost.segments(unit.shape, config.ns_steps, ns_dtype), rows)

    for executor in (executor for work in layout.works for executor in work.executors):
        if isinstance(executor, LocalExecutor):
            own = sum(unit_flops(unit) for unit in executor.units)
            flops = [found + own for found in flops]
            largest = max([largest, *(2 * 4 * unit.numel for unit in executor.units)])  # one after the other
            continue
        assert isinstance(executor, Exchange)
        there = executor.wire.itemsize
        back = min(there, ns_dtype.itemsize)
        # Many units lie on the ranks in the same way, and the ranks are many: each way is counted first.
        sent_here: Counter[Tensor] = Counter()
        held_here: Counter[Tensor] = Counter()
        held = [0] * ranks
        for unit, owner in executor.owned:
            pattern = executor.storage.pattern(unit)
            flops[owner] += unit_flops(unit)
            # What the owner stores itself goes nowhere.
            kept = pattern.stored[owner]
            sent[owner] += (pattern.total - kept) * back - kept * there
            held[owner] += unit.numel * there + pattern.total * back
            largest = max(largest, there * unit.numel)
            sent_here[pattern.sent_to(owner)] += there
            held_here[pattern.on_ranks] += there + back
        sent = _plus(sent, sent_here)
        travelling += max(_plus(held, held_here))
    return flops, sent, largest, travelling


def _plus(numbers: list[int], counted: Counter[Tensor]) -> list[int]:
    total = torch.tensor(numbers)
    for on_ranks, times in counted.items():
        total += on_ranks * times
    return [int(number) for number in total.tolist()]


def _state(layout: StepLayout, groups: Sequence[dict[str, Any]], ranks: int) -> tuple[list[int], list[int]]:
    """Bytes of state of each rank, and what AdamW alone would have there."""
    known: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # elements and bytes of momentum, by who stores what
    own = torch.zeros(ranks, dtype=torch.int64)
    adamw = torch.zeros(ranks, dtype=torch.int64)
    for group, work in zip(groups, layout.works, strict=True):
        choice = group["momentum_dtype"]
        for param, place in zip(group["params"], work.shared, strict=True):
            if place is None or not place.regions:  # whole, or a partition, which has one size everywhere
                numel = torch.full((ranks,), param.numel())
                momentum = torch.full((ranks,), state_bytes(param, choice, param.shape))
            else:
                key = id(place.regions), choice
                if key not in known:
                    shapes = [region.shape for region in place.regions if isinstance(region, Region)]
                    nbytes = {shape: state_bytes(param, choice, shape) for shape in set(shapes)}
                    known[key] = (
                        torch.tensor([math.prod(shape) for shape in shapes]),
                        torch.tensor([nbytes[shape] for shape in shapes]),
                    )
                numel, momentum = known[key]
            moments = numel * 2 * param.dtype.itemsize + 4  # and a count of steps, an fp32 number
            adamw += moments
            own += momentum if group["use_muon"] else moments
    return own.tolist(), adamw.tolist()


def _model_flops(model: nn.Module) -> int:
    """Of the products with weights for one token: two a weight forward, two for the input's gradient, two for its own.

    Of experts those that a token goes to are counted, and an input embedding is looked up, not multiplied.
    """
    config = text_config_of(getattr(model, "config", None))
    experts = next(iter(expert_counts(config)), 0)
    chosen = next((n for name in _CHOSEN if isinstance(n := getattr(config, name, None), int)), experts)
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
            numel = numel * chosen // experts
        total += numel * (6 if param.requires_grad else 4)
    return total


_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
