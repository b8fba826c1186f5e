"""The calls of an optimizer step on one rank, recorded while the step's own code runs on tensors without values."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_muon.config import GROUP_OPTIONS, MuonConfig
from hf_muon.math.elementwise import is_accelerator
from hf_muon.math.precision import NS_DTYPES
from hf_muon.optimizer import rule_state
from hf_muon.optimizer.state import complete_state_
from hf_muon.optimizer.step import MuonStep, adamw_step
from hf_muon.plan import pairs, stand_ins
from hf_muon.plan.calls import Call, Calls, recording
from hf_muon.plan.parallelism import Cuts
from hf_muon.routing.route import Route
from hf_muon.storage.tensors import local_of

# The check that gradients are finite, for each dtype of gradients: norms, limits, a stack of them, a comparison, all of
# it. The host reads the answer; on several ranks it is put into a report, which all ranks gather and read.
_LAUNCHES_OF_CHECK = 5
_LAUNCHES_OF_READ = 1
_LAUNCHES_OF_REPORT = 11


class RecordedStep(NamedTuple):
    """A step of one rank.

    Attributes:
        calls: of operators, in their order.
        turns: how many times momentum moves, bucket by bucket.
    """

    calls: list[Call]
    turns: int

    @property
    def launches(self) -> int:
        """Number of launches, without collectives."""
        return sum(call.launches for call in self.calls if not call.is_collective)

    @property
    def collectives(self) -> int:
        """Number of collectives."""
        return sum(call.is_collective for call in self.calls)

    @property
    def traffic(self) -> int:
        """Bytes that elementwise operators read and write."""
        return sum(call.traffic for call in self.calls if not call.is_collective)

    @property
    def flops(self) -> int:
        """Multiplications and additions in products."""
        return sum(call.product.flops for call in self.calls if call.product is not None)


def record_step(
    routes: Sequence[Route],
    config: MuonConfig,
    layout: str = "single",
    ranks: int = 1,
    rank: int = 0,
    *,
    replicas: int = 2,
    dtype: torch.dtype = torch.float32,
    ns_dtype: torch.dtype = torch.float16,
    device: str = "meta",
    cuts: Cuts | None = None,
) -> RecordedStep:
    """Return the calls of a step on one rank.

    Args:
        routes: of the model's parameters.
        config: the options of the run.
        layout: one of `step_plan.LAYOUTS`.
        ranks: number of ranks.
        rank: the one that is recorded.
        replicas: copies of the model under `hsdp`.
        dtype: of the stored weights and gradients.
        ns_dtype: of the products.
        device: `meta` for the step of accelerators, `cpu` for that of a CPU.
        cuts: of tensor and expert parallelism; None for layouts without.
    """
    products_on = torch.device(device)
    calls, turns = Calls(device), 0
    with stand_ins.fake_ranks(ranks, rank):
        groups, partitions, replicate_group = stand_ins.stored_groups(routes, config, layout, replicas, dtype, cuts)
        step = stand_ins.step_layout(groups, partitions, replicate_group, config, products_on)
        name = next(name for name, own in NS_DTYPES.items() if own == ns_dtype)
        for work in step.works:
            for executor in work.executors:
                turns += len(executor.order(frozenset(range(len(work.matrices)))))
                if hasattr(executor, "comm_device"):
                    executor.comm_device = products_on
        gathered = [pairs.gathering(*own).calls for own in zip(groups, step.works, strict=True)]
        shards = [[local_of(param) for param in group["params"]] for group in groups]
        with _without_values(products_on):
            stored = [_stored(group, own, config, name, products_on) for group, own in zip(groups, shards, strict=True)]
            # ZeRO steps one partition after the other.
            together = [[own] for own in stored] if partitions is not None else [stored]
            for steps in together:
                calls.calls += _checks([param for _, params, _ in steps for param in params], ranks)
            for (group, params, state), work, own in zip(stored, step.works, gathered, strict=True):
                indices = [i for i, param in enumerate(params) if param.numel() or ranks > 1]
                with recording(calls):
                    if group["use_muon"]:
                        calls.calls += own
                        work = replace(work, gather=pairs.without_values(work, products_on))
                        MuonStep(group, work, indices, state, 2, config.max_batch_bytes).take()
                    else:
                        adamw_step(group, indices, state, 2, work=work)
    return RecordedStep(calls.calls, turns)


def _without_values(device: torch.device) -> Any:
    """Return a context in which tensors of a device have no values."""
    if is_accelerator(device):
        return contextlib.nullcontext()
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def _stored(
    group: Mapping[str, Any], shards: Sequence[Tensor], config: MuonConfig, ns_dtype: str, device: torch.device
) -> tuple[dict[str, Any], list[Tensor], dict[Tensor, dict[str, Tensor]]]:
    """Return a param group of what this rank stores, its parameters with gradients, and their state."""
    params = [torch.empty(own.shape, dtype=own.dtype, device=device) for own in shards]
    options = {name: config.value_of(name) for name in GROUP_OPTIONS}
    own = {**options, **group, "ns_dtype": ns_dtype, "params": params}
    for param in params:
        param.grad = torch.empty_like(param)
    state: dict[Tensor, dict[str, Tensor]] = {param: {} for param in params}
    complete_state_(own, state)
    rule_state.complete_(own, state)
    return own, params, state


def _checks(params: Sequence[Tensor], ranks: int) -> list[Call]:
    """Return the calls that check gradients, which tensors without values do not make: each is read once."""
    nbytes: dict[torch.dtype, int] = {}
    for param in params:
        nbytes[param.dtype] = nbytes.get(param.dtype, 0) + param.numel() * param.dtype.itemsize
    calls = [Call("norms of gradients", _LAUNCHES_OF_CHECK, own) for own in nbytes.values()]
    if ranks == 1:
        return [*calls, Call("read", _LAUNCHES_OF_READ, 0)]
    return [*calls, Call("report", _LAUNCHES_OF_REPORT, 0), Call("_allgather_base", 1, 0)]
