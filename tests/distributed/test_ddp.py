"""Ranks of DistributedDataParallel share the steps that it has reduced, however the optimizer was made.

Ranks import functions such as `loop` by name.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import pickle
import weakref
from collections import OrderedDict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel

from hf_muon import MuonOfGroups, build_optimizer
from hf_muon.diagnostics import log
from hf_muon.distributed import ddp
from tests.integrations.accelerate_cases import batches, counted, network, shared_steps

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32"}
ORDERS = ["ddp given", "ddp first", "optimizer first", "groups"]
STEPS = 6


def own_gradients(_, bucket):
    """Leave each rank its own gradients, as a communication hook; DDP refuses annotations that are texts."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def compiled_autograd():
    """Return a context in which backward passes are compiled."""
    from torch._dynamo.compiled_autograd import _enable

    return _enable(torch.compile(backend="eager"))


def group_of(rank, alone):
    """Return a `replicate_group` of this rank alone, which steps by the gradients that it finds, or none."""
    return [dist.new_group([other]) for other in range(dist.get_world_size())][rank] if alone else None


def made(order, **options):
    """Return a wrapped model and its optimizer, made in an order; "ddp given" is given to `build_optimizer`."""
    bare, options = network(), {**OPTIONS, **options}
    if order == "optimizer first":
        optimizer = build_optimizer(bare, **options)
        return DistributedDataParallel(bare), optimizer
    model = DistributedDataParallel(bare)
    if order == "groups":
        return model, MuonOfGroups(bare.parameters(), **options)
    return model, build_optimizer(model if order == "ddp given" else bare, **options)


def loop(rank, order, way="plain", alone=False):
    """Train; return weights, how many matrices this rank orthogonalized in each step, and whether ranks shared it.

    Args:
        rank: of this process.
        order: as of `made`.
        way: "plain"; "no_sync" around all but the step; "once" (the second step in `no_sync`); "closure"; "hook" or
            "known hook" of communication; "join" (rank 1 has one batch less); "evaluated by rank 0" (a forward pass
            without gradients before each step); "logged" (one with gradients before a step in `no_sync`); "compiled
            autograd" (the backward passes); "both" (one backward pass through two forward passes, one in `no_sync`);
            "saliency" (a gradient of outputs, in `no_sync` or not, that no parameter gets, before each step); "past"
            (from the second step on past the wrapper); "outside" (a parameter that the model does not have); "twice" (a
            second wrapper of the model), "copied" (another wrapper of a copy of the model).
        alone: as of `group_of`.
    """
    model, optimizer = made(order, replicate_group=group_of(rank, alone))
    if way == "outside":
        optimizer.add_param_group({"params": [("outside", nn.Parameter(torch.ones(3)))], "use_muon": False})
    elif way in ("hook", "known hook"):
        model.register_comm_hook(None, own_gradients if way == "hook" else fp16_compress_hook)
    elif way == "compiled autograd":
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):  # torch has no other for it
            model = DistributedDataParallel(model.module)
    bare = copy.deepcopy(model.module) if way == "copied" else model.module
    other = DistributedDataParallel(bare) if way in ("twice", "copied") else model
    other.require_backward_grad_sync = way != "copied"

    def gradients(rows, step):
        optimizer.zero_grad()
        local = way in ("no_sync", "logged", "saliency after no_sync") or (way == "once" and step == 1)
        with model.no_sync() if local else contextlib.nullcontext():
            logits = (model.module if way == "past" and step else model)(rows)
        if way == "both":
            with model.no_sync():
                logits = (logits + model(rows)) / 2
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten())
        compiling = compiled_autograd() if way == "compiled autograd" else contextlib.nullcontext()
        with compiling, model.no_sync() if local else contextlib.nullcontext():
            loss.backward()
        if way == "logged":
            model(rows)
        elif way.startswith("saliency"):
            with model.no_sync() if way == "saliency" else contextlib.nullcontext():
                output = model(rows)
                torch.autograd.grad(output.sum(), output)
        elif way == "evaluated by rank 0" and rank == 0:
            with torch.no_grad():
                model(rows)

    own_batches = [*batches(), *batches()][rank if way == "join" else 0 :]
    work = []
    joining = model.join() if way == "join" else contextlib.nullcontext()
    with counted() as counts, shared_steps() as shared, joining:
        for step, batch in enumerate(own_batches):
            rows = batch.chunk(dist.get_world_size())[rank]
            before = sum(counts)
            if way == "closure":
                optimizer.step(lambda rows=rows, step=step: gradients(rows, step))
            else:
                gradients(rows, step)
                optimizer.step()
            work.append(sum(counts) - before)
    return [param.detach().clone() for param in model.parameters()], work, shared


