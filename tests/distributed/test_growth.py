"""A long run keeps nothing of what it has replaced: parameters, wrappers, process groups.

Ranks import `grown` by name.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import Counter
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hf_muon import build_optimizer
from tests.distributed.pool import Pool
from tests.support.accelerated import compiling

STEPS, SETTLED = 1000, 200
MODELS, GROUPS = 100, 250  # steps after which parameters are replaced, and process groups made again
OPTIONS = {"lr": 0.01, "ns_dtype": "fp32", "normalize": "rows"}
WEAK = (weakref.ReferenceType, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


def is_ours(kind):
    return str(kind.__module__).partition(".")[0] == "hf_muon"  # some classes of torch have a descriptor there


def reached(value):
    """Return how many objects a variable holds, in containers, caches, closures, and instances of our classes."""
    seen, rest = {}, [value]
    while rest:
        one = rest.pop()
        if id(one) in seen or (isinstance(one, dict) and "__builtins__" in one):  # a module's variables
            continue
        seen[id(one)] = one  # alive, so that no other has its id
        if (
            isinstance(one, (dict, list, set, tuple, FunctionType, *WEAK))
            or hasattr(type(one), "cache_info")
            or is_ours(type(one))
        ):
            rest += gc.get_referents(one)
    return len(seen)


def sizes():
    """Return what each variable of the package's modules and classes reaches, and how many objects live, by class."""
    gc.collect()
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "hf_muon"]
    owners = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, type)}
    owners = [*modules, *filter(is_ours, owners.values())]
    found = {
        f"{getattr(owner, '__module__', '')} {owner.__name__}.{name}": reached(value)
        for owner in owners
        for name, value in list(vars(owner).items())
        if not name.startswith("__")
    }
    kinds = Counter(type(one) for one in gc.get_objects())
    found |= {kind.__qualname__: count for kind, count in kinds.items() if is_ours(kind)}
    for base in (torch.Tensor, dist.ProcessGroup):
        found[base.__name__] = sum(count for kind, count in kinds.items() if issubclass(kind, base))
    return found


class Parts(nn.Module):
    """Parameters sharded by FSDP2, and others on a mesh of two axes that is not all ranks: it has groups of our own."""

    def __init__(self):
        super().__init__()
        self.sharded = fully_shard(model(), mesh=init_device_mesh("cpu", (2,)))
        mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("stage", "dp", "tp"))["dp", "tp"]
        shards = (distribute_tensor(param, mesh, [Replicate(), Shard(0)]) for param in model().parameters())
        self.own = nn.ParameterList(map(nn.Parameter, shards))

    def forward(self, x):
        return self.sharded(x) + sum(param.to_local().sum() for param in self.own)


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))


PLACED = {"single": model, "ddp": lambda: DistributedDataParallel(model()), "meshes": Parts}


def replace_parameters(optimizer, model, *, in_place):
    """Give an optimizer the parameters of another model, in its param groups or in new ones."""
    optimizer.state.clear()
    new = build_optimizer(model, **OPTIONS).param_groups
    if not in_place:
        optimizer.param_groups.clear()
        for group in new:
            optimizer.add_param_group(group)
        return
    for group, other in zip(optimizer.param_groups, new, strict=True):
        group["params"][:] = other["params"]
        group["step"] = 0


def grown(rank, layout, folder=""):
    """Return what grows in a long run, with its sizes after SETTLED steps and at the end.

    Args:
        rank: of this process.
        layout: of PLACED.
        folder: for what ranks need to make process groups again; empty in one process.
    """
    trained = PLACED[layout]()
    optimizer, settled = build_optimizer(trained, **OPTIONS), {}
    for step in range(STEPS):
        are_new = bool(folder) and step > 0 and step % GROUPS == 0
        if are_new:
            dist.destroy_process_group()
            store = f"file://{folder}/store {step}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        if are_new and layout == "ddp":
            trained = DistributedDataParallel(trained.module)
        elif are_new or (step > 0 and step % MODELS == 0):
            trained = PLACED[layout]()
            replace_parameters(optimizer, trained, in_place=step % (2 * MODELS) == 0)
        for group in optimizer.param_groups:
            group["lr"] = OPTIONS["lr"] / (1 + step)
        trained(torch.ones(3, 6) * step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == SETTLED:
            settled = sizes()
    return {name: (settled.get(name, 0), size) for name, size in sizes().items() if size > settled.get(name, 0)}


@pytest.mark.extended
@pytest.mark.second_tier("False")
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_grows_in_one_process(compiled):
    with compiling("eager") if compiled else contextlib.nullcontext():
        assert grown(0, "single") == {}


@pytest.mark.extended
@pytest.mark.second_tier("meshes")
@pytest.mark.parametrize("layout", ["ddp", "meshes"])
def test_nothing_grows_on_ranks_that_make_their_groups_again(layout, tmp_path):
    pool = Pool(2, forks=True)
    assert pool.run(grown, layout=layout, folder=str(tmp_path)) == [{}, {}]
    pool.close()
