"""What the ranks of a pool do with DeepSpeed, and the same in one process without it."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "DS_SKIP_CUDA_CHECK": "1"}

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import attach, initialize
from tests.bounds import move
from tests.distributed.cases import Counted
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


class Wide(nn.Module):
    """Some partitions large enough for DeepSpeed to swap, 1 MiB a rank, in both halves, and some that stay."""

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


def made(dtype="float32", frozen=False, wide=False):
    torch.manual_seed(0)
    model = (Wide if wide else Model)().to(getattr(torch, dtype))
    if frozen:
        model.blocks[1].requires_grad_(False)
        model.embed.requires_grad_(False)
    return model


def why_no_async_io():
    """Why DeepSpeed's asynchronous I/O cannot be used here; None where it can."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if folder is None or not Path(folder, "async_io", "async_io.so").is_file():
        return "was not built (TORCH_EXTENSIONS_DIR, see the Makefile)"  # which takes minutes
    try:
        AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # noqa: BLE001  whatever a compiler and a linker say
        return f"{type(error).__name__}: {error}"
    return None


def tokens_of(step, micro, accumulate, place, shards):
    """A micro-batch of one of some shards; the same whole batch however it is shared."""
    rows = batches(step).view(accumulate, BATCH // accumulate, -1)[micro]
    return rows.chunk(shards)[place]


def view_of(name):
    """Fused projections part by part, experts as transposed and interleaved, and another matrix in bands."""
    words = {"qkv": "rows 14+14+14", "up_proj": "transposed, columns 9*(1+1)", "down": "rows 4*(3+2)"}
    return next((view for word, view in words.items() if word in name), "")


def see(optimizer):
    muon = optimizer.param_groups[0]
    muon["views"] = [view_of(name) for name in muon["param_names"]]


def single(
    last=10,
    dtype="float32",
    accumulate=1,
    clipping=None,
    frozen=False,
    wide=False,
    clip_directions=False,
    viewed=False,
    moved=None,
    **options,
):
    """Steps of one process: fp32 master weights, gradients in the model's dtype, clipping before the step.

    With `clip_directions`, what a clipped direction would give instead: the raw gradients, and a smaller step.
    """
    model = made(dtype, frozen, wide)
    move(model, moved)
    masters = made("float32", frozen, wide)
    masters.load_state_dict(model.state_dict())
    optimizer = build_optimizer(masters, {**OPTIONS, **options})
    if viewed:
        see(optimizer)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    working, exact = dict(model.named_parameters()), dict(masters.named_parameters())
    losses = []
    for step in range(last):
        model.zero_grad()
        total = 0.0
        for micro in range(accumulate):
            loss = loss_of(model, tokens_of(step, micro, accumulate, 0, 1)) / accumulate
            loss.backward()
            total += loss.item()
        losses.append(total)
        for name in names:
            grad = working[name].grad
            exact[name].grad = torch.zeros_like(exact[name]) if grad is None else grad.to(torch.float32, copy=True)
        if clipping:
            norm = torch.stack([exact[name].grad.norm() for name in names]).norm()
            factor = 1 / max(float((norm + 1e-6) / clipping), 1.0)
            assert factor < 0.5  # otherwise nothing is tested
            for name in names:
                if not clip_directions:
                    exact[name].grad.mul_(factor)
            if clip_directions:
                optimizer.param_groups[0]["lr"] = OPTIONS["lr"] * factor
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


def rank_of_environment():
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}


def engine_of(
    stage,
    dtype="float32",
    accumulate=1,
    clipping=None,
    frozen=False,
    wide=False,
    zero_init=False,
    zero=None,
    viewed=False,
    **options,
):
    """An engine over the model, started as a script does."""
    rank_of_environment()
    deepspeed.zero.Init.param_id = 0  # as in a process of its own; swap files have names by these numbers
    zero = dict(zero or {})
    if stage == 3:
        zero.setdefault("stage3_param_persistence_threshold", 100)
        zero.setdefault("memory_efficient_linear", False)  # it stays for the rest of the process, and rounds otherwise
    config = config_of(stage, dtype, accumulate, clipping, zero)
    config.update(options.pop("config", {}))
    if zero_init:
        whole = made(dtype, frozen, wide)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = (Wide if wide else Model)()
        for target, source in zip(model.parameters(), whole.parameters(), strict=True):
            target.requires_grad_(source.requires_grad)
            with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
                if dist.get_rank() == 0:
                    target.data.copy_(source.data)
    else:
        model = made(dtype, frozen, wide)
    optimizer = build_optimizer(model, {**OPTIONS, **options})
    if viewed:
        see(optimizer)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    return engine, optimizer


