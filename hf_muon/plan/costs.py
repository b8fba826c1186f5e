"""Compute the cost of a step on each rank from shapes: FLOPs, communication, state and temporary memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_muon.config import MuonConfig
from hf_muon.distributed.schedule import Schedule
from hf_muon.math import cost
from hf_muon.math.coefficients import resolve
from hf_muon.math.elementwise import chunk_size
from hf_muon.math.moments import moment_bytes
from hf_muon.optimizer.layout import StepLayout
from hf_muon.optimizer.state import STATE_KEYS, dtype_of, row_shape
from hf_muon.plan.stand_ins import ACCELERATOR
from hf_muon.rules import registry
from hf_muon.storage.host import SMALLEST
from hf_muon.storage.tensors import shape_of

if TYPE_CHECKING:
    from hf_muon.distributed.units import Unit

_STEP = 4  # bytes of AdamW's number of steps, an fp32 number


class StepCost(NamedTuple):
    """The cost of the exchanges of a step; the maximum over ranks, unless the attribute is a list.

    Attributes:
        flops: the FLOPs of Newton-Schulz, for each rank; one entry if no other rank shares the matrices.
        sent_bytes: the updates, directions and state by row that each rank sends to others.
        in_flight_bytes: the updates and directions that a rank has in flight at once.
        unit_bytes: the buffers for the largest unit on its owner.
        turn: elements of the updates that a rank computes at once, to send them.
    """

    flops: list[int]
    sent_bytes: list[int]
    in_flight_bytes: int
    unit_bytes: int
    turn: int = 0


def step_cost(
    groups: Sequence[Mapping[str, Any]], layout: StepLayout, ranks: int, config: MuonConfig, ns_dtype: torch.dtype
) -> StepCost:
    """Return the total cost of the exchanges of all param groups on each rank.

    Args:
        groups: param groups.
        layout: the layout of their step.
        ranks: number of ranks.
        config: the options of the run.
        ns_dtype: the dtype of the products.
    """
    steps = len(resolve(config.ns_coefficients, config.ns_steps))

    def newton_schulz(unit: Unit) -> int:
        return unit.count * cost.flops(unit.shape, cost.form(unit.shape, steps, ns_dtype))

    flops, sent = [0] * ranks, [0] * ranks
    in_flight = largest = turn = 0
    pairs = zip(groups, layout.works, strict=True)
    for group, work, exchange in ((*pair, exchange) for pair in pairs for exchange in pair[1].exchanges):
        exchange_cost = schedule_cost(exchange.schedule, newton_schulz, ns_dtype)
        row_bytes = 4 * _row_keys(group) * (exchange.schedule.ranks - 1)
        for unit in exchange.schedule.units if row_bytes else ():  # owners copy the state by row to all others
            rows = unit.shape[1 if work.matrices[unit.ranges[0].matrix].transposed else 0]
            exchange_cost.sent_bytes[unit.owner] += row_bytes * unit.count * rows
        # Without other ranks, every process does all the work.
        places = range(ranks) if exchange.group else [0] * ranks
        flops = [total + exchange_cost.flops[place] for total, place in zip(flops, places, strict=True)]
        sent = [total + exchange_cost.sent_bytes[place] for total, place in zip(sent, places, strict=True)]
        in_flight = max(in_flight, exchange_cost.in_flight_bytes)  # exchanges step one after the other
        largest, turn = max(largest, exchange_cost.unit_bytes), max(turn, exchange_cost.turn)
    return StepCost(flops, sent, in_flight, largest, turn)


def schedule_cost(schedule: Schedule, flops_of: Callable[[Unit], int], direction_dtype: torch.dtype) -> StepCost:
    """Return the cost of a step of all units of a schedule.

    Args:
        schedule: assigns units to owners and rounds.
        flops_of: returns the FLOPs of Newton-Schulz on a unit.
        direction_dtype: the dtype in which Newton-Schulz returns directions.
    """
    update_bytes = schedule.comm_dtype.itemsize
    # Directions travel back in the narrower of the two dtypes.
    direction_bytes = min(update_bytes, direction_dtype.itemsize)
    flops = [0] * schedule.ranks
    sent = [0] * schedule.ranks
    for unit in schedule.units:
        flops[unit.owner] += flops_of(unit)
        # The owner sends directions to the ranks that store parts; it keeps its own part.
        kept = unit.stored[unit.owner]
        for rank, numel in enumerate(unit.sent()):
            sent[rank] += numel * update_bytes
        sent[unit.owner] += (sum(unit.stored) - kept) * direction_bytes - kept * update_bytes
    rounds = schedule.planned({each.matrix for unit in schedule.units for each in unit.ranges}, direction_bytes)
    if schedule.ranks == 1:  # updates and directions, at four bytes: rounds are stepped one after the other
        round_sizes = (sum(unit.numel for unit in each.units) for each in rounds)
        return StepCost(flops, [0], 0, 2 * 4 * max(round_sizes, default=0))
    following = [
        after.gather * overlaps for after, overlaps in zip(rounds[1:], schedule.overlaps(rounds), strict=False)
    ]
    # A round holds its own updates, two parts of directions that travel back, and the updates of the round after it.
    in_flight = [each.gather + 2 * each.back + ahead for each, ahead in zip(rounds, [*following, 0], strict=False)]
    largest = max((update_bytes * unit.numel for unit in schedule.units), default=0)
    return StepCost(flops, sent, max(in_flight, default=0), largest, max((each.sent for each in rounds), default=0))


def step_buffers(
    groups: Sequence[Mapping[str, Any]],
    layout: StepLayout,
    of_step: StepCost,
    config: MuonConfig,
    ns_dtype: torch.dtype,
) -> int:
    """Return a bound on the bytes of a step's temporary tensors on a rank.

    They are updates and directions in flight or stepped together, the workspace of Newton-Schulz for the largest batch,
    fp32 copies of updates and directions for rules, and of a chunk of weights, moments and updates for elementwise
    functions.

    Args:
        groups: param groups.
        layout: the layout of their step.
        of_step: their cost.
        config: the options of the run.
        ns_dtype: the dtype of the products.
    """
    steps = len(resolve(config.ns_coefficients, config.ns_steps))
    # For each element, fp32 copies of the update and of the direction.
    of_rules = 8 if any(group["use_muon"] and registry.on_directions(group) for group in groups) else 0
    batches = copies = 0
    for unit in _units(layout):
        copies = max(copies, of_rules * unit.numel)
        form = cost.form(unit.shape, steps, ns_dtype)
        batch = cost.batch_size(unit.shape, form, ns_dtype, ACCELERATOR.type, config.max_batch_bytes)
        bytes_of_one = cost.working_bytes(unit.shape, form, ns_dtype)
        batches = max(batches, min(batch, unit.count) * bytes_of_one)
    chunk = chunk_size(ACCELERATOR)
    # A turn's elements in fp32, twice; four fp32 copies of a chunk: weights, updates and two moments.
    return of_step.in_flight_bytes + of_step.unit_bytes + 8 * of_step.turn + batches + copies + 16 * chunk


def turns_of_moments(of_step: StepCost) -> int:
    """Return a bound on the bytes of offloaded moments that are on the device at once: two turns, in fp32.

    The moments of a turn move together: those of updates in flight, or both moments of a chunk of AdamW's parameters.
    """
    chunk = chunk_size(ACCELERATOR)
    return 2 * 4 * max(of_step.turn, of_step.unit_bytes // 8, 2 * chunk)


def _units(layout: StepLayout) -> Iterator[Unit]:
    for exchange in (exchange for work in layout.works for exchange in work.exchanges):
        yield from exchange.schedule.units


class StateBytes(NamedTuple):
    """Bytes of optimizer state on each rank.

    Attributes:
        total: all of it.
        adamw: the same if torch's AdamW stepped all weights.
        large: the part that `momentum_offload` moves to the host: moments of large parameters.
    """

    total: list[int]
    adamw: list[int]
    large: list[int]


def _row_keys(group: Mapping[str, Any]) -> int:
    """Return the number of fp32 numbers that the rules of a group keep for each row."""
    return [*registry.state_of(group).values()].count("row")


def state_bytes(groups: Sequence[Mapping[str, Any]], layout: StepLayout, ranks: int, shards: int) -> StateBytes:
    """Return the bytes of optimizer state on each rank.

    Args:
        groups: param groups, see `stand_ins.stored_groups`.
        layout: the layout of their step.
        ranks: number of ranks.
        shards: ranks among which FSDP2 cuts parameters; 1 where each has all of those that it steps.
    """
    rows = sum(  # every rank has those of all matrices
        _row_keys(group) * math.prod(row_shape(matrix.shape, transposed=matrix.transposed))
        for group, work in zip(groups, layout.works, strict=True)
        for matrix in work.matrices
    )
    state = StateBytes([4 * rows] * ranks, [0] * ranks, [0] * ranks)
    for group in groups:
        use_muon, dtype = bool(group["use_muon"]), dtype_of(group)
        keys = [key for key in STATE_KEYS[use_muon] if key != "step"]
        of_rules = [*registry.state_of(group).values()].count("weight")
        # A large model has many parameters of few kinds: each kind is computed once.
        like = {(tuple(shape_of(param)), param.dtype): param for param in group["params"]}
        counts = Counter((tuple(shape_of(param)), param.dtype) for param in group["params"])
        for kind, count in counts.items():
            param = like[kind]
            moments = {
                local: sum(moment_bytes(param, key, dtype, local) for key in keys)
                for local in set(local_shapes(kind[0], ranks, shards))
            }
            for rank, local in enumerate(local_shapes(kind[0], ranks, shards)):
                # State of rules is never narrower than fp32, and torch's AdamW keeps moments in the parameter's dtype.
                exact = torch.promote_types(param.dtype, torch.float32).itemsize * math.prod(local)
                state.total[rank] += count * (moments[local] + of_rules * exact + (0 if use_muon else _STEP))
                state.adamw[rank] += count * (2 * param.dtype.itemsize * math.prod(local) + _STEP)
                state.large[rank] += count * moments[local] * (math.prod(kind[0]) >= SMALLEST)
    return state


def local_shapes(shape: Sequence[int], ranks: int, shards: int) -> list[tuple[int, ...]]:
    """Return the shape of each rank's shard of a tensor that FSDP2 shards along its first dim."""
    if shards == 1:
        return [tuple(shape)] * ranks
    length, *other_dims = shape or (1,)
    rows = -(-length // shards)
    return [(min(rows, max(0, length - rows * (rank % shards))), *other_dims) for rank in range(ranks)]
