"""PyTorch's own test cases for `torch.distributed.checkpoint.state_dict`, with `Muon`.

The cases are those of pytorch/pytorch, test/distributed/checkpoint/test_state_dict.py, rewritten for gloo.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hf_muon import Muon, build_optimizer
from tests.equality.placed import whole

WIDTH = 10


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 14), nn.LayerNorm(14), nn.Linear(14, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Model(nn.Module):
    """A model with nested modules, and with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.two = nn.Linear(WIDTH, WIDTH), Unit(), Unit()
        self.mixing = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return self.two(self.one(self.first(x)) @ self.mixing + self.shift)


class Tied(nn.Module):
    """A model whose embedding is also its output head."""

    def __init__(self):
        super().__init__()
        self.table, self.hidden = nn.Embedding(23, WIDTH), Unit()
        self.head = nn.Linear(WIDTH, 23, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.hidden(self.table((x.abs() * 10).int()).sum(1)))


def muon(model):
    """Return the optimizer: Muon for matrices, AdamW for vectors and the embedding, names without wrapper prefixes."""
    return build_optimizer(model, lr=1e-2, ns_dtype="fp32")


def wrapped(model, layout):
    """Return the model stored in a layout."""
    if layout == "single":
        return model
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "replicate":
        return replicate(model)
    if layout == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {"one.up": ColwiseParallel(use_local_output=False), "one.down": RowwiseParallel()}
        model.one.norm = nn.Identity()  # along a sharded dim
        return parallelize_module(model, mesh, plan)
    shape = (2, dist.get_world_size() // 2) if layout == "hsdp" else (dist.get_world_size(),)
    options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])}
    if layout == "fsdp-keep":
        options["reshard_after_forward"] = False
    if layout == "checkpointed":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Unit))
    for module in list(model.modules()):
        if isinstance(module, Unit):
            fully_shard(module, **options)
    model = fully_shard(model, **options)
    return torch.compile(model, backend="eager") if layout == "compiled" else model


def pair(layout, tied=False, frozen=False):
    """Return a model of one process and the same model in a layout, each with its optimizer."""
    torch.manual_seed(0)
    model = Tied() if tied else Model()
    if layout == "tp":
        model.one.norm = nn.Identity()
    if frozen:
        model.one.requires_grad_(False)
    other = wrapped(copy.deepcopy(model), layout)
    return model, muon(model), other, muon(other)


def train(model, optimizer, steps=3, seed=0):
    """Step on batches that are equal on all ranks, and drop the gradients."""
    for step in range(steps):
        batch = torch.rand(8, WIDTH, generator=torch.Generator().manual_seed(seed + step)) + 0.1
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_tensors(state):
    """Return a copy of a state dict with full tensors, to compare with another one."""
    if isinstance(state, dict):
        return {key: whole_tensors(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [whole_tensors(value) for value in state]
    return whole(state) if isinstance(state, torch.Tensor) else state


def differences(one, other, close, where=""):
    """Return the paths at which two states differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [line for key in one for line in differences(one[key], other[key], close, f"{where}/{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, close, f"{where}/{i}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and one.shape == other.shape and close(one, other) else [where]
    return [] if one == other else [where]


def summed_alike(one, other):
    """Return whether two tensors are equal except for gradients that were summed in another order."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def same(one, other):
    """Return whether two states are bit-identical."""
    return not differences(one, other, torch.equal)


def load(model, optimizer, state, options):
    """Load weights and moments from a copy, because torch removes keys from its argument."""
    weights, moments = copy.deepcopy(state)
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, moments, options=options)


def save_and_load(rank, layout, flatten=False, tied=False, frozen=False):
    """Return the differences of a layout's state from one process's, and whether loads restore the saved state."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, ignore_frozen_params=frozen)
    model, optimizer, other, its = pair(layout, tied, frozen)
    train(model, optimizer)
    train(other, its)
    # The same function returns both states, so that the comparison includes names, groups and flattening.
    expected = tuple(map(whole_tensors, get_state_dict(model, optimizer, options=options)))
    weights, moments = get_state_dict(other, its, options=options)
    saved = copy.deepcopy((whole_tensors(weights), whole_tensors(moments)))
    wrong = differences(expected, saved, summed_alike)
    twice = []
    if not frozen:
        for _ in range(2):
            _, _, other, its = pair(layout, tied, frozen)
            load(other, its, (weights, moments), options)
            loaded = tuple(map(whole_tensors, get_state_dict(other, its, options=options)))
            twice.append(all(map(same, saved, loaded)))
            # Load again, into an optimizer that has already taken other steps.
            train(other, its, seed=7)
            load(other, its, (weights, moments), options)
            loaded = tuple(map(whole_tensors, get_state_dict(other, its, options=options)))
            twice.append(all(map(same, saved, loaded)))
    return wrong, twice


def from_one_layout(rank, layout):
    """Return whether a state that only rank 0 has reaches all ranks."""
    full = StateDictOptions(full_state_dict=True)
    model, optimizer, other, its = pair(layout)
    train(model, optimizer)
    train(other, its, seed=5)
    weights, moments = get_state_dict(model, optimizer)
    expected = copy.deepcopy((weights, moments))
    before = differences(expected, get_state_dict(other, its, options=full), summed_alike)
    mine = (weights, moments) if rank == 0 else ({}, {})
    options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True)
    load(other, its, mine, options)
    return bool(before), all(map(same, expected, get_state_dict(other, its, options=full)))


def scheduled(rank, layout):
    """Return whether a load restores `initial_lr`, which a scheduler has put into the groups."""
    _, _, other, its = pair(layout)
    torch.optim.lr_scheduler.LambdaLR(its, lambda epoch: 0.95**epoch)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(other, its, options=options)
    fresh = muon(other)
    before = ["initial_lr" in group for group in fresh.param_groups]
    options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True)
    set_optimizer_state_dict(other, fresh, optim_state_dict=state, options=options)
    return before, [group.get("initial_lr") for group in fresh.param_groups]


def groups_of_their_own(rank, layout, empty, full, broadcast):
    """Return whether several param groups with their own learning rates, one of them empty, survive a round trip."""
    _, _, other, _ = pair(layout)
    params = dict(other.named_parameters())
    one, two = params["one.up.weight"], params["one.down.weight"]
    groups = (
        [{"params": [one, two]}, {"params": [], "lr": 0.2}]
        if empty
        else [{"params": [one]}, {"params": [two], "lr": 0.2}]
    )

    def optimizer_of():
        return Muon([dict(group) for group in groups], lr=0.1, ns_dtype="fp32")

    optimizer, fresh = optimizer_of(), optimizer_of()
    train(other, optimizer, steps=1)
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast)
    state = get_optimizer_state_dict(other, optimizer, options=options)
    expected = whole_tensors(optimizer.state_dict())
    set_optimizer_state_dict(other, fresh, optim_state_dict=state, options=options)
    return same(expected, whole_tensors(fresh.state_dict()))
