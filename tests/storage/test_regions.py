"""Which elements lie where, compared with torch's own arithmetic and an enumeration; factors of learning rates."""

from __future__ import annotations

import doctest
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_muon.storage import boxes
from hf_muon.storage.factors import factors_of, list_complaint
from hf_muon.storage.partitions import Division
from hf_muon.storage.regions import Region, chunk, indices_at, length, regions, whole

placements = st.one_of(
    st.builds(Replicate),
    st.builds(Shard, st.integers(0, 2)),
    st.builds(_StridedShard, st.integers(0, 2), split_factor=st.integers(1, 4)),
)
meshes = st.lists(st.tuples(st.integers(1, 4), placements), min_size=1, max_size=3)


def indices(region):
    """Return the indices of a region, as tuples."""
    return list(itertools.product(*([i for a, b in ranges for i in range(a, b)] for ranges in region.dims)))


@given(st.tuples(st.integers(0, 9), st.integers(1, 7), st.integers(1, 5)), meshes)
def test_regions_are_where_torch_puts_them_and_hold_everything_once_for_each_replica(shape, axes):
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    mesh_shape, placed = [size for size, _ in axes], [placement for _, placement in axes]
    of_mesh = regions(shape, mesh_shape, placed)
    for coordinate, region in zip(itertools.product(*map(range, mesh_shape)), of_mesh, strict=True):
        local, offset = utils._compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placed)
        assert region.shape == tuple(local)
        if math.prod(local):
            assert indices(region)[0] == tuple(offset)
    replicas = math.prod(size for size, placement in axes if placement.is_replicate())
    held = sorted(index for region in of_mesh for index in indices(region))
    assert held == sorted(list(itertools.product(*map(range, shape))) * replicas)


def test_ranges():
    """Strided shards hold several ranges, and leave room for a later axis, as with FSDP2 over tensor parallel."""
    (first, second), later = (
        [region.dims[0] for region in regions(shape, mesh, (_StridedShard(0, split_factor=2), *more))]
        for shape, mesh, more in (((8, 3), (2,), ()), ((11, 3), (2, 2), (Shard(0),)))
    )
    assert (first, second) == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    assert later == [((0, 3),), ((6, 9),), ((3, 6),), ((9, 11),)]
    ranges = ((2, 5), (7, 9))
    assert length(ranges) == 5
    assert [indices_at(ranges, *span) for span in ((1, 4), (4, 9), (5, 9))] == [((3, 5), (7, 8)), ((8, 9),), ()]
    assert [chunk(ranges, 4, i) for i in range(4)] == [((2, 4),), ((4, 5), (7, 8)), ((8, 9),), ()]
    assert whole((2, 0, 3)) == Region((((0, 2),), (), ((0, 3),)))


@given(st.integers(1, 12), st.integers(1, 20), st.integers(0, 20), st.integers(0, 2), st.data())
def test_every_element_of_equal_parts_is_held_once(numel, size, offset, start, data):
    """Cut a flat tensor into parts of `size` elements, of which each rank stores one."""
    division = Division(numel, size, offset, start)
    ranks = -(-(offset + numel) // size)
    # A parameter that begins in this part begins at its offset there, any other at the beginning of the part.
    expected = {element: ((offset + element) // size, start + (offset + element) % size) for element in range(numel)}
    bounds = division.bounds(ranks + 1)
    held = {}
    for rank in range(ranks + 1):
        first, last, at = division.held(rank)
        assert (first, last) == bounds[rank]
        held |= {element: (rank, at + element - first) for element in range(first, last)}
    assert held == expected
    first = data.draw(st.integers(0, numel))
    last = data.draw(st.integers(first, numel))
    overlaps = {
        element: (rank, at + element - begin)
        for rank, begin, end, at in division.overlaps(first, last)
        for element in range(begin, end)
    }
    assert overlaps == {element: expected[element] for element in range(first, last)}


# --- factors of the learning rate


@pytest.mark.parametrize("wrong", ["a|b", "0.5|-1.0", [0.5, -1], [True], [math.inf], [math.nan], 3])
def test_factors_are_finite_numbers_of_at_least_zero(wrong):
    assert list_complaint(wrong) is not None


def test_no_list_is_a_factor_of_one_for_each_parameter():
    assert list_complaint(None) is list_complaint(None, 3) is None
    assert factors_of({"params": [0, 1, 2]}) == [1.0] * 3


def test_the_example_of_all_types_of_the_geometry():
    results = doctest.testmod(boxes)
    assert results.attempted > 5
    assert results.failed == 0
