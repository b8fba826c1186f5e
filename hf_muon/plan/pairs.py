"""What a rule that steps matrices in pairs adds to a step: copies of whole partners, and products of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_muon.config import GROUP_OPTIONS, MuonConfig
from hf_muon.distributed.units import Unit
from hf_muon.optimizer.layout import GroupWork
from hf_muon.plan.calls import Call, Calls, recording
from hf_muon.plan.live_bytes import LiveBytes
from hf_muon.plan.operators import nbytes_of
from hf_muon.rules import registry

_EIGH = "_linalg_eigh"
_FLOPS_OF_EIGH = 9
"""Times ``r^3``: of a symmetric matrix, eigenvectors included. Source: Golub and Van Loan, section 8.3."""


class Gathering(NamedTuple):
    """How a group's partners become whole, on a rank.

    Attributes:
        calls: of operators, in their order.
        sent_bytes: to other ranks; the same on all ranks, because shards are padded.
        copies: bytes that stay until the end of the group's step.
        peak: the most bytes until all copies are there, these included.
    """

    calls: Sequence[Call] = ()
    sent_bytes: int = 0
    copies: int = 0
    peak: int = 0


class _Sent(Calls):  # type: ignore[no-untyped-call]
    """Records calls, counts what all-gathers send, and the FLOPs of eigendecompositions."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.sent_bytes = self.flops_of_eigh = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name
        if name == "_c10d_functional::all_gather_into_tensor":
            self.sent_bytes += (args[1] - 1) * nbytes_of(args[0])
        if name.endswith(_EIGH):
            *batch, r, _ = args[0].shape
            self.flops_of_eigh += _FLOPS_OF_EIGH * math.prod(batch) * r**3
        return result


def gathering(group: Mapping[str, Any], work: GroupWork) -> Gathering:
    """Return how the partners of a group become whole, by the step's own code on tensors without values.

    Args:
        group: the param group, in a fake process group.
        work: of the group.
    """
    places = sorted({pair.matrix for pair in work.pairs.values()})
    if not places:
        return Gathering()
    calls, live = _Sent("cpu"), LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), live, recording(calls):
        whole = work.gather({k: group["params"][work.matrices[k].param] for k in places})
    return Gathering(calls.calls, calls.sent_bytes, sum(map(nbytes_of, whole.values())), live.peak)


def copied_bytes(work: GroupWork, indices: Sequence[int]) -> int:
    """Return the bytes of the partners' copies in a step of some parameters alone, in fp32."""
    copied = {pair.matrix for k, pair in work.pairs.items() if work.matrices[k].param in indices}
    return sum(4 * math.prod(work.matrices[k].shape) for k in copied)


def flops_of(group: Mapping[str, Any], work: GroupWork, config: MuonConfig) -> Callable[[Unit], int]:
    """Return what counts the FLOPs of a unit's rule: its products, and ``9 r^3`` for each eigendecomposition."""
    rule = registry.paired(group)
    options = {name: config.value_of(name) for name in GROUP_OPTIONS} | dict(group)

    @functools.cache
    def of_batch(count: int, shape: tuple[int, int], partner: tuple[int, ...], role: str) -> int:
        assert rule is not None
        assert rule.around is not None
        updates, partners = (torch.empty(count, *own, device="meta") for own in (shape, partner))
        calls = _Sent("meta")
        with recording(calls):
            rule.around(_unchanged, updates, partners, role, options, 1)
        return calls.flops_of_eigh + sum(call.product.flops for call in calls.calls if call.product is not None)

    def of_unit(unit: Unit) -> int:
        pair = work.pairs.get(unit.ranges[0].matrix)
        return 0 if pair is None else of_batch(unit.count, unit.shape, pair.shape, pair.role)

    return of_unit


def _unchanged(matrices: Tensor) -> Tensor:
    return matrices


def decomposes(calls: Sequence[Call]) -> bool:
    """Return whether a step has eigendecompositions."""
    return any(call.name == _EIGH for call in calls)


def without_values(work: GroupWork, device: torch.device) -> Callable[[Mapping[int, Tensor]], dict[int, Tensor]]:
    """Return what stands for `GroupWork.gather` where shards stand for parameters: partners without values."""
    shapes = {pair.matrix: pair.shape for pair in work.pairs.values()}
    return lambda params: {k: torch.empty(shapes[k], device=device) for k in params}
