"""PyTorch's own cases for `torch.distributed.checkpoint.state_dict`, with `Muon` instead of Adam."""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed import lacking_cases
from tests.distributed import state_dict_cases as cases

LAYOUTS = [
    ("single", 1),
    *((layout, 2) for layout in ("ddp", "replicate", "fsdp", "fsdp-keep", "compiled", "checkpointed", "tp")),
    ("hsdp", 4),
]


WHAT_LACKS = [
    ("two.down.weight momentum_buffer", r"two.down.weight \(10, 14\) lacks \['momentum_buffer'\]"),
    ("shift exp_avg_sq", r"shift \(10,\) lacks \['exp_avg_sq'\]"),
    ("shift step", r"shift \(10,\) lacks \['step'\]"),
    ("two.down.weight", r"two.down.weight \(10, 14\) lacks \['momentum_buffer'\]"),
]
"""What a whole state lacks, and what the error must say."""


@pytest.fixture
def run(pools):
    def run(function, ranks, **options):
        return [function(0, **options)] if ranks == 1 else pools[ranks].run(function, **options)

    return run


@pytest.mark.first_tier("(single-1|ddp-2|tp-2|compiled-2)-nested|(fsdp-2|hsdp-4)-flattened")
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


def test_initial_lr_comes_along(run):
    before, after = run(cases.scheduled, 2, layout="fsdp")[0]  # torch gives only rank 0 the values of the groups
    assert not any(before)
    assert set(after) == {1e-2}


@pytest.mark.parametrize(("full", "broadcast"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("empty", [False, True], ids=["two", "one-empty"])
def test_param_groups(run, empty, full, broadcast):
    options = {"layout": "tp", "empty": empty, "full": full, "broadcast": broadcast}
    assert run(cases.groups_of_their_own, 2, **options) == [True, True]


@pytest.mark.first_tier("^(all-single|broadcast-fsdp)-nested|broadcast-fsdp-flattened-shift step")
@pytest.mark.parametrize(("lacks", "error"), WHAT_LACKS, ids=[lacks for lacks, _ in WHAT_LACKS])
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("case", ["all-single", "all-ddp", "all-fsdp", "broadcast-ddp", "broadcast-fsdp"])
def test_whole_states_that_lack_moments_are_refused(run, case, flatten, lacks, error):
    """Expect an error, and not the moments of the optimizer that loads: zeros, or those of other steps."""
    readers, layout = case.split("-")
    options = {"layout": layout, "names": [lacks], "flatten": flatten, "broadcast": readers == "broadcast"}
    for steps in (0, 2):
        results = run(lacking_cases.load_without, 1 if layout == "single" else 2, steps=steps, **options)
        assert len({message for message, _ in results}) == 1
        assert re.search(rf"{error} \[moments-missing\]", results[0][0])


def test_no_option_of_torch_loads_a_state_that_lacks_moments(run):
    options = {"layout": "fsdp", "names": ["two.down.weight"], "broadcast": True, "strict": False}
    for message, _ in run(lacking_cases.load_without, 2, **options):
        assert re.search(r"two.down.weight.*\[moments-missing\]", message)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
def test_whole_states_without_counts_of_groups_take_those_of_adamw(run, tensor_lr):
    """Load as the oldest format, which has none: those of the optimizer that loads have nothing to do with it."""
    options = {"layout": "fsdp", "names": ["groups step"], "broadcast": True, "tensor_lr": tensor_lr}
    for steps in (0, 2):
        for message, states in run(lacking_cases.load_without, 2, steps=steps, **options):
            assert message is None
            assert cases.differences(*states, torch.equal) == []


def test_whole_states_of_another_optimizer_are_refused(run):
    options = {"layout": "fsdp", "names": ["groups use_muon"], "broadcast": True}
    for message, _ in run(lacking_cases.load_without, 2, **options):
        assert "[foreign-state]" in message


@pytest.mark.parametrize(("full", "broadcast"), [(False, False), (True, False), (True, True)])
def test_moments_of_parameters_that_are_frozen_by_now_are_loaded(run, full, broadcast):
    results = run(lacking_cases.load_after_freezing, 2, full=full, broadcast=broadcast)
    assert results == [([], (False, True))] * 2


@pytest.mark.parametrize("broadcast", [False, True], ids=["all", "broadcast"])
def test_a_whole_state_of_no_steps_needs_no_moments(run, broadcast):
    assert run(lacking_cases.load_before_the_first_step, 2, broadcast=broadcast) == [[], []]
