"""What a rule that steps matrices in pairs adds to a step: copies of whole partners, and products of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_muon.config import GROUP_OPTIONS, MuonConfig
from hf_muon.distributed.units import Unit
from hf_muon.optimizer.layout import GroupWork
from hf_muon.plan.live_bytes import LiveBytes
from hf_muon.rules import registry

_FLOPS_OF_EIGH = 9
"""Times ``r^3``: of a symmetric matrix, eigenvectors included. Source: Golub and Van Loan, section 8.3."""


class Gathering(NamedTuple):
    """How a group's partners become whole, on a rank.

    Attributes:
        sent_bytes: to other ranks; the same on all ranks, because shards are padded.
        copies: bytes that stay until the end of the group's step.
        peak: the most bytes until all copies are there, these included.
    """

    sent_bytes: int = 0
    copies: int = 0
    peak: int = 0


class _Sent(TorchDispatchMode):
    """Counts the bytes that all-gathers send to other ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name == "_c10d_functional::all_gather_into_tensor":
            self.nbytes += (args[1] - 1) * args[0].nbytes
        return func(*args, **(kwargs or {}))


def gathering(group: Mapping[str, Any], work: GroupWork) -> Gathering:
    """Return how the partners of a group become whole, by the step's own code on tensors without values.

    Args:
        group: the param group, in a fake process group.
        work: of the group.
    """
    places = sorted({pair.matrix for pair in work.pairs.values()})
    if not places:
        return Gathering()
    sent, live = _Sent(), LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), live, sent:
        whole = work.gather({k: group["params"][work.matrices[k].param] for k in places})
    return Gathering(sent.nbytes, sum(copy.nbytes for copy in whole.values()), live.peak)


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
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._linalg_eigh: _eigh_flops}) as counter:
            rule.around(_unchanged, updates, partners, role, options, 1)
        return int(counter.get_total_flops())

    def of_unit(unit: Unit) -> int:
        pair = work.pairs.get(unit.ranges[0].matrix)
        return 0 if pair is None else of_batch(unit.count, unit.shape, pair.shape, pair.role)

    return of_unit


def _unchanged(matrices: Tensor) -> Tensor:
    return matrices


def _eigh_flops(shape: Sequence[int], *_: Any, **__: Any) -> int:
    *batch, r, _columns = shape
    return _FLOPS_OF_EIGH * math.prod(batch) * r**3
