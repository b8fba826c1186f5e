"""Copies and pickles of an optimizer keep its options, or raise an error."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_muon import Muon
from hf_muon.config import GROUP_OPTIONS, OPTIMIZER_OPTIONS


def other_value(option):
    """Return a value of an option other than its default."""
    if option.type.choices:
        return next(word for word in option.type.choices if word not in (option.default, "accelerator"))
    return {bool: lambda: not option.default, int: lambda: option.default + 3, type(None): lambda: "elsewhere.jsonl"}[
        type(option.default)
    ]()


OTHER = {name: other_value(option) for name, option in OPTIMIZER_OPTIONS.items()}


def stepped(**options):
    torch.manual_seed(0)
    weights, rest = [nn.Parameter(torch.randn(9, 20)) for _ in range(2)], [nn.Parameter(torch.randn(7))]
    optimizer = Muon([{"params": weights}, {"params": rest, "use_muon": False}], ns_dtype="fp32", **options)
    run(optimizer)
    return optimizer


def params(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def run(optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for param in params(optimizer):
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def pickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("way", [copy.deepcopy, pickled, copy.copy])
def test_every_option_is_carried_over(way, tmp_path):
    assert all(value != OPTIMIZER_OPTIONS[name].default for name, value in OTHER.items())
    optimizer = stepped(**OTHER, diagnostics_file=str(tmp_path / "elsewhere.jsonl"))
    twin = way(optimizer)
    assert {name: getattr(twin, name) for name in OTHER} == OTHER


@pytest.mark.parametrize("way", [copy.deepcopy, pickled, copy.copy])
@pytest.mark.parametrize("environment", [False, True])
def test_a_copy_does_not_write_into_the_originals_file(way, environment, tmp_path, monkeypatch):
    """Compare with a run that is not copied."""
    if environment:
        monkeypatch.setenv("HF_MUON_DIAGNOSTICS_EVERY", "1")
    files = [tmp_path / name for name in ("alone", "copied")]
    for file in files:
        optimizer = stepped(diagnostics_file=str(file), **({} if environment else {"diagnostics_every": 1}))
        if file is files[1]:
            twin = way(optimizer)
            run(twin, 5)
            optimizer = twin if way is copy.copy else optimizer
            assert twin.metrics is None
        if way is not copy.copy:
            run(optimizer, 1)
    counts = [len([line for line in file.read_text().splitlines() if line]) for file in files]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
def test_a_copy_steps_alike(way, momentum_dtype):
    optimizer = stepped(momentum_dtype=momentum_dtype, max_batch_bytes=1)
    twin = way(optimizer)
    for seed in (1, 2):
        run(optimizer, seed)
        run(twin, seed)
    assert all(torch.equal(a, b) for a, b in zip(params(optimizer), params(twin), strict=True))


@pytest.mark.parametrize("name", [*GROUP_OPTIONS, *OPTIMIZER_OPTIONS])
def test_a_pickle_that_lacks_an_option_gets_its_default(name):
    """Load a pickle from before the option existed."""
    optimizer = stepped()
    state = optimizer.__getstate__()
    state.pop(name, None)
    state["defaults"] = {key: value for key, value in state["defaults"].items() if key != name}
    state["param_groups"] = [{k: v for k, v in group.items() if k != name} for group in state["param_groups"]]
    old = Muon.__new__(Muon)
    old.__setstate__(state)
    if name in OPTIMIZER_OPTIONS:
        assert getattr(old, name) == OPTIMIZER_OPTIONS[name].default
    else:
        assert [group[name] for group in old.param_groups] == [GROUP_OPTIONS[name].default] * 2
    run(old, 1)


def test_a_load_does_not_reset_options():
    optimizer = stepped(**OTHER)
    optimizer.load_state_dict(stepped().state_dict())
    assert {name: getattr(optimizer, name) for name in OTHER} == OTHER


def test_a_process_group_is_shared_by_copies_and_in_no_pickle():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = stepped(replicate_group=dist.group.WORLD)
        assert copy.deepcopy(optimizer).replicate_group is dist.group.WORLD
        with pytest.raises(RuntimeError, match=r"replicate_group cannot be pickled.*state_dict\(\)"):
            pickle.dumps(optimizer)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_what_deepspeed_steps_with_is_not_copied(way):
    optimizer = stepped()
    optimizer.partitioned.partitions, optimizer.partitioned.framework = {}, "DeepSpeed"
    with pytest.raises(RuntimeError, match=r"DeepSpeed steps with cannot be copied.*engine.save_checkpoint"):
        way(optimizer)
    optimizer.partitioned.partitions = None
    way(optimizer)
