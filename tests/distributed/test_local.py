from __future__ import annotations

import torch

from hf_muon.distributed.local import LocalExecutor
from hf_muon.distributed.units import MatrixRange, Unit, make_units
from hf_muon.storage.regions import whole


class Doubled:
    dtype = torch.float32

    def __init__(self):
        self.batches = []

    def __call__(self, matrices, *, overwrite):
        self.batches.append(tuple(matrices.shape))
        return matrices.mul_(2) if overwrite else matrices * 2


SHAPES = [(4, 6), (6, 4), (3, 4, 6), (4, 6), (2, 2)]


def directions(updates, units, active=None):
    stored = {i: whole(u.shape) for i, u in enumerate(updates)}
    executor = LocalExecutor(units, stored, torch.device("cpu"))
    newton_schulz = Doubled()
    results, buckets = [torch.zeros_like(u) for u in updates], []
    for pieces, some in executor.directions(
        range(len(updates)) if active is None else active,
        lambda pieces: [piece.of(updates[piece.matrix]).clone() for piece in pieces],
        newton_schulz,
    ):
        buckets.append([piece.matrix for piece in pieces])
        for piece, direction in zip(pieces, some, strict=True):
            piece.of(results[piece.matrix]).copy_(direction)
    return results, newton_schulz.batches, buckets


def test_one_unit_after_the_other():
    updates = [torch.randn(shape) for shape in SHAPES]
    units = make_units(SHAPES, [0] * len(SHAPES))
    results, batches, buckets = directions(updates, units)
    assert len(buckets) == len(batches) == len(units) == 7
    assert all(torch.equal(f, u * 2) for f, u in zip(results, updates, strict=True))


def test_a_unit_is_one_product_across_parameters_and_parts_of_stacks():
    updates = [torch.randn(shape) for shape in SHAPES]
    units = [
        Unit((4, 6), (MatrixRange(0, 0, 1), MatrixRange(2, 0, 2))),
        Unit((4, 6), (MatrixRange(2, 2, 3), MatrixRange(3, 0, 1))),
    ]
    results, batches, _ = directions(updates, units)
    assert batches == [(3, 4, 6), (2, 4, 6)]
    for i in (0, 2, 3):
        assert torch.equal(results[i], updates[i] * 2)


def test_only_what_is_active():
    updates = [torch.randn(shape) for shape in SHAPES]
    units = [Unit((4, 6), (MatrixRange(0, 0, 1), MatrixRange(3, 0, 1))), Unit((2, 2), (MatrixRange(4, 0, 1),))]
    results, batches, buckets = directions(updates, units, active=[3])
    assert batches == [(1, 4, 6)]
    assert buckets == [[3]]
    assert torch.equal(results[3], updates[3] * 2)
    assert not results[0].any()


def test_nothing_to_do():
    assert directions([], []) == ([], [], [])
