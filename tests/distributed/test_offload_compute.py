"""The device that orthogonalizes momentum stored on the CPU."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_muon import MuonConfig, build_optimizer
from hf_muon.distributed.select import comm_device, compute_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("stored", "home", "option", "expected"),
    [
        (CPU, CUDA, "auto", CUDA),
        (CPU, CUDA, "cpu", CPU),
        (CPU, CUDA, "accelerator", CUDA),
        (CPU, CPU, "auto", CPU),  # no offload
        (CPU, CPU, "cpu", CPU),
        (CUDA, CUDA, "cpu", CUDA),  # no offload either
        (CUDA, CUDA, "auto", CUDA),
        (CUDA, CUDA, "accelerator", CUDA),
    ],
    ids=str,
)
def test_device(stored, home, option, expected):
    assert compute_device(stored, home, option) == expected


def test_data_travels_where_the_group_has_a_backend():
    nccl, both = SimpleNamespace(_device_types=["cuda"]), SimpleNamespace(_device_types=["cpu", "cuda"])
    assert comm_device(nccl, CPU, CUDA) == CUDA
    assert comm_device(both, CPU, CUDA) == CPU
    assert comm_device(nccl, CUDA, CUDA) == CUDA


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_an_accelerator_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="offload_compute=accelerator needs an accelerator, and torch sees none"):
        build_optimizer(nn.Linear(4, 4), lr=1e-3, offload_compute="accelerator")


def test_other_words_are_refused():
    with pytest.raises(ValueError, match=r"offload_compute='gpu' is not valid\. Valid: auto, cpu or accelerator"):
        MuonConfig(offload_compute="gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("ns_dtype", ["fp32", "fp16", "auto"])
def test_there_and_back_gives_what_the_accelerator_gives(ns_dtype):
    torch.manual_seed(0)
    here = nn.Linear(64, 48)
    there = copy.deepcopy(here).cuda()
    optimizers = [
        build_optimizer(here, lr=1e-2, ns_dtype=ns_dtype, offload_compute="accelerator"),
        build_optimizer(there, lr=1e-2, ns_dtype=ns_dtype),
    ]
    for _ in range(3):
        gradient = torch.randn(48, 64)
        for model, optimizer in zip((here, there), optimizers, strict=True):
            model.weight.grad = gradient.to(model.weight.device)
            optimizer.step()
    torch.testing.assert_close(here.weight, there.weight.cpu(), rtol=0, atol=1e-7)
    assert optimizers[0].state[here.weight]["momentum_buffer"].device.type == "cpu"
