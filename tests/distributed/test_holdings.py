"""The elements sent to an owner, compared with the fewest that suffice."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_muon.distributed.holdings import Holdings
from hf_muon.distributed.schedule import OwnedUnit, make_round
from hf_muon.distributed.units import MatrixRange, Unit
from hf_muon.storage.regions import regions

MESHES = [(2,), (4,), (2, 2)]
placement = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 2)),
    st.builds(_StridedShard, st.integers(0, 2), split_factor=st.integers(1, 2)),
)


def elements(block):
    """Return the elements of the unit's batch in a box."""
    matrices = range(block.matrices.start, block.matrices.stop)
    rows, columns = (
        [i for first, last in ranges for i in range(first, last)] for ranges in (block.rows, block.columns)
    )
    return frozenset(itertools.product(matrices, rows, columns))


def least(blocks, owner, batch):
    """Return the fewest elements that other ranks must send, over all sets of boxes that complete the owner's batch."""
    sets = [(rank, elements(block)) for rank, block in blocks if rank != owner]
    own = frozenset().union(*(elements(block) for rank, block in blocks if rank == owner))
    best = math.inf
    for sends in itertools.product((False, True), repeat=len(sets)):
        sent = [box for send, (_, box) in zip(sends, sets, strict=True) if send]
        if own.union(*sent) == batch:
            best = min(best, sum(map(len, sent)))
    return best


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_is_sent_is_the_least_from_which_the_owner_has_everything(data):
    mesh = data.draw(st.sampled_from(MESHES))
    ranks, stacks = math.prod(mesh), data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    stored = {
        i: regions((stack, 2, 3), mesh, data.draw(st.lists(placement, min_size=len(mesh), max_size=len(mesh))))
        for i, stack in enumerate(stacks)
    }
    holdings = Holdings(stored, ranks)
    unit = Unit((2, 3), tuple(MatrixRange(i, 0, stack) for i, stack in enumerate(stacks)))
    blocks = [(rank, block) for rank in range(ranks) for block in holdings.boxes(unit, rank)]
    batch = frozenset(itertools.product(range(unit.count), range(2), range(3)))
    for owner in range(ranks):
        rounds = [make_round([OwnedUnit(unit, owner)], [[0]], holdings, rank) for rank in range(ranks)]
        returns = [only for each in rounds for only in each.returns]
        # All ranks agree on whether they send anything, and how much.
        assert rounds[owner].receive == [each.send[owner] for each in rounds]
        arriving = [each.arrive[owner] for each in returns]
        if returns[owner].to_all:  # copies of one direction
            assert set(arriving) == {unit.numel} == {sum(returns[owner].leave)}
        else:
            assert arriving == returns[owner].leave
        assert holdings.pattern(unit).sent_to(owner).tolist() == rounds[owner].receive
        arrived = [element for _, block in rounds[owner].incoming for element in elements(block)]
        assert sorted(arrived) == sorted(batch)
        travels = sum(rounds[owner].receive) - rounds[owner].receive[owner]
        assert {each.gathers for each in rounds} == {travels > 0}
        assert {each.travels for each in returns} == {sum(arriving) > arriving[owner]}
        assert {each.to_all for each in returns} == {ranks > 1 and set(arriving) == {unit.numel}}
        for rank, each in enumerate(rounds):  # the momentum of all that a rank stores moves, once
            assert sorted(map(repr, each.pieces)) == sorted(repr(block.piece) for block in holdings.boxes(unit, rank))
        if len(blocks) <= 12:
            assert travels == least(blocks, owner, batch)
