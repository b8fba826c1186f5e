"""How equal parts of flat tensors divide parameters, against an enumeration of all elements."""

from __future__ import annotations

import itertools

import pytest

from hf_muon.storage.partitions import Division, partition_bounds

CASES = list(itertools.product([1, 5, 12], [1, 3, 4, 20], [0, 1, 7], [0, 2]))


@pytest.mark.parametrize(("numel", "size", "offset", "start"), CASES)
def test_every_element_is_held_once(numel, size, offset, start):
    division = Division(numel, size, offset, start)
    ranks = -(-(offset + numel) // size)
    positions = {}
    for element in range(numel):
        rank, at = divmod(offset + element, size)
        # A parameter that begins in this part begins at its offset there, any other at the beginning of the part.
        positions[element] = rank, start + at
    held = {}
    for rank in range(ranks + 1):
        first, last, at = division.held(rank)
        assert (first, last) == partition_bounds(numel, size, ranks + 1, offset)[rank]
        held |= {element: (rank, at + element - first) for element in range(first, last)}
    assert held == positions
    assert division.bounds(ranks) == partition_bounds(numel, size, ranks, offset)
    for first, last in itertools.combinations_with_replacement(range(numel + 1), 2):
        pieces = {
            element: (rank, at + element - begin)
            for rank, begin, end, at in division.overlaps(first, last)
            for element in range(begin, end)
        }
        assert pieces == {element: positions[element] for element in range(first, last)}
