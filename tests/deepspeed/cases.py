"""Runs of the ranks of a pool with DeepSpeed, and the same training in one process without it."""

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
from deepspeed.utils import groups

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import attach, initialize
from tests.accelerated import accelerated
from tests.bounds import move
from tests.deepspeed.models import Model, Wide, build_model, loss_of, set_views, tokens_of
from tests.distributed.cases import Counted
from tests.distributed.training import BATCH, batches

# Keeps DeepSpeed from compiling its collectives in shared memory, which takes a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.setLevel(logging.ERROR)
logging.getLogger("hf_muon").setLevel(logging.WARNING)

OPTIONS = {"ns_dtype": "fp32", "lr": 5e-3, "weight_decay": 0.1}


def why_no_async_io():
    """Return the reason why DeepSpeed's asynchronous I/O does not work here, or None."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if folder is None or not Path(folder, "async_io", "async_io.so").is_file():
        return "was not built (TORCH_EXTENSIONS_DIR, see the Makefile)"  # building it takes minutes
    try:
        AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # noqa: BLE001  compilers and linkers fail in any way
        return f"{type(error).__name__}: {error}"
    return None


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
    scheduled=False,
    **options,
):
    """Train in one process, with fp32 master weights, gradients in the model's dtype, and clipping before the step.

    Args:
        last: number of steps.
        dtype: dtype of the model.
        accumulate: micro-batches of a step.
        clipping: norm to which gradients are clipped.
        frozen: whether a block and the embedding are frozen.
        wide: whether the model is `Wide`.
        clip_directions: whether to clip directions in place of gradients, which is wrong: a smaller learning rate.
        viewed: whether matrices have views.
        moved: a seed of `tests.bounds.move`.
        scheduled: whether every step has another learning rate.
        options: options of Muon.
    """
    model = build_model(dtype, frozen, wide)
    move(model, moved)
    masters = build_model("float32", frozen, wide)
    masters.load_state_dict(model.state_dict())
    optimizer = build_optimizer(masters, **{**OPTIONS, **options})
    if viewed:
        set_views(optimizer)
    scheduler = schedule_of(optimizer) if scheduled else None
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
            assert factor < 0.5, "clipping was not active"
            for name in names:
                if not clip_directions:
                    exact[name].grad.mul_(factor)
            if clip_directions:
                optimizer.param_groups[0]["lr"] = OPTIONS["lr"] * factor
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        for name in names:
            working[name].data.copy_(exact[name].data)
    return {"losses": losses, "weights": {name: working[name].detach().clone() for name in names}}


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


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
    scheduled=False,
    **options,
):
    """Start an engine as a script does; return the engine and its optimizer."""
    rank_of_environment()
    deepspeed.zero.Init.param_id = 0  # as in a new process: these numbers are in the names of swap files
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # as in a new process
    zero = dict(zero or {})
    if stage == 3:
        zero.setdefault("stage3_param_persistence_threshold", 100)
        zero.setdefault("memory_efficient_linear", False)  # it would last for the whole process, and rounds differently
    config = config_of(stage, dtype, accumulate, clipping, zero)
    config.update(options.pop("config", {}))
    if zero_init:
        whole = build_model(dtype, frozen, wide)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = (Wide if wide else Model)()
        for target, source in zip(model.parameters(), whole.parameters(), strict=True):
            target.requires_grad_(source.requires_grad)
            with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
                if dist.get_rank() == 0:
                    target.data.copy_(source.data)
    else:
        model = build_model(dtype, frozen, wide)
    optimizer = build_optimizer(model, **{**OPTIONS, **options})
    if viewed:
        set_views(optimizer)
    scheduler = schedule_of(optimizer) if scheduled else None
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler)
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
    """Train steps `first` to `last` under ZeRO; return losses, whole weights, and this rank's state."""
    engine, optimizer = engine_of(stage, accumulate=accumulate, **options)
    if load:
        engine.load_checkpoint(load)
    if drop:
        drop_momentum(optimizer, drop)
    shards, shard = (1, 0) if same_data else (dist.get_world_size(), rank)
    losses = []
    for step in range(first, last):
        total = 0.0
        for micro in range(accumulate):
            tokens = tokens_of(step, micro, accumulate, shard, shards)
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
    # Loading a checkpoint may change the order of `optimizer.state`.
    params = optimizer.partitioned.partitions or optimizer.state
    state = [{k: v.clone() for k, v in optimizer.state[param].items()} for param in params]
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
    """Return the error of a start, or of the first step, with a fault; None if there is no error."""
    try:
        if fault == "started without us":
            rank_of_environment()
            model = build_model()
            optimizer = build_optimizer(model, OPTIONS)
            config = config_of(stage, "float32", 1, None, {}) | {"zero_allow_untested_optimizer": True}
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        else:
            engine, optimizer = engine_of(stage, **options)
        wrapper = engine.optimizer
        if fault == "swapped":
            kind = type("DeepSpeedCPUAdam", (torch.optim.AdamW,), {})  # the real one takes minutes to compile
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
    """Return for each weight whether zero_to_fp32 reads it from a checkpoint bit for bit."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = train(rank, stage, last=2, save=path)["weights"]
    dist.barrier()
    state_dict = get_fp32_state_dict_from_zero_checkpoint(path)
    return {name: torch.equal(state_dict[name], weight) for name, weight in weights.items()}


def bytes_sent(rank, stage, zero=None):
    """Return the bytes that this rank sends to others in one step, and the bytes of all updates."""
    engine, optimizer = engine_of(stage, zero=zero)
    engine.backward(loss_of(engine, batches(0)[:4]))
    with Counted() as counted:
        engine.step()
    partitions = [
        part for flat, part in optimizer.partitioned.partitions.items() if "momentum_buffer" in optimizer.state[flat]
    ]
    updates = sum(4 * math.prod(part.shape) for partition in partitions for part in partition.slices)
    engine.destroy()
    return counted.bytes, updates


def cost(rank, stage):
    """Return the quantities of a step that `hf-muon plan` computes, measured with the units of accelerators."""
    engine, optimizer = engine_of(stage, viewed=True)
    engine.backward(loss_of(engine, batches(0)[:4]))
    with accelerated(), Counted() as counted:
        engine.step()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    stored = [getattr(param, "ds_tensor", param) for param in engine.module.parameters()]
    zero = engine.optimizer
    stored += zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    engine.destroy()
    return {
        "sent_bytes": counted.bytes,
        "flops": counted.flops,
        "state_bytes": state_bytes,
        "weight_bytes": weight_bytes,
    }
