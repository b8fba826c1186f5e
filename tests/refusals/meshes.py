"""Parameters, gradients and moments on a mesh of one rank, in a place where torch or another program has put them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_muon import Muon
from hf_muon.distributed import groups
from hf_muon.optimizer import gradients
from hf_muon.storage import dtensor as stored
from hf_muon.storage import tensors
from tests.optimizer.cases import params_of
from tests.refusals import table
from tests.refusals.optimizer import alone, dtensor, step_of_swapped, unnamed


def made(local: torch.Tensor | None, owner: Any = stored, name: str = "shard_orders", value: Any = lambda _: {}) -> Any:
    """Return an attempt to step a sharded parameter, with an attribute of torch or hf_muon replaced."""

    def attempt(mesh: DeviceMesh) -> None:
        param, gradient = dtensor(mesh, Shard(0), local), dtensor(mesh, Shard(0)).detach()
        with mock.patch.object(owner, name, value):
            step_of_swapped(mesh, param, gradient)

    return alone(attempt)


def gradient_of_another_mesh(mesh: DeviceMesh) -> None:
    other = init_device_mesh("cpu", (1, 1))
    gradient = DTensor.from_local(torch.ones(4, 6), other, [Shard(0), Replicate()])
    step_of_swapped(mesh, dtensor(mesh, Shard(0)), gradient)


def gradient_on_meta(tensor: DTensor) -> torch.Tensor:
    return tensor._local_tensor if tensor.requires_grad else tensor._local_tensor.to("meta")


def resized(data: torch.Tensor) -> Any:
    """Return an attempt to step a parameter whose data were replaced after the backward pass."""

    def attempt() -> None:
        param = nn.Parameter(torch.ones(4, 6))
        param.grad = torch.ones(4, 6)
        optimizer = Muon([param])
        param.data = data
        optimizer.step()

    return attempt


def moment(placement: Any, param: Any) -> Any:
    """Return an attempt to load momentum with a placement."""

    def attempt(mesh: DeviceMesh) -> None:
        optimizer = Muon([param(mesh)], ns_dtype="fp32") if param else unnamed()
        if param:
            params_of(optimizer)[0].grad = dtensor(mesh, Shard(0)).detach()
            optimizer.step()
        state = optimizer.state_dict()
        local = torch.ones(params_of(optimizer)[0].shape)
        state["state"][0] = {**state["state"][0], "momentum_buffer": DTensor.from_local(local, mesh, [placement])}
        optimizer.load_state_dict(state)

    return alone(attempt)


def without_accelerator() -> None:
    with mock.patch.object(torch.accelerator, "is_available", return_value=False):
        tensors.accelerator()


STEP, LOAD = "Muon.step", "load_state_dict"
CASES = [
    *table(
        [
            ("local-shape", STEP, made(torch.zeros(3, 6)), r"\(3, 6\).*\(4, 6\)"),
            ("not-on-mesh", STEP, made(None, DeviceMesh, "get_coordinate", lambda _: None), r"\[0\]"),
            ("shard-order", STEP, made(None, stored, "shard_orders", lambda _: {0: (1, 0)}), r"dim 0 .*\(1, 0\)"),
            ("unexpected-split", STEP, made(None, stored, "_is_as_torch_splits", lambda *_: False)),
            ("no-backend", STEP, made(None, groups, "device_types", lambda _: ()), "cpu"),
            ("no-accelerator", STEP, without_accelerator),
            ("gradient-mesh", STEP, alone(gradient_of_another_mesh)),
            ("gradient-shape", STEP, resized(torch.zeros(7, 2)), r"\(4, 6\)"),
            ("gradient-device", STEP, made(None, gradients, "local_of", gradient_on_meta), "on cpu.* meta"),
        ],
        error=RuntimeError,
    ),
    *table(
        [
            ("moment-mesh", LOAD, moment(Shard(0), None), "momentum_buffer"),
        ]
    ),
]
