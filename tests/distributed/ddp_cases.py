"""Loops under DistributedDataParallel on ranks of a pool, in each order of making the wrapper and the optimizer."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from hf_muon import MuonOfGroups, build_optimizer
from tests.integrations.accelerate_cases import batches, counted, network, shared_steps

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32"}


def own_gradients(_, bucket):
    """Leave each rank its own gradients, as a communication hook; DDP refuses annotations that are texts."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def made(order: str, group: Any) -> tuple[nn.Module, Any]:
    """Return a wrapped model and its optimizer.

    Args:
        order: "ddp given" to `build_optimizer`, "ddp first", "optimizer first", or "groups": made of parameters.
        group: the `replicate_group`.
    """
    bare = network()
    if order == "optimizer first":
        optimizer = build_optimizer(bare, replicate_group=group, **OPTIONS)
        return DistributedDataParallel(bare), optimizer
    model = DistributedDataParallel(bare)
    if order == "groups":
        return model, MuonOfGroups(bare.parameters(), replicate_group=group, **OPTIONS)
    return model, build_optimizer(model if order == "ddp given" else bare, replicate_group=group, **OPTIONS)


def loop(rank: int, order: str, way: str = "plain", alone: bool = False) -> dict[str, Any]:
    """Train with DDP.

    Args:
        rank: of this process.
        order: as of `made`.
        way: "plain"; "accumulating" (two parts, the first in `no_sync`); "no_sync" around all but the step;
            "once" (the second step in `no_sync`); "closure"; "hook" or "known hook" of communication; "join"
            (rank 1 has one batch less); "outside" (a parameter that the model does not have); "twice" (a second wrapper
            of the model), "copied" (another wrapper of a copy of the model).
        alone: pass a `replicate_group` of this rank alone, which steps by the gradients that it finds.

    Returns:
        The weights, the number of matrices that this rank orthogonalized in each step, and whether ranks shared it.
    """
    group = [dist.new_group([other]) for other in range(dist.get_world_size())][rank] if alone else None
    model, optimizer = made(order, group)
    others = []
    if way == "outside":
        optimizer.add_param_group({"params": [("outside", nn.Parameter(torch.ones(3)))], "use_muon": False})
    elif way == "twice":
        others = [DistributedDataParallel(model.module)]
    elif way == "copied":
        others = [DistributedDataParallel(copy.deepcopy(model.module))]
        others[0].require_backward_grad_sync = False
    elif way == "hook":
        model.register_comm_hook(None, own_gradients)
    elif way == "known hook":
        model.register_comm_hook(None, fp16_compress_hook)

    def gradients(rows: Tensor, step: int) -> None:
        optimizer.zero_grad()
        parts = rows.chunk(2) if way == "accumulating" else (rows,)
        for i, part in enumerate(parts):
            local = way == "no_sync" or i < len(parts) - 1 or (way == "once" and step == 1)
            with model.no_sync() if local else contextlib.nullcontext():
                nn.functional.cross_entropy(model(part).flatten(0, 1), part.flatten()).backward()

    own_batches = [*batches(), *batches()][rank if way == "join" else 0 :]
    work: list[int] = []
    with (
        counted() as counts,
        shared_steps() as shared,
        model.join() if way == "join" else contextlib.nullcontext(),
    ):
        for step, batch in enumerate(own_batches):
            rows = batch.chunk(dist.get_world_size())[rank]
            before = sum(counts)
            if way == "closure":
                optimizer.step(lambda rows=rows, step=step: gradients(rows, step))
            else:
                gradients(rows, step)
                optimizer.step()
            work.append(sum(counts) - before)
    weights = [param.detach().clone() for param in model.parameters()]
    return {"weights": weights, "work": work, "shared": shared}


def two_models(rank: int, optimizers: int, alone: bool = False) -> tuple[list[Tensor], list[bool]]:
    """Step two wrapped models with an optimizer each, or with one; return the weights and whether steps were shared."""
    group = [dist.new_group([other]) for other in range(dist.get_world_size())][rank] if alone else None
    options = {**OPTIONS, "replicate_group": group}
    models = [DistributedDataParallel(network()), DistributedDataParallel(network())]
    own = models if optimizers == 2 else [nn.ModuleList(models)]
    steps = [build_optimizer(model, **options).step for model in own]
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