def train(
    rank,
    stage,
    first=0,
    last=10,
    save=None,
    load=None,
    same_data=False,
    accumulate=1,
    drop=None,
    overflow=None,
    **options,
):
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
            if step == overflow and rank == 1:
                loss = loss * torch.inf
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
    # A load leaves states in the order of the param groups.
    places = optimizer.partitioned.partitions or optimizer.state
    state = [{k: v.clone() for k, v in optimizer.state[param].items()} for param in places]
    steps = [group["step"] for group in optimizer.param_groups]
    dtypes = sorted({str(v.dtype) for s in state for v in s.values()})
    swapped = []
    if getattr(engine.optimizer, "swap_optimizer", False):
        swapped = [flat.numel() == 0 for flat in engine.optimizer.fp32_partitioned_groups_flat]
    engine.destroy()
    return {"losses": losses, "weights": weights, "state": state, "steps": steps, "dtypes": dtypes, "swapped": swapped}


def drop_momentum(optimizer, how):
    for state in optimizer.state.values():
        if "momentum_buffer" in state:
            buffer = state["momentum_buffer"]
            buffer.copy_(torch.zeros_like(buffer) if how == "zero" else buffer.bfloat16())


def complaint(rank, fault, stage=2, **options):
    """The error of a start, or of the first step, at which something is wrong."""
    try:
        if fault == "started without us":
            rank_of_environment()
            model = made()
            optimizer = build_optimizer(model, OPTIONS)
            config = config_of(stage, "float32", 1, None, {}) | {"zero_allow_untested_optimizer": True}
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        else:
            engine, optimizer = engine_of(stage, **options)
        wrapper = engine.optimizer
        if fault == "swapped":
            kind = type("DeepSpeedCPUAdam", (torch.optim.AdamW,), {})  # itself it takes minutes to compile
            wrapper.optimizer = kind(wrapper.optimizer.param_groups[0]["params"])
        elif fault == "subclass":
            wrapper.__class__ = type("OtherZeroOptimizer", (type(wrapper),), {})
        elif fault == "renamed":
            name = "fp16_groups" if stage == 3 else "bit16_groups_flat"
            setattr(wrapper, name + "_", wrapper.__dict__.pop(name))
        elif fault == "moved" and rank == 1:
            flat = next(iter(optimizer.partitioned.partitions))
            flat.data.copy_(flat.data.roll(1))
        if fault in ("swapped", "subclass", "renamed", "moved"):
            attach(engine, optimizer)
        loss = loss_of(engine, batches(0)[:4])
        engine.backward(loss)
        engine.step()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def consolidated(rank, path, stage):
    """Whether zero_to_fp32 finds the weights in a checkpoint that training has left."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = train(rank, stage, last=2, save=path)["weights"]
    dist.barrier()
    found = get_fp32_state_dict_from_zero_checkpoint(path)
    return {name: torch.equal(found[name], weight) for name, weight in weights.items()}


def sent(rank, stage, zero=None):
    """Bytes that this rank sends to others in one step, and bytes of all updates."""
    engine, optimizer = engine_of(stage, zero=zero)
    engine.backward(loss_of(engine, batches(0)[:4]))
    with Counted() as counted:
        engine.step()
    held = [
        part for flat, part in optimizer.partitioned.partitions.items() if "momentum_buffer" in optimizer.state[flat]
    ]
    updates = sum(4 * math.prod(part.shape) for partition in held for part in partition.slices)
    engine.destroy()
    return counted.bytes, updates


def cost(rank, stage):
    """What `hf-muon plan` foretells of a step."""
    engine, optimizer = engine_of(stage, viewed=True)
    engine.backward(loss_of(engine, batches(0)[:4]))
    with Counted() as counted:
        engine.step()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    engine.destroy()
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return {"sent_bytes": counted.bytes, "flops": counted.flops, "state_bytes": held}
