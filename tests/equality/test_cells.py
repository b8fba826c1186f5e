"""Cells of every layout, model, dtype and rule: see the package for what a cell is and what is checked.

Arrays hold each pair of values of two fields that can go together at least once, and the first tier each value.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.equality.cells import LAST, RULES, Cell, few_first, pairwise
from tests.equality.checks import check, is_valid
from tests.equality.layouts import PLACES
from tests.equality.runs import alone, run, started, train

SOME_RULES = ["plain", "together", "original", "others", "watched", "nearest"]
# Where state goes on, of those on 2 and on 4 ranks: other numbers of ranks, other layouts, and one process.
THEN = ["single-1", "fsdp-2", "tp-2", "ddp-2", "hsdp-4", "fsdp-tp-4"]


ALL = {
    "dtype": ["float32", "bfloat16", "float16"],
    "momentum": ["auto", "bf16", "int8"],
    "adamw": ["auto", "bf16", "int8"],
    "batch": [0, 1, 1125],
    "missing": [False, True],
    "numbers": ["cpu", "gpu"],
    "form": ["sharded", "full", "flat"],
    "fault": ["nan", "inf", "option", "lr", "step"],
}
OFTEN = [f"{layout}-2" for layout in ("ddp", "fsdp", "tp", "accelerate", "mixed")] + ["hsdp-4", "fsdp-tp-4"]
SELDOM = [f"{layout}-{ranks}" for ranks, layouts in PLACES.items() for layout in layouts]


def array(places, **values):
    """Return cells in which all pairs of values meet."""
    rows = {"place": places, "model": ["small", "wide", "aligned"], "rule": SOME_RULES}
    return pairwise({**rows, **ALL, **values}, is_valid)


FIRST = array(OFTEN, then=THEN[:3])
REST = array([place for place in SELDOM if place not in OFTEN], then=THEN)


@pytest.mark.promise("ddp", "fsdp2", "hsdp", "tensor-parallel", "exact-resume", "other-layout", "rules")
@pytest.mark.parametrize("cell", [*few_first(FIRST), *few_first(REST, pytest.mark.extended)], ids=str)
def test_pairs_of_values(pools, cell, tmp_path):
    check(cell, pools, str(tmp_path))


NAMED = {
    "three ranks": Cell(place="copies-3", rule="together", fault="missing"),
    "three ranks, sharded": Cell(place="placed-fsdp-3", model="wide", momentum="int8", fault="nan"),
    "a shard without elements": Cell(place="emptied-4", fault="nan", then="single-1"),
    "strided shards": Cell(place="odd-4", rule="together"),
    "rows that two ranks cut": Cell(place="last-2", model="aligned", momentum="int8", adamw="int8"),
    "rows of stacks": Cell(place="middle-2", model="aligned", momentum="int8"),
    "experts on a mesh of their own": Cell(place="experts-4", rule="together", momentum="bf16", then="single-1"),
    "directions that are not orthogonal": Cell(place="fsdp-tp-4", rule="sinkhorn", then="single-1"),
    "no gradient on one replica": Cell(place="ddp-2", fault="missing"),
    **{
        f"{grads} gradients of {dtype} weights": Cell(place="fsdp-tp-row-4", dtype=dtype, grad_dtype=grads)
        for dtype, grads in (("bfloat16", "float32"), ("bfloat16", "float16"), ("float32", "bfloat16"))
    },
}


@pytest.mark.first_tier("rows|bfloat16 gradients|no gradient")
@pytest.mark.parametrize("cell", NAMED.values(), ids=NAMED)
def test_named(pools, cell, tmp_path):
    if cell.grad_dtype and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has one dtype for both")
    check(cell, pools, str(tmp_path))


# --- controls: the checks see what they are for


@pytest.mark.nightly
def test_every_rule_changes_the_result():
    results = {
        rule: alone(Cell(dtype="bfloat16", rule=rule))["last"] for rule in RULES if rule not in ("watched", "travels")
    }
    for (one, first), (other, second) in itertools.combinations(results.items(), 2):
        assert any(first[name] != second[name] for name in first if name in second and "m0 " in name), (one, other)


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted(RULES["together"]))
def test_each_option_of_all_together_changes_the_result(name, monkeypatch):
    monkeypatch.setitem(RULES, "less", {key: value for key, value in RULES["together"].items() if key != name})
    assert run(0, Cell(rule="less"), "")["last"] != alone(Cell(rule="together"))["last"]


def test_updates_that_travel_in_bf16_are_near_and_the_checks_see_it(pools, tmp_path):
    """Rounding an update rotates small singular directions: this path is noisy, not bit-identical."""
    cell = Cell(place="fsdp-2", rule="travels")
    with pytest.raises(AssertionError, match=r"python -m tests\.equality place=fsdp-2 rule=travels"):
        check(cell, pools, str(tmp_path))
    one, other = pools[2].run(distance, cell=cell)
    assert one == other
    assert 0 < one < 0.05


def distance(rank, cell):
    """Return how far a weight is at most from that of one process, divided by how far that has moved."""
    with started(cell, rank, "") as layout, started(cell.alone(), 0, "") as single:
        start = single.tensors()
        for each in (layout, single):
            train(each, 0, LAST)
        mine, exact = layout.tensors(), single.tensors()
        keys = [key for key in exact if key.endswith("weight") and key.startswith("m")]
        return max(float((mine[key] - exact[key]).norm() / (exact[key] - start[key]).norm()) for key in keys)
