"""Train a small model, sharded by FSDP2, on the ranks that torchrun has started, and save a checkpoint in each step.

Usage: ``torchrun ... elastic_worker.py FOLDER LAST DEATHS``. DEATHS are JSON: by the number of torchrun's restart, a
step and a kind of DEATH, with which the last rank ends in that step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F  # noqa: N812

from hf_muon import build_optimizer
from tests.distributed.training import Model, batches, wrap
from tests.equality.placed import whole
from tests.support.bounds import move

BATCH = 6  # of 3 and of 2 ranks


def fail():
    raise ArithmeticError("an error of the script")


DEATHS = {"killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "raises": fail}


def latest(folder):
    """Return the step of the newest whole checkpoint in a folder, or 0: torch writes its metadata last."""
    return max((int(path.parent.name) for path in Path(folder).glob("*/.metadata")), default=0)


def started(folder, moved=None):
    """Return a model on these ranks, its optimizer and its step, from the newest checkpoint or the beginning."""
    torch.manual_seed(0)
    model = Model()
    move(model, moved)
    if dist.is_initialized():
        model, _, _ = wrap(model, "fsdp")
    optimizer, step = build_optimizer(model, ns_dtype="fp32", lr=5e-3, weight_decay=0.1), latest(folder)
    if step:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=Path(folder, str(step)))
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return model, optimizer, step


def tensors(model, optimizer):
    """Return whole weights and moments by name; all ranks take part."""
    weights = {name: whole(param) for name, param in model.named_parameters()}
    moments = {
        f"{name} {key}": whole(value)
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }
    return weights | moments


def train(rank, folder, last, *, saves=True, drops=False, moved=None, death=(None, None)):
    """Train up to the step `last`, and return whole weights and moments.

    Args:
        rank: of this process.
        folder: of checkpoints.
        last: the number of steps.
        saves: whether each step saves one.
        drops: whether the moments of the one that is loaded become zeros.
        moved: a seed of `tests.support.bounds.move`.
        death: a step and a kind of DEATH, which ends the last rank between the step's gradients and its update.
    """
    model, optimizer, first = started(folder, moved)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for state in optimizer.state.values() if drops else ():
        for key, moment in state.items():
            moment.mul_(key == "step")
    for step in range(first, last):
        tokens = batches(step)[:BATCH].chunk(ranks)[rank]
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if death[0] == step and rank == ranks - 1:
            DEATHS[death[1]]()
        optimizer.step()
        optimizer.zero_grad()
        if saves:
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(states, checkpoint_id=Path(folder, str(step + 1)))
    return tensors(model, optimizer)


if __name__ == "__main__":
    place, end, deaths = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if dist.get_rank() == 0:
        print(f"restart {restart}: {dist.get_world_size()} ranks go on from step {latest(place)}", flush=True)
    train(dist.get_rank(), place, int(end), death=json.loads(deaths).get(restart, (None, None)))
    dist.barrier()
    dist.destroy_process_group()
