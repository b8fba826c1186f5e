"""Steps of ranks that do not have the same parameters, gradients or states; pools import these functions by name."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hf_muon import Muon
from hf_muon.distributed import groups
from hf_muon.optimizer import prepared_steps
from hf_muon.optimizer.first_step_report import FirstStepReport
from tests.distributed.cases import SHAPES, VECTORS, Counted, make, muon_over, placements_of, store, whole_state


def _fail(*_, **__):
    raise OSError("no space left on device")


def _allocate(*_):
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


# What is broken on one rank, before anything moves.
BROKEN = {
    "report": (FirstStepReport, "add", _fail),
    "placements of a parameter": (DTensor, "placements", property(_fail)),
    "memory": (prepared_steps, "complete_state_", _allocate),
    "options": (prepared_steps, "hyperparameters", _fail),
}


def complaint(rank, layout, fault):
    """Return the error of a step with a fault on one rank, and whether weights and state stayed as they were."""
    ddp = layout == "ddp"
    mesh = None if ddp else init_device_mesh("cpu", placements_of(layout, 2)[0])
    weights = make(SHAPES + VECTORS, 0)

    def put(tensor):
        return tensor if ddp else store(tensor, mesh, placements_of(layout, tensor.ndim)[1])

    params = [nn.Parameter(put(w)) for w in weights]
    optimizer = muon_over(params, torch.float32, replicate_group=dist.group.WORLD if ddp else None)

    def set_gradients(seed):
        for param, grad in zip(params, make(SHAPES + VECTORS, seed), strict=True):
            param.grad = put(grad)

    set_gradients(1)
    optimizer.step()
    before = whole_state(params, optimizer)
    set_gradients(2)
    if fault == "initial_lr":
        optimizer.param_groups[0][fault] = 0.25
    if rank == 1:
        if fault == "missing":
            params[1].grad = params[10].grad = None
        elif fault == "frozen":
            params[3].requires_grad_(False)
            params[3].grad = None
        elif fault == "nan":
            params[0].grad.to_local().fill_(float("nan")) if not ddp else params[0].grad.fill_(float("nan"))
        elif fault == "option":
            optimizer.param_groups[0]["momentum"] = 0.5
        elif fault in ("initial_lr", "of_a_rule"):
            optimizer.param_groups[0][fault] = 0.5
        elif fault == "state":
            del optimizer.state[params[2]]
        elif fault == "lr":
            optimizer.param_groups[0]["lr"] = None
        elif fault == "views":
            optimizer.param_groups[0]["views"] = 5
        elif fault == "step":
            optimizer.param_groups[1]["step"] = 7
        elif fault == "no params":
            lost = optimizer.param_groups[1].pop("params")
    if fault == "partial":  # some tensor parallel backward passes leave such gradients
        if rank == 1:
            params[1].grad = None
        else:
            whole_grad = make(SHAPES, 2)[1]
            params[1].grad = DTensor.from_local(whole_grad, mesh, [Partial()] * mesh.ndim, run_check=False)
    if fault == "placements":
        swapped = nn.Parameter(params[0].detach().redistribute(mesh, [Replicate()] * mesh.ndim))
        swapped.grad = torch.zeros_like(swapped)
        optimizer.state[swapped] = optimizer.state.pop(params[0])
        optimizer.param_groups[0]["params"][0] = swapped
    broken = contextlib.nullcontext()
    if rank == 1 and fault in BROKEN:
        broken = mock.patch.object(*BROKEN[fault])
    try:
        with broken:
            optimizer.step()
    except RuntimeError as error:
        text = str(error)
    else:
        return None, True
    if rank == 1 and fault == "no params":
        optimizer.param_groups[1]["params"] = lost
    if fault in ("state", "placements"):
        return text, True
    after = whole_state(params, optimizer)
    same = all(torch.equal(a, b) for one, two in zip(before, after, strict=True) for a, b in zip(one, two, strict=True))
    return text, same


def unequal(rank, what):
    """Return the error of ranks with different parameters, and whether weights and state stayed as they were."""
    shapes = [(8, 6)] * 62 if what == "count" else [(8, 6), (4, 6)]
    groups = [{"params": [nn.Parameter(torch.ones(shape)) for shape in shapes]}]
    if rank == 1 and what == "count":
        groups[0]["params"].append(nn.Parameter(torch.ones(8, 6)))
    if rank == 1 and what == "groups":
        groups = [{"params": [param]} for param in groups[0]["params"]]
    optimizer = Muon(groups, replicate_group=dist.group.WORLD)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    try:
        optimizer.step()
    except RuntimeError as error:
        untouched = not optimizer.state and all(bool((p == 1).all()) for g in groups for p in g["params"])
        return str(error), untouched


@contextlib.contextmanager
def naming(scheme):
    """Have torch name groups as before 2.14 (`joined`), since then (`asked`), or in an `other` way."""
    c10d = dist.distributed_c10d

    def hashed(ranks):
        world = c10d._world
        return f"{list(ranks)} {world.group_count if scheme == 'asked' else len(world.pg_names)}"

    def name_of(ranks, use_hashed_name):
        hashes = hashed if scheme == "other" else c10d._hash_ranks_to_str
        name = hashes(ranks) if use_hashed_name else str(c10d._world.group_count)
        c10d._world.group_count += scheme == "asked" or not use_hashed_name
        return name

    with mock.patch.multiple(c10d, _hash_ranks_to_str=hashed, _process_group_name=name_of):
        yield


def pipeline_under(rank, scheme, meshed=True):
    """Return what `pipeline` returns, or its error, after which all ranks create groups with one another."""
    with naming(scheme), mock.patch.multiple(groups, _groups={}, _roots={}):
        try:
            return pipeline(rank, meshed)
        except RuntimeError as error:
            return str(error)
        finally:
            dist.barrier(dist.new_group())


def pipeline(rank, meshed, steps=2):
    """Step a stage with data and tensor parallelism beside stages of one rank, and each stage in a single process.

    Args:
        rank: the rank of this process.
        meshed: whether all four ranks of the first stage store a part of one matrix.
    """
    others = range(4, dist.get_world_size())
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    dist.new_group([0, *others])  # tied embeddings: some ranks are in more groups than others
    shapes = [(7, 6), (9, 5), (6, 10), (4,)] if rank < 4 else [(5, 3), (7, 2)]

    def put(tensor, i):
        if rank >= 4 or i in (1, 3) or (i == 2 and not meshed):
            return tensor.clone()
        return store(tensor, *((mesh["tp"], [Shard(0)]) if i == 0 else (mesh, [Shard(0), Shard(1)])))

    results = []
    for single in (False, True):
        place = (lambda tensor, i: tensor.clone()) if single else put
        params = [nn.Parameter(place(w, i)) for i, w in enumerate(make(shapes, 0))]
        groups = [{"params": [p for p in params if p.ndim == 2]}]
        groups += [{"params": [p for p in params if p.ndim == 1], "use_muon": False}]
        shared = mesh["dp"].get_group() if rank < 4 and not single else None
        optimizer = Muon(groups, ns_dtype="fp32", replicate_group=shared)
        for step in range(steps):
            for i, (param, grad) in enumerate(zip(params, make(shapes, step + 1), strict=True)):
                param.grad = place(grad, i)
            with Counted() as counted:
                optimizer.step()
        if not single:
            words = counted.words
        results.append(whole_state(params, optimizer))
    return results, words


def gradients_missing_on_one_rank(rank, layout, steps=3):
    """Return the results without some gradients on rank 1, and with zeros in their place."""
    results = []
    for zeros in (False, True):
        mesh_shape, _ = placements_of(layout, 2)
        mesh = init_device_mesh("cpu", mesh_shape)
        params = [nn.Parameter(store(w, mesh, placements_of(layout, w.ndim)[1])) for w in make(SHAPES + VECTORS, 0)]
        optimizer = muon_over(params, torch.float32)
        for step in range(steps):
            for i, (param, grad) in enumerate(zip(params, make(SHAPES + VECTORS, step + 1), strict=True)):
                param.grad = store(grad, mesh, placements_of(layout, grad.ndim)[1])
                if rank == 1 and i in (1, 2, 5, 9, 11):
                    param.grad = torch.zeros_like(param) if zeros else None
            optimizer.step()
        results.append(whole_state(params, optimizer))
    return results


def idle(rank, layout):
    """Count collectives and states of a step without gradients, and of one with those of AdamW alone."""
    mesh = init_device_mesh("cpu", placements_of(layout, 2)[0])
    params = [nn.Parameter(store(w, mesh, placements_of(layout, w.ndim)[1])) for w in make(SHAPES + VECTORS, 0)]
    optimizer = muon_over(params, torch.float32)
    with Counted() as nothing:
        optimizer.step()
    before = len(optimizer.state)
    for param in params[len(SHAPES) :]:
        param.grad = torch.ones_like(param)
    with Counted() as vectors:
        optimizer.step()
    return nothing.calls, vectors.calls, before, len(optimizer.state) == len(params)
