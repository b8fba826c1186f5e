"""Save or load a small run in every form: ``python format_cases.py save|load FOLDER RANK RANKS``, with any hf_muon."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_muon import build_optimizer

FORMS = {"shards": {}, "flat": {"flatten_optimizer_state_dict": True}, "whole": {"full_state_dict": True}}


def started(ranks: int, steps: int = 2):
    """Return a seeded model on some ranks, and its optimizer after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3))
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = build_optimizer(model, lr=0.01, ns_dtype="fp32", momentum=0.9, lr_scales="0:0.5")
    for number in range(steps):
        model(torch.ones(4, 6) * (number + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def act(what: str, folder: Path, ranks: int) -> None:
    model, source = started(ranks)
    for form, options in FORMS.items():
        settings, path = StateDictOptions(**options), folder / form
        if what == "save":
            state = get_optimizer_state_dict(model, source, options=settings)
            if form != "whole":
                dcp.save(state, checkpoint_id=path)
            elif not dist.is_initialized() or dist.get_rank() == 0:
                torch.save(state, path)
            continue
        if not path.exists():  # tests/states has no flat ones, which are large
            continue
        other, optimizer = started(ranks, steps=0)
        if form == "whole":
            state = torch.load(path, weights_only=True)
        else:
            state = get_optimizer_state_dict(other, optimizer, options=settings)
            dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(other, optimizer, state, options=settings)
        for group in optimizer.param_groups:
            assert (group["step"], group["momentum"], group.get("new_option", 3)) == (2, 0.9, 3)
        for param, expected in zip(other.parameters(), model.parameters(), strict=True):
            for key, value in optimizer.state[param].items():
                reference = source.state[expected][key]
                torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-7)  # of another machine
                assert value.any()


if __name__ == "__main__":
    kind, place, rank, count = sys.argv[1:]
    if int(count) > 1:
        store = f"file://{place}/store-{kind}-{count}"
        dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=int(count))
    act(kind, Path(place), int(count))
    if int(count) > 1:
        dist.barrier()
        dist.destroy_process_group()
