"""Random models in random settings of ZeRO with equal gradients: bit-identical to one process.

The test compares whole weights, and master weights and moments as each rank stores them. Gradients are equal on both
ranks, so that the sums that DeepSpeed rounds are exact; `test_training` has batches that the ranks share.
HF_MUON_CHAOS_MODELS sets the number of models, HF_MUON_CHAOS_SEED the first seed: both are for long runs by hand.
"""

from __future__ import annotations

import os

import pytest

from tests.deepspeed.chaos import CELLS, ZeroModel, compare

pytestmark = pytest.mark.usefixtures("quiet")

MODELS = int(os.environ.get("HF_MUON_CHAOS_MODELS", "210"))
FIRST = int(os.environ.get("HF_MUON_CHAOS_SEED", "0"))


def seeds_of(cell):
    """Return the models of a cell. ZeRO-3 has fewer, because its engine takes ten times as long as others."""
    residues = (0, 2, 3) if cell[0] != "3" else (0,)
    return [seed for seed in range(FIRST, FIRST + MODELS) if (seed + CELLS.index(cell)) % len(CELLS) in residues]


@pytest.mark.extended(but="^1$")
@pytest.mark.parametrize("cell", CELLS)
def test_every_stage_gives_the_bits_of_one_process(ranks, cell):
    seeds = seeds_of(cell)
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    for rank, differences in enumerate(ranks.run(compare, runs=[(seed, cell) for seed in seeds])):
        assert not differences, f"rank {rank}, {len(differences)} in all: " + "\n".join(differences[:5])


def test_the_models_are_of_every_kind():
    models = [ZeroModel(seed, CELLS[seed % len(CELLS)]) for seed in range(210)]
    texts = " ".join(map(repr, models))
    for word in (
        "rows",
        "columns",
        "transposed",
        "flat",
        "bfloat16",
        "'bf16'",
        "auto",
        "'round_robin_gradients': True",
    ):
        assert word in texts
    assert {model.bounds.get("max_batch_bytes") for model in models} >= {None, 1}
    assert {model.zero.get("sub_group_size") for model in models} == {None, 1, 100, 10**9}
    assert any(model.missing for model in models)
