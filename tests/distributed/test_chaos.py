"""Random models in random layouts are bit-identical to one process when gradients are equal.

For long runs by hand, HF_MUON_CHAOS_MODELS sets the number of models, HF_MUON_CHAOS_SEED the seed of the first one.
"""

from __future__ import annotations

import os

import pytest

from tests.distributed.chaos import LAYOUTS, Model, compare, narrow

MODELS = int(os.environ.get("HF_MUON_CHAOS_MODELS", "200"))
FIRST = int(os.environ.get("HF_MUON_CHAOS_SEED", "0"))
# The number of layouts to try for each model, by the number of ranks.
TRIED = {2: 2, 4: 2}
PARTS = 4


def runs_of(ranks):
    """Return pairs of a seed and a layout, with the layouts in turns."""
    layouts = LAYOUTS[ranks]
    return [
        (seed, layouts[(seed * TRIED[ranks] + k) % len(layouts)])
        for seed in range(FIRST, FIRST + MODELS)
        for k in range(TRIED[ranks])
    ]


@pytest.mark.extended(but="2-0")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_gives_the_bits_of_one_process(pools, ranks, part):
    for rank, differences in enumerate(pools[ranks].run(compare, runs=runs_of(ranks)[part::PARTS])):
        assert not differences, f"rank {rank}, {len(differences)} in all: " + "\n".join(differences[:5])


def test_the_models_are_of_every_kind():
    models = [Model(seed) for seed in range(200)]
    texts = " ".join(map(repr, models))
    for word in ("rows", "columns", "transposed", "flat", "bfloat16", "float16", "float64", "int8", "'bf16'", "auto"):
        assert word in texts
    for ranks in (2, 4):
        tried = [layout for _, layout in runs_of(ranks)]
        assert all(tried.count(layout) >= 30 for layout in LAYOUTS[ranks]) or MODELS < 200
    assert {model.bounds.get("max_batch_bytes") for model in models} >= {None, 1}
    assert any(model.missing for model in models)


def test_a_dim_of_which_tensor_parallelism_leaves_nothing(pools):
    """Let torch shard the layers: it stores an empty shard in a shape of its own."""
    assert pools[4].run(narrow) == [[]] * 4
