"""What the ranks of a pool do with DeepSpeed, and the same in one process without it."""

from __future__ import annotations

import logging
import os

os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "DS_SKIP_CUDA_CHECK": "1"}

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed import initialize
from tests.distributed.training import BATCH, VOCABULARY, WIDTH, Block, batches

# Otherwise DeepSpeed compiles a C++ extension for collectives in shared memory, for a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.setLevel(logging.ERROR)
logging.getLogger("hf_muon").setLevel(logging.WARNING)

OPTIONS = {"ns_dtype": "fp32", "lr": 5e-3, "weight_decay": 0.1}


class Experts(nn.Module):
    """A stack of matrices, all of which are used."""

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


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def made(dtype="float32", frozen=False):
    torch.manual_seed(0)
    model = Model().to(getattr(torch, dtype))
    if frozen:
        model.blocks[1].requires_grad_(False)
        model.embed.requires_grad_(False)
    return model


def tokens_of(step, micro, accumulate, place, shards):
    """A micro-batch of one of some shards; the same whole batch however it is shared."""
    rows = batches(step).view(accumulate, BATCH // accumulate, -1)[micro]
    return rows.chunk(shards)[place]


def single(
    last=10, dtype="float32", accumulate=1, clipping=None, frozen=False, clip_directions=False, shards=1, **options
):
    """Steps of one process: fp32 master weights, gradients in the model's dtype, clipping before the step."""
    model = made(dtype, frozen)
    masters = made("float32", frozen)
    masters.load_state_dict(model.state_dict())
    optimizer = build_optimizer(masters, {**OPTIONS, **options})
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    working, exact = dict(model.named_parameters()), dict(masters.named_parameters())
    losses = []
    for step in range(last):
        model.zero_grad()
        total = 0.0
        for micro in range(accumulate):
            for place in range(shards):
                loss = loss_of(model, tokens_of(step, micro, accumulate, place, shards)) / accumulate / shards
                loss.backward()
                total += loss.item()
        losses.append(total)
        for name in names:
            grad = working[name].grad
            exact[name].grad = torch.zeros_like(exact[name]) if grad is None else grad.to(torch.float32, copy=True)
        if clipping:
            norm = torch.stack([exact[name].grad.norm() for name in names]).norm()
            for name in names:
                exact[name].grad.mul_(1 / max(float((norm + 1e-6) / clipping), 1.0))
        optimizer.step()
        for name in names:
            working[name].data.copy_(exact[name].data)
    return {"losses": losses, "weights": {name: working[name].detach().clone() for name in names}}


def config_of(stage, dtype, accumulate, clipping, zero):
    return {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size() // accumulate,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clipping or 0.0,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": stage, **zero},
    }


def engine_of(stage, dtype="float32", accumulate=1, clipping=None, frozen=False, zero_init=False, zero=None, **options):
    """An engine over the model, started as a script does."""
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    zero = dict(zero or {})
    if stage == 3:
        zero.setdefault("stage3_param_persistence_threshold", 100)
    config = config_of(stage, dtype, accumulate, clipping, zero)
    config.update(options.pop("config", {}))
    if zero_init:
        whole = made(dtype, frozen)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Model()
        for target, source in zip(model.parameters(), whole.parameters(), strict=True):
            target.requires_grad_(source.requires_grad)
            with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
                if dist.get_rank() == 0:
                    target.data.copy_(source.data)
    else:
        model = made(dtype, frozen)
    optimizer = build_optimizer(model, {**OPTIONS, **options})
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    return engine, optimizer


def train(rank, stage, first=0, last=10, save=None, load=None, same_data=False, accumulate=1, drop=None, **options):
    """Train steps `first` to `last` under ZeRO; losses, whole weights, and this rank's state."""
    engine, optimizer = engine_of(stage, accumulate=accumulate, **options)
    if load:
        engine.load_checkpoint(load)
    if drop:
        drop_momentum(optimizer, drop)
    shards, place = (1, 0) if same_data else (dist.get_world_size(), rank)
    losses = []
    for step in range(first, last):
        total = 0.0
        for micro in range(accumulate):
            tokens = tokens_of(step, micro, accumulate, place, shards)
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            total += loss.item() / accumulate
        summed = torch.tensor(total)
        dist.all_reduce(summed)
        losses.append(summed.item() / dist.get_world_size())
    if save:
        engine.save_checkpoint(save)
    names = {name for group in optimizer.param_groups for name in group["param_names"]}
    weights = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            if name in names:
                weights[name] = param.detach().clone()
    state = [{k: v.clone() for k, v in state.items()} for state in optimizer.state.values()]
    steps = [group["step"] for group in optimizer.param_groups]
    dtypes = sorted({str(v.dtype) for s in state for v in s.values()})
    engine.destroy()
    return {"losses": losses, "weights": weights, "state": state, "steps": steps, "dtypes": dtypes}


def drop_momentum(optimizer, how):
    for state in optimizer.state.values():
        if "momentum_buffer" in state:
            buffer = state["momentum_buffer"]
            buffer.copy_(torch.zeros_like(buffer) if how == "zero" else buffer.bfloat16())
