"""On a GPU all ranks together orthogonalize the batches of one process, in every layout: counted, on the meta device.

Products round differently in batches of other sizes, so this is what equal bits rest on. Nothing is computed here: the
step's own code runs for every rank of a fake process group, with real models, and Newton-Schulz notes what it is given.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from unittest import mock

import pytest
import torch.distributed as dist
from allpairspy import AllPairs

from hf_muon import build_optimizer
from hf_muon.distributed.exchange import Exchange
from hf_muon.optimizer import diagnostics
from tests.distributed.test_work import assert_overlap, logged
from tests.support import fake_layouts
from tests.support.accelerated import META, as_accelerator
from tests.support.count import counting
from tests.support.fake_layouts import DTYPES, mesh_of, meta_model, rank_of, shard_, zero_step

DENSE, SMALL, EXPERTS = "Qwen3-0.6B", "Qwen3-0.6B, 2 layers", "Qwen3-30B-A3B, 2 layers"
LLAMA = "Llama-3.1-8B, 4 layers"
LAYOUTS = ["DDP", "FSDP2", "HSDP", "FSDP2 and TP", "ZeRO-1 or 2", "ZeRO-3"]
OPTIONS = {
    "plain": {},
    "watched": {"diagnostics_every": 1},
    "rule": {"normalize": "rows"},
    "watched rule": {"diagnostics_every": 1, "normalize": "rows"},
    "bf16 products": {"ns_dtype": "bf16"},
    "fp32 products": {"ns_dtype": "fp32"},  # units are split
}
MODULE = importlib.import_module("hf_muon.math.newton_schulz")


def step_of(model, layout, ranks, options):
    """Return the step of this rank, which stores the model in some layout."""
    if layout.startswith("ZeRO"):
        return zero_step(model, options, 3 if layout == "ZeRO-3" else 2, META)
    if layout not in ("one process", "DDP"):
        shard_(model, layout, mesh_of(layout, ranks), META)
    return build_optimizer(model, options, replicate_group=dist.group.WORLD if layout == "DDP" else None).step


def one_number_each(matrices):
    return matrices.new_empty(len(matrices))


def calls_of_rank(model, layout, ranks, rank, options):
    """Return what one rank asks Newton-Schulz for in a step, each with its number."""
    calls = Counter()

    def noted(matrices, coefficients, dtype, *, form, overwrite, out=None):
        is_aligned = matrices.is_contiguous() and not matrices.storage_offset() * matrices.dtype.itemsize % 256
        calls[tuple(matrices.shape), matrices.dtype, coefficients, dtype, form, overwrite, is_aligned] += 1
        return matrices.to(dtype) if out is None else out

    with (
        rank_of(ranks, rank),
        counting() as count,
        as_accelerator(count),
        mock.patch.object(diagnostics, "has_data", return_value=True),
        mock.patch.object(diagnostics, "orthogonality_error", one_number_each),
        mock.patch.object(diagnostics.Diagnostics, "_read", return_value={}),
        mock.patch.object(MODULE, "newton_schulz", noted),
    ):
        weights = "fp32" if layout.startswith("ZeRO") else "bf16"
        step_of(meta_model(model, DTYPES[weights]), layout, ranks, options)()
    return calls


def calls(model, layout, ranks, options):
    options = {"lr": 1e-3, "ns_dtype": "fp16", **options}
    return sum((calls_of_rank(model, layout, ranks, rank, options) for rank in range(ranks)), Counter())


@pytest.mark.first_tier("Qwen3-0.6B-FSDP2-2$")
@pytest.mark.second_tier("FSDP2-2$|ZeRO")
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("layout", ["FSDP2", "HSDP", "ZeRO-3"])
@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_the_next_updates_travel_while_batches_are_orthogonalized(model, layout, ranks):
    with logged(Exchange) as log:
        calls_of_rank(model, layout, ranks, 0, {"lr": 1e-3, "ns_dtype": "fp16"})
    assert_overlap(log)
    assert len([k for what, k in log if what == "gather" and k]) > 1 or ranks == 8 or layout == "HSDP"


@functools.cache
def of_one_process(model, ns_dtype):
    return calls(model, "one process", 1, {"ns_dtype": ns_dtype})


FIRST = [
    *((DENSE, "one process", 1, name) for name in ("watched", "rule")),
    *((DENSE if layout == "FSDP2" else SMALL, layout, 2, "plain") for layout in LAYOUTS),
    (EXPERTS, "FSDP2", 2, "watched rule"),
    (LLAMA, "FSDP2", 2, "fp32 products"),
]
# Each pair of a layout, a number of ranks, a model and an option.
PAIRS = AllPairs([["one process", *LAYOUTS], list(OPTIONS), [DENSE, EXPERTS, LLAMA], [2, 8]])
CASES = [(model, layout, 1 if layout == "one process" else ranks, name) for layout, name, model, ranks in PAIRS]


@pytest.mark.first_tier("Qwen3-0.6B-FSDP2-2-plain")
@pytest.mark.second_tier("FSDP2|HSDP|ZeRO-3")
@pytest.mark.parametrize(
    "case",
    [*FIRST, *(pytest.param(case, marks=pytest.mark.nightly) for case in CASES if case not in FIRST)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_all_ranks_together_orthogonalize_what_one_process_does(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # into which metrics are written
    model, layout, ranks, name = case
    expected = of_one_process(model, OPTIONS[name].get("ns_dtype", "fp16"))
    assert all(overwrite and is_aligned for *_, overwrite, is_aligned in expected)
    monkeypatch.setattr(fake_layouts, "SUB_GROUP", 10**10)  # a rank of ZeRO-3 steps all that it stores at once
    assert calls(model, layout, ranks, OPTIONS[name]) == expected


@pytest.mark.extended
def test_sub_groups_of_zero_3_have_batches_of_their_own_unless_each_matrix_has_one():
    whole, cut = (calls("Llama-3.1-8B", *layout, {}) for layout in (("one process", 1), ("ZeRO-3", 2)))
    assert whole != cut
    one, other = (
        Counter(shape[1:] for (shape, *_), count in each.items() for _ in range(count * shape[0]))
        for each in (whole, cut)
    )
    assert one == other
    alone = {"max_batch_bytes": 1}
    assert calls("Llama-3.1-8B", "one process", 1, alone) == calls("Llama-3.1-8B", "ZeRO-3", 2, alone)
