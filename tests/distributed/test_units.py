"""How the matrices of real models are shared out: balance, what travels, and what is orthogonalized at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from hf_muon.distributed.schedule import Schedule
from hf_muon.distributed.units import Matrix, MatrixRange, Unit, assign_owners, make_units
from hf_muon.storage.boxes import shards_of
from hf_muon.storage.regions import regions
from hf_muon.storage.views import WHOLE


def llama_70b():
    """Return the shapes of Llama 3 70B (Grattafiori et al., The Llama 3 Herd of Models, table 3; 8 KV heads of 128)."""
    width, inner, kv = 8192, 28672, 1024
    return [(width, width), (kv, width), (kv, width), (width, width), *[(inner, width)] * 2, (width, inner)] * 80


def qwen3_235b_a22b():
    """Return the shapes of Qwen3-235B-A22B (Qwen3 Technical Report, table 2), stacked and fused as in transformers."""
    width, experts, inner = 4096, 128, 1536
    attention = [(64 * 128, width), (4 * 128, width), (4 * 128, width), (width, 64 * 128)]
    return [*attention, (experts, 2 * inner, width), (experts, width, inner)] * 94


def qwen3_06b():
    """Return the shapes of Qwen3-0.6B (Qwen3 Technical Report, table 1)."""
    return [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024), (1024, 3072)] * 28


def qwen3_30b_a3b(layers=48):
    """Return the shapes of Qwen3-30B-A3B (Qwen3 Technical Report, table 2): gate and up, two parts of one weight."""
    attention = [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096)]
    return [*attention, *[(128, 768, 2048)] * 2, (128, 2048, 768)] * layers


def shards(shape, ranks, placement):
    """Return what each rank stores of a matrix, or of a stack."""
    return shards_of(WHOLE, shape, tuple(regions(shape, (ranks,), [placement])))[0]


def units_of(shapes, accelerated=False, ranks=1, **options):
    where = {shape: shards(shape, ranks, Shard(0)) for shape in set(shapes)}
    device = torch.device("meta" if accelerated else "cpu")
    return make_units([Matrix(i, shape, where[shape], device=device) for i, shape in enumerate(shapes)], **options)


def loads(units, owners, ranks):
    load = [0] * ranks
    for unit, owner in zip(units, owners, strict=True):
        load[owner] += unit.cost
    return load


@pytest.mark.parametrize(
    ("shapes", "counts"),
    [
        ([(16, 16)] * 80, [10] * 8),
        ([(16, 16)] * 5, [1] * 5),
        ([(12, 4, 4)] * 2, [3] * 8),
        ([(4096, 4096)] * 100, [1] * 100),
    ],
    ids=["many small", "few small", "stacks", "large"],
)
def test_small_matrices_stay_together_as_long_as_there_is_enough_to_share_out(shapes, counts):
    assert [unit.count for unit in units_of(shapes)] == counts


def test_units_of_a_cpu_are_as_large_whoever_stores_their_matrices():
    stored = shards((16, 16), 1, Shard(0))
    matrices = [Matrix(i, (16, 16), stored, dtype=(torch.float32, torch.float64)[i % 2]) for i in range(80)]
    assert [unit.count for unit in make_units(matrices)] == [10] * 8
    assert {len({matrix % 2 for matrix, *_ in unit.ranges}) for unit in make_units(matrices)} == {1}


def test_units_fill_an_accelerator_several_times_over_and_fit_into_its_memory():
    counts = {}
    for unit in units_of(qwen3_06b(), True):
        assert 800 <= unit.count * 64 <= 2048  # tiles of 128 x 128 in a Gram matrix
        counts.setdefault(unit.shape, []).append(unit.count)
    assert all(max(of_shape) - min(of_shape) <= 1 for of_shape in counts.values())
    for unit in units_of(qwen3_30b_a3b(), True):
        assert 256 <= unit.count * (min(unit.shape) // 128) ** 2 <= 2048
    assert all(unit.count == 1 for unit in units_of([(8192, 28672)] * 20, True))
    for shapes in (qwen3_06b(), qwen3_30b_a3b(2)):
        for unit in units_of(shapes, True, max_batch_bytes=2**26):
            assert unit.count == 1 or unit.numel * 6 <= 2**26


# A model, whether it is on accelerators, ranks, and the most work of a rank over the mean or the largest unit.
BALANCE = [
    *((llama_70b, False, ranks, 1.05) for ranks in (8, 64, 256, 1024)),
    *((qwen3_235b_a22b, False, ranks, 1.05) for ranks in (8, 64, 256, 1024)),
    (qwen3_06b, True, 2, 1.1),
    (qwen3_06b, True, 8, 1.4),
    (qwen3_30b_a3b, True, 8, 1.05),
    (qwen3_30b_a3b, True, 16, 1.05),
    (qwen3_30b_a3b, True, 64, 1.1),
    (qwen3_235b_a22b, True, 64, 1.05),
    (llama_70b, True, 8, 1.05),
    (llama_70b, True, 64, 1.05),
]


@pytest.mark.first_tier("llama_70b-False-(8|64)-|qwen3_06b|qwen3_30b_a3b-True-8-")
@pytest.mark.second_tier("llama_70b|qwen3_06b|qwen3_30b|-True-|False-64")
@pytest.mark.parametrize(("model", "accelerated", "ranks", "bound"), BALANCE)
def test_ranks_have_about_the_same_work_and_what_one_stores_whole_stays_there(model, accelerated, ranks, bound):
    shapes = model()
    units = units_of(shapes, accelerated, ranks)
    costs = sorted({unit.cost for unit in units})
    least = sum(unit.cost for unit in units) / ranks
    if not accelerated:
        least = max(least, costs[-1])
    if (model, ranks) == (llama_70b, 256):
        # 240 large matrices and 160 of 3/8 their cost: some rank owns one of each, or four of the small ones.
        least = min(costs[-1] + costs[-2], 4 * costs[-2])
    assert max(loads(units, assign_owners(units, ranks), ranks)) <= bound * least
    holders = [unit.holders for unit in units]
    owners = assign_owners(units, ranks, holders)
    assert accelerated or max(loads(units, owners, ranks)) <= bound * least
    if model.__name__.startswith("qwen3_") and model is not qwen3_06b and ranks <= 64:
        stays = [owner in holding for owner, holding in zip(owners, holders, strict=True) if holding]
        assert all(stays)
        assert len(stays) >= sum(unit.shape == shapes[-1][-2:] for unit in units)


def test_a_unit_that_one_rank_stores_stays_there_as_long_as_others_have_their_share():
    units = units_of([(64, 64)] * 6)
    assert assign_owners(units, 3, [(2,), (1,), (2,), (0,), (1,), (0,)]) == [2, 1, 2, 0, 1, 0]
    units = units_of([(64, 64)] * 8)
    for holders in ([(3,)] * 8, [(0, 1, 2, 3)] * 8, ()):  # that all ranks store a unit says nothing
        assert Counter(assign_owners(units, 4, holders)) == dict.fromkeys(range(4), 2)
    assert assign_owners([], 4) == []


@pytest.mark.second_tier("llama")
@pytest.mark.parametrize(
    ("model", "accelerated", "ranks", "slack"), [(llama_70b, False, 64, 1.05), (qwen3_235b_a22b, True, 1024, 1.3)]
)
def test_owners_work_at_the_same_time_whatever_the_bound(model, accelerated, ranks, slack):
    shapes = model()
    units = units_of(shapes, accelerated, ranks)
    owners = assign_owners(units, ranks, [unit.holders for unit in units])
    owned = [replace(unit, owner=owner) for unit, owner in zip(units, owners, strict=True)]
    rounds = Schedule(owned, 5, ranks, torch.float32, 2**28).rounds(range(len(shapes)), 4)
    span = sum(max(loads(each.units, [unit.owner for unit in each.units], ranks)) for each in rounds)
    assert span <= slack * max(loads(units, owners, ranks))


@pytest.mark.parametrize("ranks", [2, 64])
def test_an_owner_holds_directions_for_all_ranks_once(ranks):
    unit = Unit((4, 6), (MatrixRange(0, 0, 1, shards((4, 6), ranks, Replicate())),))
    (planned,) = Schedule([unit], 0, ranks, torch.float32, 2**20).planned([0], 2)
    # The update, as it is computed and as it has arrived; directions, here and on their way.
    assert (planned.gather, planned.back) == (24 * (4 + 4), 24 * (2 + 2))
