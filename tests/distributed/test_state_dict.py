"""PyTorch's own cases for `torch.distributed.checkpoint.state_dict`, with `Muon` instead of Adam."""

from __future__ import annotations

import pytest

from tests.distributed import state_dict_cases as cases

LAYOUTS = [
    ("single", 1),
    *((layout, 2) for layout in ("ddp", "replicate", "fsdp", "fsdp-keep", "compiled", "checkpointed", "tp")),
    ("hsdp", 4),
]


@pytest.fixture
def run(pools):
    def run(function, ranks, **options):
        return [function(0, **options)] if ranks == 1 else pools[ranks].run(function, **options)

    return run


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_save_and_load(run, layout, ranks, flatten):
    for wrong, twice in run(cases.save_and_load, ranks, layout=layout, flatten=flatten):
        assert wrong == []
        assert twice == [True] * 4


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
def test_tied_weights(run, flatten):
    for wrong, twice in run(cases.save_and_load, 2, layout="fsdp", tied=True, flatten=flatten):
        assert wrong == []
        assert twice == [True] * 4


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_frozen_parameters_are_left_out(run, layout):
    for wrong, _ in run(cases.save_and_load, 2, layout=layout, frozen=True):
        assert wrong == []


@pytest.mark.parametrize(("layout", "ranks"), [("fsdp", 2), ("hsdp", 4)])
def test_broadcast_from_rank_0(run, layout, ranks):
    assert run(cases.from_one_layout, ranks, layout=layout) == [(True, True)] * ranks


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_whole_state_on_the_cpu(run, layout):
    assert run(cases.whole_and_offloaded, 2, layout=layout) == [True, True]


def test_initial_lr_comes_along(run):
    before, after = run(cases.scheduled, 2, layout="fsdp")[0]  # torch gives only rank 0 the values of the groups
    assert not any(before)
    assert set(after) == {1e-2}


def test_flattened_and_nested_load_alike(run):
    assert run(cases.flattened_or_not, 2, layout="fsdp") == [[True] * 3] * 2


@pytest.mark.parametrize(("full", "broadcast"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("empty", [False, True], ids=["two", "one-empty"])
def test_param_groups(run, empty, full, broadcast):
    options = {"layout": "tp", "empty": empty, "full": full, "broadcast": broadcast}
    assert run(cases.groups_of_their_own, 2, **options) == [True, True]
