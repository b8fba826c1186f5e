"""Ranks of DistributedDataParallel share the steps that it has reduced, however the optimizer was made."""

from __future__ import annotations

import gc
import importlib.util
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel

from hf_muon.distributed import ddp
from tests.distributed.ddp_cases import loop, two_models

ORDERS = ["ddp given", "ddp first", "optimizer first", "groups"]
STEPS = 6


def run(pools, **case):
    """Run a case, and the same where each rank steps by the gradients that it finds; their weights must be equal."""
    alone, results = pools[2].run(loop, alone=True, **case), pools[2].run(loop, **case)
    for own, other in zip(results, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own["weights"], other["weights"], strict=True))
    return results, alone[0]["work"][0]


@pytest.mark.parametrize(
    ("order", "way"),
    [
        *((order, "plain") for order in ORDERS),
        ("optimizer first", "accumulating"),
        ("ddp given", "closure"),
        ("ddp first", "known hook"),
        ("groups", "twice"),
        ("ddp first", "copied"),
    ],
)
def test_steps_that_ddp_has_reduced_are_shared(pools, order, way):
    results, whole = run(pools, order=order, way=way)
    assert [result["shared"] for result in results] == [[True] * STEPS] * 2
    for work in zip(*(result["work"] for result in results), strict=True):
        assert sum(work) == whole
        assert min(work) > 0
    assert all(torch.equal(a, b) for a, b in zip(*(result["weights"] for result in results), strict=True))


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_in_no_sync_and_those_after_it_are_each_ranks_own(pools, order):
    """Ranks that have moments of their own cannot take one rank's directions any more."""
    results, whole = run(pools, order=order, way="once")
    for result in results:
        assert result["shared"] == [True, *[False] * (STEPS - 1)]
        assert result["work"][0] < whole
        assert result["work"][1:] == [whole] * (STEPS - 1)
    assert not torch.equal(results[0]["weights"][1], results[1]["weights"][1])


@pytest.mark.parametrize("way", ["no_sync", "hook", "join", "outside"])
def test_other_steps_are_not_shared(pools, way):
    results, whole = run(pools, order="ddp given", way=way)
    for result in results:
        assert not any(result["shared"])
        assert set(result["work"]) == {whole}


def test_two_models_with_an_optimizer_each_or_with_one(pools):
    for optimizers in (2, 1):
        results = pools[2].run(two_models, optimizers=optimizers)
        alone = pools[2].run(two_models, optimizers=optimizers, alone=True)
        assert {step for _, shared in results for step in shared} == {optimizers == 2}
        for weights, _ in results:
            assert all(torch.equal(a, b) for a, b in zip(weights, alone[0][0], strict=True))


@pytest.fixture
def alone():
    """Initialize a process group of this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_wrappers_from_before_the_import_are_found(alone):
    class Odd:
        @property
        def __class__(self):
            raise ReferenceError

    bare, odd = nn.Linear(3, 3), Odd()
    hooks = dict(torch_module._global_module_registration_hooks)
    torch_module._global_module_registration_hooks.clear()
    try:
        wrapper = DistributedDataParallel(bare)
        assert ddp.Replicas().of_step(list(bare.parameters())) is None
        spec = importlib.util.spec_from_file_location("fresh_ddp", ddp.__file__)
        fresh = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fresh)
    finally:
        torch_module._global_module_registration_hooks.clear()
        torch_module._global_module_registration_hooks.update(hooks)
    assert fresh.Replicas().of_step(list(bare.parameters())) is wrapper.process_group
    assert type(odd) is Odd


def test_a_wrapper_is_neither_kept_alive_nor_asked_after_its_process_group(alone):
    bare = nn.Linear(3, 3)
    replicas, params = ddp.Replicas(), list(bare.parameters())
    wrapper = DistributedDataParallel(bare)
    assert replicas.of_step(params) is wrapper.process_group
    dist.destroy_process_group()
    assert replicas.of_step(params) is None
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert replicas.of_step(params) is None
    wrapper = DistributedDataParallel(bare)
    assert replicas.of_step(params) is wrapper.process_group
    of = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert of() is None


def test_a_wrapper_that_could_not_be_made_is_none(alone):
    bare = nn.Linear(3, 3)
    failed = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(failed)
    failed.process_group = dist.group.WORLD
    failed.module = bare
    assert ddp.Replicas().of_step(list(bare.parameters())) is None
