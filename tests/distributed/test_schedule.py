"""Rounds and buckets; one process plans those of all ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from hf_muon.distributed.exchange import Exchange
from hf_muon.distributed.holdings import Holdings
from hf_muon.distributed.schedule import OwnedUnit, Schedule, make_round
from hf_muon.distributed.units import MatrixRange, Unit
from hf_muon.storage.regions import regions
from tests.distributed.test_units import llama_70b, loads, qwen3_235b_a22b, units_of


@pytest.mark.first_tier("llama")
@pytest.mark.parametrize(("model", "ranks", "slack"), [(llama_70b, 64, 1.05), (qwen3_235b_a22b, 1024, 1.3)])
def test_owners_work_at_the_same_time_whatever_the_bound(monkeypatch, model, ranks, slack):
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 5)
    shapes = model()
    where = {shape: regions(shape, (ranks,), [Shard(0)]) for shape in set(shapes)}
    holdings = Holdings({i: where[shape] for i, shape in enumerate(shapes)}, ranks)
    units = units_of(shapes)
    cpu = torch.device("cpu")
    exchange = Exchange(None, units, holdings, torch.float32, cpu, cpu, 2**28)
    rounds = exchange.rounds(frozenset(range(len(shapes))))
    span = 0
    for each in rounds:
        span += max(loads(*zip(*each.units, strict=True), ranks))
    assert span <= slack * max(loads(*zip(*exchange.schedule.owned, strict=True), ranks))


def schedule_of(placement, rank, max_bucket_bytes=2**20):
    """Return the schedule of two matrices ``(4, 6)``, each owned by one of two ranks."""
    stored = regions((4, 6), (2,), [placement])
    owned = [OwnedUnit(Unit((4, 6), (MatrixRange(k, 0, 1),)), k) for k in (0, 1)]
    return Schedule(owned, Holdings({0: stored, 1: stored}, 2), rank, torch.float32, max_bucket_bytes)


def test_boxes_of_equal_matrices_are_copied_together():
    """Let two ranks store rows of five matrices, of which one is stored otherwise and copied alone."""
    rows, columns = regions((4, 6), (2,), [Shard(0)]), regions((4, 6), (2,), [Shard(1)])
    unit = Unit((4, 6), tuple(MatrixRange(k, 0, 1) for k in range(5)))
    holdings = Holdings({k: columns if k == 3 else rows for k in range(5)}, 2)
    only = make_round([OwnedUnit(unit, 0)], [[0]], holdings, 0)
    boxes = [(box.matrices, box.shape) for _, box in only.incoming]
    assert boxes == 2 * [(slice(0, 3), (3, 2, 6)), (slice(3, 4), (1, 4, 3)), (slice(4, 5), (1, 2, 6))]
    assert len(only.pieces) == 5
    apart, together = torch.zeros(5, 4, 6), torch.zeros(5, 4, 6)
    arrived = torch.arange(120.0)
    for batch, arriving in (
        (together, only.incoming),
        (apart, [(0, b) for r in (0, 1) for b in holdings.boxes(unit, r)]),
    ):
        for (_, box), data in zip(arriving, arrived.split([box.numel for _, box in arriving]), strict=True):
            box.write(data.view(box.shape), batch)
    assert torch.equal(together, apart)


@pytest.mark.parametrize("rank", [0, 1])
def test_matrices_that_are_not_active_take_no_part(rank):
    (only,) = schedule_of(Shard(0), rank).rounds(frozenset({1}))
    assert [(owned.unit.ranges[0].matrix, owned.owner) for owned in only.units] == [(1, 1)]


def test_replicas_gather_nothing():
    (only,) = schedule_of(Replicate(), rank=0).rounds(frozenset({0, 1}))
    (back,) = only.returns
    assert (only.gathers, back.travels, back.to_all) == (False, True, True)
    assert (back.leave, back.arrive) == ([24, 0], [24, 24])
    assert [(piece.matrix, other.matrix) for piece, other in zip(only.sent, only.unsent, strict=True)] == [(0, 1)]


@pytest.mark.parametrize("ranks", [2, 64])
def test_an_owner_holds_directions_for_all_ranks_once(ranks):
    everywhere = regions((4, 6), (ranks,), [Replicate()])
    owned = [OwnedUnit(Unit((4, 6), (MatrixRange(0, 0, 1),)), 0)]
    cost = Schedule(owned, Holdings({0: everywhere}, ranks), 0, torch.float32, 2**20).cost(
        lambda unit: unit.numel, torch.float32
    )
    # The update, as it is computed and as it has arrived; directions, here and on their way, of two rounds.
    assert cost.in_flight_bytes == 24 * (4 + 4) + 2 * 24 * (4 + 4)


def test_a_round_overlaps_with_others_if_what_travels_is_within_the_bound():
    """Let each of two owners have two units, of which those of one round are too large to travel while others do."""
    shapes = [(64, 64), (64, 64), (64, 64), (64, 64)]
    stored = regions((64, 64), (2,), [Shard(0)])
    owned = [OwnedUnit(Unit(shape, (MatrixRange(k, 0, 1),)), k % 2) for k, shape in enumerate(shapes)]
    holdings = Holdings(dict.fromkeys(range(4), stored), 2)
    nbytes = 4 * 64 * 64
    # Updates: half of two matrices leaves, a whole one arrives. Directions of one owner, twice: a whole matrix leaves,
    # half of it arrives.
    enough = 2 * nbytes + 2 * (nbytes + nbytes // 2)
    for bound, overlaps in ((enough - 1, False), (enough, True)):
        rounds = Schedule(owned, holdings, 0, torch.float32, bound).rounds(range(4))
        assert [len(each.units) for each in rounds] == [2, 2]
        assert rounds[0].overlaps == overlaps


def test_directions_that_exceed_their_part_of_the_bound_travel_back_one_after_the_other():
    everywhere = regions((64, 64), (4,), [Replicate()])
    owned = [OwnedUnit(Unit((64, 64), (MatrixRange(k, 0, 1),)), k) for k in range(4)]
    holdings = Holdings(dict.fromkeys(range(4), everywhere), 4)
    one_owner = 2 * 4 * 64 * 64  # here, and on its way
    for bound, parts in ((1, 4), (8 * (one_owner + 4 * 64 * 64), 2), (2**30, 1)):
        (only,) = Schedule(owned, holdings, 0, torch.float32, bound).rounds(range(4))
        assert len(only.returns) == parts
        assert [piece.matrix for back in only.returns for piece in back.pieces] == [0, 1, 2, 3]


@pytest.mark.parametrize(("placement", "sent"), [(Shard(0), 12 * 4 + 12 * 2), (Replicate(), 24 * 2)])
def test_the_cost_of_a_step(placement, sent):
    """Expect half of a matrix to go to its owner in fp32, and half of the other's direction to return in bf16."""
    cost = schedule_of(placement, rank=0).cost(lambda unit: unit.numel, torch.bfloat16)
    assert cost.flops == [24, 24]
    assert cost.sent_bytes == [sent, sent]
    assert cost.unit_bytes == 24 * 4
