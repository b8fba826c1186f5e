"""Loops of Lightning and Fabric under DDP on ranks of a pool, with stand-ins for their strategies."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_muon import build_optimizer
from hf_muon._autoload import apply
from hf_muon.integrations.lightning import patch_fabric, patch_trainer
from tests.integrations.accelerate_cases import batches, counted, network


class _Strategy:
    """The base class of both, which has the methods for optimizers."""

    def setup_optimizer(self, optimizer: Any) -> Any:
        return optimizer

    def setup_optimizers(self, module: nn.Module) -> None:
        self.optimizers = [build(module)]


class DDPStrategy(_Strategy):
    """Fabric's `setup_module`, and the steps of Trainer's `setup` that concern DDP."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module)

    def setup(self, module: nn.Module) -> None:
        self.model = DistributedDataParallel(module)
        self.setup_optimizers(module)


def stand_in() -> ModuleType:
    """Return a module with a fresh class for the strategy."""
    module = ModuleType("stand_in")
    module.DDPStrategy = type("DDPStrategy", (DDPStrategy,), dict(vars(DDPStrategy)))  # type: ignore[attr-defined]
    return module


def build(module: nn.Module) -> Any:
    return build_optimizer(module, lr=0.02, weight_decay=0.1, ns_dtype="fp32")


def own_gradients(_, bucket):
    """Leave each rank its own gradients, as a communication hook; DDP refuses annotations that are texts."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def loop(rank: int, order: str, patched: bool = True, way: str = "plain") -> tuple[list[Tensor], int, bool]:
    """Train with DDP.

    Args:
        rank: of this process.
        order: "trainer"; of Fabric, "module first", or "optimizer first": it is built before the model is wrapped.
        patched: whether the strategy has this package's patch.
        way: "plain", "accumulating" (two halves, the first in `no_sync`), "no_sync" around all but the step, "hook" (a
            communication hook that reduces nothing), "join" (rank 1 has one batch less), or "outside": the optimizer
            has a parameter beside the model's.

    Returns:
        The weights, the number of matrices that this rank has orthogonalized, and whether ranks have shared a step.
    """
    module = stand_in()
    if patched:
        apply(patch_trainer if order == "trainer" else patch_fabric, module)
    strategy, bare = module.DDPStrategy(), network()
    if order == "trainer":
        strategy.setup(bare)
        model, (optimizer,) = strategy.model, strategy.optimizers
    else:
        optimizer = build(bare) if order == "optimizer first" else None
        model = strategy.setup_module(bare)
        optimizer = optimizer or build(bare)
        if way == "outside":
            optimizer.add_param_group({"params": [("outside", nn.Parameter(torch.ones(3)))], "use_muon": False})
        optimizer = strategy.setup_optimizer(optimizer)
    if way == "hook":
        model.register_comm_hook(None, own_gradients)
    shared = []

    def backward(rows: Tensor) -> None:
        nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten()).backward()

    def gradients(rows: Tensor) -> None:
        optimizer.zero_grad()
        parts = rows.chunk(2) if way == "accumulating" else (rows,)
        for i, part in enumerate(parts):
            local = way == "no_sync" or i < len(parts) - 1
            with model.no_sync() if local else contextlib.nullcontext():
                backward(part)

    own_batches = batches()[rank:] if way == "join" else batches()
    with counted() as counts, model.join() if way == "join" else contextlib.nullcontext():
        for batch in own_batches:
            rows = batch.chunk(dist.get_world_size())[rank]
            if order == "trainer":
                optimizer.step(lambda rows=rows: gradients(rows))
            else:
                gradients(rows)
                optimizer.step()
            shared.append(optimizer.replicate_group is not None)
    return [param.detach().clone() for param in model.parameters()], sum(counts), any(shared)