def run(pools, **case):
    """Return what ranks return, where weights must be as if each stepped by its gradients, and the work of a step."""
    alone, results = pools[2].run(loop, alone=True, **case), pools[2].run(loop, **case)
    for own, other in zip(results, alone, strict=True):
        assert all(map(torch.equal, own[0], other[0]))
    return results, alone[0][1][0]


@pytest.mark.first_tier("plain")
@pytest.mark.parametrize(
    ("order", "way"),
    [
        *((order, "plain") for order in ORDERS),
        ("ddp given", "closure"),
        ("ddp first", "known hook"),
        ("groups", "twice"),
        ("ddp first", "copied"),
        ("optimizer first", "evaluated by rank 0"),
        pytest.param("ddp first", "compiled autograd", marks=pytest.mark.nightly),
        ("ddp first", "both"),
        ("ddp first", "saliency"),
    ],
)
def test_steps_that_ddp_has_reduced_are_shared(pools, order, way):
    results, whole = run(pools, order=order, way=way)
    (weights, work, shared), (others, its_work, its_shared) = results
    assert shared == its_shared == [True] * STEPS
    for one, other in zip(work, its_work, strict=True):
        assert one + other == whole
        assert min(one, other) > 0
    assert all(map(torch.equal, weights, others))


@pytest.mark.parametrize(("order", "way"), [*((order, "once") for order in ORDERS), ("ddp first", "past")])
def test_a_step_in_no_sync_and_those_after_it_are_each_ranks_own(pools, order, way):
    """Ranks that have moments of their own cannot take one rank's directions any more."""
    results, whole = run(pools, order=order, way=way)
    for _, work, shared in results:
        assert shared == [True, *[False] * (STEPS - 1)]
        assert work[0] < whole
        assert work[1:] == [whole] * (STEPS - 1)
    assert not torch.equal(results[0][0][1], results[1][0][1])


@pytest.mark.parametrize("way", ["no_sync", "logged", "saliency after no_sync", "hook", "join", "outside"])
def test_other_steps_are_not_shared(pools, way):
    results, whole = run(pools, order="ddp given", way=way)
    for _, work, shared in results:
        assert not any(shared)
        assert set(work) == {whole}


def parted(rank):
    """Step in `no_sync`, step a copy, load the state, and step; return warnings, and whether steps were shared."""
    model, optimizer = made("ddp first")
    rows = batches()[0].chunk(dist.get_world_size())[rank]
    lines = []
    with shared_steps() as shared, mock.patch.object(log.logger(), "warning", lines.append):
        for way in ("no_sync", "plain", "plain", "copied", "loaded"):
            optimizer.zero_grad()
            with model.no_sync() if way == "no_sync" else contextlib.nullcontext():
                nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten()).backward()
            if way == "loaded":
                optimizer.load_state_dict(optimizer.state_dict())
            (copy.copy(optimizer) if way == "copied" else optimizer).step()
    return lines, shared


def test_that_ranks_part_is_said_once_and_ends_with_a_load(pools):
    (first, shared), (other, others) = pools[2].run(parted)
    assert first == [ddp.PARTED]
    assert other == []
    assert shared == others == [False, False, False, False, True]


def state_of_one(rank):
    """Evaluate and ask for the optimizer's state on rank 0 alone, then train; return whether weights have moved."""
    model, optimizer = made("ddp first")
    if rank == 0:
        with torch.no_grad():
            model(batches()[0])
        saved = get_optimizer_state_dict(model.module, optimizer)["state"]
        assert saved["1.weight"]["momentum_buffer"].count_nonzero() == 0, list(saved)
    rows = batches()[0].chunk(dist.get_world_size())[rank]
    before = [param.detach().clone() for param in model.parameters()]
    nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten()).backward()
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1] * len(optimizer.param_groups)
    return [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]


