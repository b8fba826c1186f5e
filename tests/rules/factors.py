"""Small modules with LoRA factors, without peft."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 13


class Factors(nn.Module):
    """A frozen layer with two factors of some names."""

    def __init__(self, down, up):
        super().__init__()
        self.layer = nn.Linear(20, 12).requires_grad_(False)
        self.add_module(down, nn.Linear(20, 3, bias=False))
        self.add_module(up, nn.Linear(3, 12, bias=False))


class Adapted(nn.Module):
    """A frozen layer with LoRA factors, as peft names them."""

    def __init__(self, out, rank):
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, out, bias=False).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, out, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class AdaptedModel(nn.Module):
    """Pairs of which two share their shapes, and a trained norm."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Adapted(WIDTH, 3), Adapted(WIDTH, 3), Adapted(WIDTH, 4), Adapted(7, 2)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for block in self.blocks[:-1]:
            x = x + torch.tanh(block(x))
        return self.blocks[-1](self.norm(x))
