"""The device that data travels from."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hf_muon.distributed.select import comm_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_data_travels_where_the_group_has_a_backend():
    nccl, both = SimpleNamespace(_device_types=["cuda"]), SimpleNamespace(_device_types=["cpu", "cuda"])
    assert comm_device(nccl, CPU, CUDA) == CUDA
    assert comm_device(both, CPU, CUDA) == CPU
    assert comm_device(nccl, CUDA, CUDA) == CUDA
