"""Modules whose loss has given gradients: the sum of all weights times what their gradients shall be."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.training import Model


class Given(nn.Module):
    """Parameters of given names and shapes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return loss_with(self, gradients)


class Stack(nn.Module):
    """Experts, stored as (in, out)."""

    num_experts, is_transposed = 3, True

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.zeros(3, 10, 18))


class Routed(Model):
    """A model with fused, grouped and transposed weights, which hf_muon routes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(10, 2)
        self.conv = nn.Conv1d(6, 8, 3, groups=2)
        self.experts = Stack()

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return loss_with(self, gradients)


def loss_with(module: nn.Module, gradients: Mapping[str, Tensor]) -> Tensor:
    """Return a loss with these gradients; parameters without one have no part in it.

    Equal gradients of 2 or 4 ranks have a mean with the same bits, so wrappers that average leave them as they are.
    """
    total = torch.zeros(())
    for name, param in module.named_parameters():
        if name in gradients:
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            total = total + (whole * gradients[name]).sum()
    return total