def test_one_rank_can_ask_for_state_before_the_first_step(pools):
    """As the one that saves a checkpoint does: torch then takes a step with gradients of zero."""
    first, other = pools[2].run(state_of_one)
    assert all(first)
    assert all(other)


def two_models(rank, optimizers, alone=False):
    """Step two wrapped models with an optimizer each, or with one; return the weights and whether steps were shared."""
    group = group_of(rank, alone)
    models = [DistributedDataParallel(network()), DistributedDataParallel(network())]
    own = models if optimizers == 2 else [nn.ModuleList(models)]
    steps = [build_optimizer(model, replicate_group=group, **OPTIONS).step for model in own]
    with shared_steps() as shared:
        for batch in batches():
            rows = batch.chunk(dist.get_world_size())[rank]
            logits = models[0](rows) + models[1](rows.flip(0))
            nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten()).backward()
            for step in steps:
                step()
            for model in models:
                model.zero_grad()
    return [param.detach().clone() for model in models for param in model.parameters()], shared


@pytest.mark.parametrize("optimizers", [1, 2])
def test_two_models_with_an_optimizer_each_or_with_one(pools, optimizers):
    results = pools[2].run(two_models, optimizers=optimizers)
    alone = pools[2].run(two_models, optimizers=optimizers, alone=True)
    for weights, shared in results:
        assert set(shared) == {optimizers == 2}
        assert all(map(torch.equal, weights, alone[0][0]))


# --- which wrapper holds an optimizer's parameters


@pytest.fixture
def alone():
    """Initialize a process group of this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_wrappers_from_before_the_import_are_found(alone, monkeypatch):
    class Odd:
        @property
        def __class__(self):
            raise ReferenceError

    bare, odd = nn.Linear(3, 3), Odd()
    monkeypatch.setattr(torch_module, "_global_module_registration_hooks", OrderedDict())
    wrapper = DistributedDataParallel(bare)
    assert ddp.Replicas().of_step(list(bare.parameters())) is None
    spec = importlib.util.spec_from_file_location("fresh_ddp", ddp.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.Replicas().of_step(list(bare.parameters())) is wrapper
    assert type(odd) is Odd


def test_copies_and_pickles_of_a_wrapper_do_not_need_us(alone):
    wrapper = DistributedDataParallel(nn.Linear(3, 3))
    content = pickle.dumps(wrapper)
    assert b"hf_muon" not in content
    for other in (pickle.loads(content), copy.deepcopy(wrapper)):
        other(torch.ones(3)).sum().backward()
        assert not any(param._post_accumulate_grad_hooks for param in copy.deepcopy(other.module).parameters())
    params = list(wrapper.module.parameters())
    assert all(len(param._post_accumulate_grad_hooks) == 1 for param in params)
    del wrapper
    gc.collect()
    assert not any(param._post_accumulate_grad_hooks for param in params)


def test_a_wrapper_is_neither_kept_alive_nor_asked_after_its_process_group(alone):
    bare = nn.Linear(3, 3)
    replicas, params = ddp.Replicas(), list(bare.parameters())
    failed = DistributedDataParallel.__new__(DistributedDataParallel)  # its `__init__` has raised an error
    nn.Module.__init__(failed)
    failed.process_group, failed.module = dist.group.WORLD, bare
    assert replicas.of_step(params) is None

    def of_pass(wrapper):
        wrapper(torch.ones(3)).sum().backward()
        return replicas.of_step(params)

    wrapper = DistributedDataParallel(bare)
    assert of_pass(wrapper) is wrapper
    dist.destroy_process_group()
    assert replicas.of_step(params) is None
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert replicas.of_step(params) is None
    wrapper = DistributedDataParallel(bare)
    assert of_pass(wrapper) is wrapper
    assert replicas.of_step(params) is None  # those gradients have been stepped
    of = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert of() is None
