"""Models that the ranks of a pool train with DeepSpeed, their batches, and the views of their weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.distributed.training import BATCH, VOCABULARY, WIDTH, Block, batches


class Experts(nn.Module):
    """A stack of matrices, each of which every token uses."""

    def __init__(self):
        super().__init__()
        self.num_experts = 3
        self.up_proj = nn.Parameter(torch.randn(3, WIDTH, 18) / 5)

    def forward(self, x):
        return x + F.pad(torch.tanh(torch.einsum("blw,ewh->eblh", x, self.up_proj)).sum(0), (0, WIDTH - 18))


class Model(nn.Module):
    """Shapes that straddle partitions and sub-groups, a stack, and a matrix that no batch reaches."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.experts = Experts()
        self.unused = nn.Linear(WIDTH, 6, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(self.experts(x)))


class Wide(nn.Module):
    """Partitions of Muon and of AdamW that DeepSpeed swaps, from 1 MiB a rank, and smaller ones that it does not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11000, 24)
        self.up, self.down = nn.Linear(24, 10350, bias=False), nn.Linear(10350, 24, bias=False)
        self.unused = nn.Linear(24, 6, bias=False)
        self.up2, self.down2 = nn.Linear(24, 10350, bias=False), nn.Linear(10350, 24, bias=False)
        self.norm = nn.LayerNorm(24)
        self.lm_head = nn.Linear(24, 11000, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        x = x + self.down2(torch.tanh(self.up2(x)))
        return self.lm_head(self.norm(x))


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def build_model(dtype="float32", frozen=False, wide=False):
    torch.manual_seed(0)
    model = (Wide if wide else Model)().to(getattr(torch, dtype))
    if frozen:
        model.blocks[1].requires_grad_(False)
        model.embed.requires_grad_(False)
    return model


def tokens_of(step, micro, accumulate, shard, shards):
    """Return a shard's micro-batch of a step. The whole batch does not depend on the number of shards."""
    rows = batches(step).view(accumulate, BATCH // accumulate, -1)[micro]
    return rows.chunk(shards)[shard]


def view_of(name):
    """Return the view of a weight: fused projections, transposed and interleaved experts, or bands of rows."""
    words = {"qkv": "rows 14+14+14", "up_proj": "transposed, columns 9*(1+1)", "down": "rows 4*(3+2)"}
    return next((view for word, view in words.items() if word in name), "")


def set_views(optimizer):
    """Give every matrix of Muon the view of `view_of`."""
    muon = optimizer.param_groups[0]
    muon["views"] = [view_of(name) for name in muon["param_names"]]
