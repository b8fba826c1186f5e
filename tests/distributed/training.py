"""Training of a small model in every layout, with the batches of its ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812

from hf_muon import build_optimizer
from hf_muon.storage.factors import factors_of
from tests.support.fixtures_text import texts

WIDTH, HIDDEN, VOCABULARY, LENGTH, BATCH = 20, 52, 96, 24, 8


class Block(nn.Module):
    """Attention with one head, and an MLP; its shapes split unevenly over 2 and 4 ranks of FSDP2."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * 14, bias=False)
        self.out = nn.Linear(14, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


TP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def wrap(model, layout, layers=None, plan=TP_PLAN):
    """Return the model in a layout, the number of ranks that share a batch, and this rank's index among them."""
    layers = model.blocks if layers is None else layers
    if layout == "single":
        return model, 1, 0
    world, rank = dist.get_world_size(), dist.get_rank()
    if layout == "ddp":
        # By default DDP reorders its buckets after the first backward pass of a process, and sums over four ranks then
        # round differently: a resumed process would not have the gradients of the uninterrupted one.
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), world, rank
    shards, place = world, rank
    options = {"mesh": init_device_mesh("cpu", (world,))} if layout == "fsdp" else {}
    if layout == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    if layout in ("tp", "fsdp-tp"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for layer in layers:
            parallelize_module(layer, mesh["tp"], plan)
        if layout == "tp":
            return model, 1, 0
        options["mesh"] = mesh["dp"]
        shards, place = world // 2, rank // 2
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options), shards, place


def factors(rank, layout, **options):
    """Return the factor of the learning rate of each parameter of a model in a layout."""
    groups = build_optimizer(wrap(Model(), layout)[0], options).param_groups
    return {name: own for g in groups for name, own in zip(g["param_names"], factors_of(g), strict=True)}


def batches(step):
    """Return texts of the standard library as token ids, ``(BATCH, LENGTH + 1)``, which a model can learn."""
    text = "\n".join(texts(10))
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator).tolist()
    rows = [[min(max(ord(c) - 32, 0), VOCABULARY - 1) for c in text[start : start + LENGTH + 1]] for start in starts]
    return torch.tensor(rows)


def freeze(model):
    for frozen in (model.blocks[0], model.norm):
        frozen.requires_grad_(False)


def train(rank, layout, last, folder="", **options):
    """Train for some steps. A block and a norm are frozen.

    Args:
        rank: of this process.
        layout: as of `wrap`.
        last: number of steps.
        folder: for a file of metrics of this rank.
        options: of the optimizer.
    """
    torch.manual_seed(0)
    model = Model()
    freeze(model)
    model, shards, place = wrap(model, layout)
    if folder:
        options = {"diagnostics_every": 2, "diagnostics_file": f"{folder}/{rank}.jsonl", **options}
    optimizer = build_optimizer(model, **{"ns_dtype": "fp32", "lr": 5e-3, "weight_decay": 0.1, **options})
    muon = optimizer.param_groups[0]
    words = {"qkv": "rows 14+14+14", "down": "columns 26*(1+1)"}
    muon["views"] = [next((v for w, v in words.items() if w in n), "") for n in muon["param_names"]]
    for step in range(last):
        optimizer.zero_grad()
        tokens = batches(step).chunk(shards)[place]
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
