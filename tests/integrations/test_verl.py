"""verl's FSDP2: a class by its path, parameters of `fully_shard`, states and weights that move, a file of each rank.

As `build_optimizer`, `FSDPEngine.to` and `FSDPCheckpointManager` of verl 0.9.1 do. Ranks import `train` by name.
"""

from __future__ import annotations

import pkgutil
from collections import UserDict, UserList

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.distributed.training import Model, batches, wrap
from tests.equality.placed import whole

# As of OmegaConf: its DictConfig and ListConfig are a mapping and a sequence, and neither dict nor list.
OPTIONS = UserDict(
    momentum=0.9,
    normalize="rows",
    adamw_betas=UserList([0.9, 0.95]),
    adamw_patterns=UserList(["up"]),
    lr_scales=UserDict(embed=0.5),
)


def move(model, optimizer):
    """Move weights and states from a device to the host, or back: copy them, which is all that a CPU can do."""
    model._apply(torch.clone)
    for param in (param for group in optimizer.param_groups for param in group["params"] if optimizer.state):
        own = optimizer.state[param]
        own.update({key: value.clone() for key, value in own.items()})


def train(rank, folder, first=0, last=5, moves=0):
    """Return weights after some steps, between which everything moves so many times."""
    torch.manual_seed(0)
    reference, *_ = wrap(Model(), "fsdp")
    torch.manual_seed(0)
    model, shards, place = wrap(Model(), "fsdp")
    kind = pkgutil.resolve_name("hf_muon.MuonOfGroups")
    optimizer = kind(model.parameters(), lr=5e-3, weight_decay=0.1, **OPTIONS)
    if first:
        saved = torch.load(f"{folder}/{first}-{rank}.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, last):
        for _ in range(moves):
            move(model, optimizer)
        tokens = batches(step)[place::shards]
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/{last}-{rank}.pt")
    del reference  # alive until here, as a policy's reference is
    return [whole(param) for param in model.parameters()]


@pytest.mark.promise("verl")
def test_weights_and_states_that_move_resume_exactly(pools, tmp_path):
    expected = pools[2].run(train, folder=str(tmp_path))[0]
    for steps in ({"last": 3}, {"first": 3}, {}):
        weights = pools[2].run(train, folder=str(tmp_path), moves=2, **steps)[0]
        assert all(map(torch.equal, weights, expected)) is (steps != {"last": 3})
