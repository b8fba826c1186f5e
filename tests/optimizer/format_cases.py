"""Save and load a small run in every form, on one rank or on two, also as versions with other options would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_muon
from hf_muon import build_optimizer
from hf_muon.optimizer import checkpoint_format

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


def save(
    rank: int,
    ranks: int,
    folder: Path,
    *,
    add: Mapping[str, Any] | None = None,
    remove: str = "",
    version: str = hf_muon.__version__,
) -> None:
    """Save in every form, as a version that has some options more, or lacks one."""
    to_text = checkpoint_format.to_text

    def written(content: dict[str, Any]) -> str:
        options = {name: value for name, value in content["options"].items() if name != remove}
        return to_text({**content, "options": {**options, **(add or {})}, "version": version})

    model, optimizer = started(ranks)
    with mock.patch.object(checkpoint_format, "to_text", written):
        for form, options in FORMS.items():
            state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
            if form != "whole":
                dcp.save(state, checkpoint_id=folder / form)
            elif rank == 0:
                torch.save(state, folder / form)


def load_form(form: str, ranks: int, folder: Path):
    """Return a new model and its optimizer, which has loaded one form."""
    model, optimizer = started(ranks, steps=0)
    settings = StateDictOptions(**FORMS[form])
    if form == "whole":
        state = torch.load(folder / form, weights_only=True)
    else:
        state = get_optimizer_state_dict(model, optimizer, options=settings)
        dcp.load(state, checkpoint_id=folder / form)
    set_optimizer_state_dict(model, optimizer, state, options=settings)
    return model, optimizer


def load(rank: int, ranks: int, folder: Path) -> None:
    """Load every form that a folder has, and compare with the run that was saved."""
    model, source = started(ranks)
    for form in FORMS:
        if not (folder / form).exists():  # tests/states has no flat ones, which are large
            continue
        other, optimizer = load_form(form, ranks, folder)
        for group, expected in zip(optimizer.param_groups, source.param_groups, strict=True):
            assert (group["step"], group["momentum"]) == (2, 0.9)
            assert {**group, "params": 0} == {**expected, "params": 0}
        for param, expected in zip(other.parameters(), model.parameters(), strict=True):
            for key, value in optimizer.state[param].items():
                reference = source.state[expected][key]
                torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-7)  # of another machine
                assert value.any()


def refused(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """Return the error of each form."""
    texts = {}
    for form in FORMS:
        try:
            load_form(form, ranks, folder)
        except ValueError as error:
            texts[form] = str(error)
    return texts
