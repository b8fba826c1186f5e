"""Plain loops with accelerate on ranks of a pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hf_muon import build_optimizer
from hf_muon.distributed.ddp import Replicas
from hf_muon.math import newton_schulz

STEPS = 3


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(24, 16), *(nn.Linear(16, 16) for _ in range(6)), nn.Linear(16, 24))


def batches() -> Tensor:
    """Return tokens of shape (step, sentence, position), for all ranks together."""
    return torch.randint(0, 24, (STEPS, 8, 5), generator=torch.Generator().manual_seed(2))


def loop(rank: int, order: str, ranks: int = 2) -> tuple[list[Tensor], int, bool]:
    """Train with `Accelerator.prepare`, on the ranks of the initialized process group, or on a single one.

    Args:
        rank: of this process.
        order: "together", "optimizer first", "optimizer last", or "model first": built from the wrapped model.
        ranks: number of processes.

    Returns:
        The weights, the number of matrices that this rank has orthogonalized, and whether ranks have shared a step.
    """
    from accelerate import Accelerator

    with accelerate_states(rank, ranks), counted() as counts, shared_steps() as shared:
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator, network(), order)
        train(accelerator, model, optimizer, rank, ranks)
    return [param.detach().clone() for param in model.parameters()], sum(counts), any(shared)


def train(accelerator: Any, model: nn.Module, optimizer: Any, rank: int, ranks: int) -> None:
    for batch in batches():
        rows = batch.chunk(ranks)[rank]
        accelerator.backward(nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten()))
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def accelerate_states(rank: int, ranks: int) -> Iterator[None]:
    """Let accelerate begin anew, on a number of ranks whose process group is there already."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # as torchrun sets them
    numbers = dict(zip(names, (rank, rank, ranks, ranks), strict=True))
    variables = {} if ranks == 1 else {**numbers, "MASTER_ADDR": "localhost"}
    states = (AcceleratorState, PartialState, GradientState)
    before = [dict(state._shared_state) for state in states]
    with mock.patch.dict(os.environ, {key: str(value) for key, value in variables.items()}):
        try:
            for state in states:
                state._shared_state.clear()
            yield
        finally:
            for state, values in zip(states, before, strict=True):
                state._shared_state.clear()
                state._shared_state.update(values)


def sharded_loop(
    rank: int, kind: str, save: str | None = None, load: str | None = None, **options: Any
) -> dict[str, Tensor]:
    """Train under FSDP2 on two ranks, save at the end or load at the beginning; return whole weights and moments.

    Args:
        rank: of this process.
        kind: FULL_STATE_DICT or SHARDED_STATE_DICT.
        save: folder to save to.
        load: folder to load from.
        options: of the optimizer.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from tests.e2e.cpu_fsdp import open_fsdp
    from tests.equality.placed import whole

    with contextlib.ExitStack() as stack:
        stack.enter_context(accelerate_states(rank, 2))
        stack.callback(open_fsdp())
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        net = network()
        model, optimizer = accelerator.prepare(net, build_optimizer(net, lr=0.02, ns_dtype="fp32", **options))
        if load:
            accelerator.load_state(load)
        train(accelerator, model, optimizer, rank, 2)
        if save:
            accelerator.save_state(save)
        names = {param: name for name, param in model.named_parameters()}
        return {f"{names[param]} weight": whole(param) for param in names} | {
            f"{names[param]} {key}": whole(value)
            for param, own in optimizer.optimizer.state.items()
            for key, value in own.items()
        }


def prepared(accelerator: Any, model: nn.Module, order: str) -> tuple[nn.Module, Any]:
    options = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32"}
    if order == "model first":
        model = accelerator.prepare(model)
        return model, accelerator.prepare(build_optimizer(model, **options))
    parts = {"model": model, "optimizer": build_optimizer(model, **options)}
    if order == "together":
        return accelerator.prepare(*parts.values())
    for name in reversed(parts) if order == "optimizer first" else parts:
        parts[name] = accelerator.prepare(parts[name])
    return parts["model"], parts["optimizer"]


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list to which each batch of orthogonalized matrices adds its length."""
    counts: list[int] = []
    call = newton_schulz.newton_schulz

    def counted_call(matrices: Tensor, *args: Any, **options: Any) -> Tensor:
        counts.append(len(matrices))
        return call(matrices, *args, **options)

    with mock.patch.object(newton_schulz, "newton_schulz", counted_call):
        yield counts


@contextlib.contextmanager
def shared_steps() -> Iterator[list[bool]]:
    """Yield a list to which each step adds whether the ranks of DDP share it."""
    shared: list[bool] = []
    of_step = Replicas.of_step

    def recorded(self: Replicas, params: Any) -> Any:
        wrapper = of_step(self, params)
        shared.append(wrapper is not None and not self.have_parted)
        return wrapper

    with mock.patch.object(Replicas, "of_step", recorded):
        yield shared
