"""The device that data travels from."""

from __future__ import annotations

import torch

from hf_muon.distributed.select import comm_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_data_travels_where_the_group_has_a_backend():
    class Nccl:
        def _get_backend(self, device):
            if device.type != "cuda":
                raise RuntimeError("No backend type associated with device type cpu")

    class Both:
        def _get_backend(self, device):
            pass

    assert comm_device(Nccl(), CPU, CUDA) == CUDA
    assert comm_device(Both(), CPU, CUDA) == CPU
    assert comm_device(Nccl(), CUDA, CUDA) == CUDA
