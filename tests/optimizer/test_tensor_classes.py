"""Parameters of unknown tensor classes raise an error: their shape may be the shape of a shard."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_muon import Muon, build_optimizer, route_parameters
from hf_muon.config import MuonConfig
from hf_muon.ready_groups import MuonOfGroups

UNKNOWN = "test_tensor_classes.Shard, a class that hf_muon does not know"


class Shard(torch.Tensor):
    """A tensor like another framework's DTensor: its shape is the shape of its shard."""


class Tagged(nn.Parameter):
    """A subclass of Parameter without methods, which only tags a parameter."""


class Behaving(nn.Parameter):
    """A parameter with its own __torch_function__."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class BehavingTagged(Behaving):
    """A parameter that inherits its __torch_function__."""


class Dispatching(nn.Parameter):
    """A parameter with its own __torch_dispatch__."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DTensorBase(nn.Parameter):
    """A parameter class of another framework, named like a DTensor."""


class OfDTensor(DTensorBase):
    """A parameter that inherits from it."""


def shard(*shape, requires_grad=True):
    return torch.zeros(shape).as_subclass(Shard).requires_grad_(requires_grad)


def network(weight):
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    model[1]._parameters["weight"] = weight
    return model


def groups_of(model):
    return MuonOfGroups([{"params": list(model.parameters())}], MuonConfig())


@pytest.mark.parametrize(
    "build",
    [
        build_optimizer,
        groups_of,
        lambda model: Muon([model[1].weight]),
        lambda model: Muon([{"params": [model[1].weight], "use_muon": False}]),
    ],
    ids=["build_optimizer", "MuonOfGroups", "Muon", "AdamW group"],
)
def test_refused_by_its_class(build):
    model = network(shard(4, 6))
    with pytest.raises(RuntimeError, match=UNKNOWN):
        build(model)
    del model
    gc.collect()


def stepped(weight):
    """Return the weight after two steps by the same gradients."""
    generator = torch.Generator().manual_seed(0)
    optimizer = Muon([weight], lr=0.1)
    for _ in range(2):
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weight.detach().as_subclass(torch.Tensor)


def test_a_subclass_of_parameter_is_stepped_as_a_parameter():
    assert torch.equal(stepped(Tagged(torch.ones(4, 6))), stepped(nn.Parameter(torch.ones(4, 6))))


@pytest.mark.parametrize("cls", [Behaving, BehavingTagged, Dispatching, DTensorBase, OfDTensor])
def test_a_subclass_of_parameter_that_behaves_otherwise_is_refused(cls):
    with pytest.raises(RuntimeError, match=rf"parameter 0 \(4, 6\) is a .*test_tensor_classes.{cls.__name__}, a class"):
        Muon([torch.Tensor._make_subclass(cls, torch.zeros(4, 6), True)])


def test_trained_int8_params_of_bitsandbytes_are_known(monkeypatch):
    """Step int8 parameters with has_fp16_weights=True, which are full matrices."""
    cls = type("Int8Params", (Behaving,), {"has_fp16_weights": True})
    with pytest.raises(RuntimeError, match="Int8Params, a class that hf_muon does not know"):
        Muon([cls(torch.ones(4, 6))])
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", SimpleNamespace(Int8Params=cls))
    assert torch.equal(stepped(cls(torch.ones(4, 6))), stepped(nn.Parameter(torch.ones(4, 6))))


def test_swapped_in_later_as_accelerate_does():
    model = network(nn.Parameter(torch.ones(4, 6)))
    optimizer = build_optimizer(model)
    group = optimizer.param_groups[0]
    before = model[0].weight.detach().clone()
    group["params"][1] = shard(4, 6)
    for each in optimizer.param_groups:
        for param in each["params"]:
            param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=f"1.weight .*{UNKNOWN}"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert not optimizer.state


def test_frozen_ones_go_on_until_they_are_trained():
    """Ignore the class of a frozen parameter: base weights of quantized models have their own classes."""
    weight = nn.Parameter(torch.ones(4, 6))
    base = shard(4, 6, requires_grad=False)
    optimizer = Muon([weight, base])
    weight.grad = torch.randn(4, 6)
    optimizer.step()
    assert not torch.equal(weight, torch.ones(4, 6))
    assert not base.any()
    base.requires_grad_(True).grad = torch.ones(4, 6)
    with pytest.raises(RuntimeError, match=UNKNOWN):
        optimizer.step()
    assert not base.any()


def test_fake_tensors_are_known():
    with FakeTensorMode():
        assert build_optimizer(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))).param_groups


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_local_tensors_of_a_dtensor(mesh):
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as Cut

    for placement in (Cut(0), Replicate()):
        known = nn.Parameter(DTensor.from_local(torch.zeros(4, 6), mesh, [placement]))
        assert Muon([known]).param_groups
        unknown = nn.Parameter(DTensor.from_local(torch.zeros(4, 6), mesh, [placement]))
        unknown._local_tensor = shard(4, 6)
        with pytest.raises(RuntimeError, match=f"is a DTensor of local tensors that are each a .*{UNKNOWN}"):
            Muon([unknown])


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 4))
    words = "is not initialized yet, as in a lazy module: run a forward pass before the optimizer is built"
    for build in (build_optimizer, route_parameters):
        with pytest.raises(RuntimeError, match=f"0.weight {words}"):
            build(model)
    with pytest.raises(RuntimeError, match=f"parameter 0 .*{words}"):
        Muon(model.parameters())
    model(torch.zeros(2, 8))
    assert build_optimizer(model).param_groups
