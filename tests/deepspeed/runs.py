"""Training under ZeRO on the ranks of a pool, the same in one process, and what every parameter then consists of."""

from __future__ import annotations

import functools
import logging
import os

os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "DS_SKIP_CUDA_CHECK": "1"}

import deepspeed
import deepspeed.ops
import deepspeed.runtime.zero.partition_parameters
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn
from torch.nn import functional as F  # noqa: N812

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import initialize
from hf_muon.optimizer.state import is_by_row, row_numel
from tests.distributed.training import BATCH, VOCABULARY, WIDTH, Block, batches
from tests.e2e.cpu_ranks.deepspeed_0184 import wait_for_all_gathers
from tests.support.bounds import move

# Keeps DeepSpeed from compiling its collectives in shared memory, which takes a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
wait_for_all_gathers(deepspeed.runtime.zero.partition_parameters)
deepspeed.utils.logger.setLevel(logging.ERROR)
logging.getLogger("hf_muon").setLevel(logging.WARNING)

OPTIONS = {"ns_dtype": "fp32", "lr": 5e-3, "weight_decay": 0.1}
CPU = {"offload_optimizer": {"device": "cpu"}}
HPZ = {"zero_hpz_partition_size": 2}  # each node keeps a second copy of the parameters until the step
STAGES = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "1-cpu": {"stage": 1, "zero": CPU},
    "2": {"stage": 2},
    "2-cpu": {"stage": 2, "zero": CPU},
    "3": {"stage": 3},
    "3-cpu": {"stage": 3, "zero": {**CPU, "sub_group_size": 1500}},
}


# --- models


class Experts(nn.Module):
    """A stack of matrices, each of which every token uses."""

    def __init__(self):
        super().__init__()
        self.num_experts = 3
        self.up_proj = nn.Parameter(torch.randn(3, WIDTH, 18) / 5)

    def forward(self, x):
        return x + F.pad(torch.tanh(torch.einsum("blw,ewh->eblh", x, self.up_proj)).sum(0), (0, WIDTH - 18))


class Model(nn.Module):
    """Shapes that straddle partitions and sub-groups, a stack, a branch that a batch reaches or not, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.experts = Experts()
        self.branch = nn.Linear(WIDTH, 6)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, tokens, reached=False):
        self.calls += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + F.pad(torch.tanh(self.branch(x)), (0, WIDTH - 6)) if reached else x
        return self.lm_head(self.norm(self.experts(x)))


class Wide(nn.Module):
    """Partitions of Muon and of AdamW that DeepSpeed swaps, from 1 MiB a rank, and smaller ones that it does not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11000, 24)
        self.up, self.down = nn.Linear(24, 10350, bias=False), nn.Linear(10350, 24, bias=False)
        self.branch = nn.Linear(24, 6, bias=False)
        self.up2, self.down2 = nn.Linear(24, 10350, bias=False), nn.Linear(10350, 24, bias=False)
        self.norm, self.lm_head = nn.LayerNorm(24), nn.Linear(24, 11000, bias=False)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, tokens, reached=False):
        self.calls += 1
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        x = x + self.down2(torch.tanh(self.up2(x)))
        return self.lm_head(self.norm(x))


# Whether a micro-batch of so many reaches the branch, in a step and the next ones.
TURNS = [
    lambda micro, count: True,
    lambda micro, count: False,
    lambda micro, count: micro == 0,
    lambda micro, count: micro == count - 1,
    lambda micro, count: micro % 2 == 0,
    lambda micro, count: micro % 2 == 1,
    lambda micro, count: 0 < micro < count - 1,
]


def loss_of(model, tokens, reached=False):
    return F.cross_entropy(model(tokens[:, :-1], reached).flatten(0, 1).float(), tokens[:, 1:].flatten())


def build_model(dtype="float32", frozen=False, wide=False, tied=False, flagged=False):
    """Return a model, whose matrices all have DeepSpeed's own mark if it is `flagged`."""
    torch.manual_seed(0)
    model = (Wide if wide else Model)().to(getattr(torch, dtype))
    for param in model.parameters() if flagged else ():
        param.use_muon = param.ndim >= 2
    if frozen:
        model.blocks[1].requires_grad_(False)
        model.embed.requires_grad_(False)
    if tied:
        model.lm_head.weight = model.embed.weight
    return model


def split(options):
    """Return the options of `build_model`, and others."""
    own = {name: options[name] for name in ("dtype", "frozen", "wide", "tied", "flagged") if name in options}
    return own, {name: value for name, value in options.items() if name not in own}


def tokens_of(step, micro=0, accumulate=1, shard=0, shards=1):
    """Return a shard's micro-batch of a step. The whole batch does not depend on the number of shards."""
    rows = batches(step).view(accumulate, BATCH // accumulate, -1)[micro]
    return rows.chunk(shards)[shard]


def view_of(name):
    """Return the view of a weight: fused projections, transposed and interleaved experts, or bands of rows."""
    words = {"qkv": "rows 14+14+14", "up_proj": "transposed, columns 9*(1+1)", "down": "rows 4*(3+2)"}
    return next((view for word, view in words.items() if word in name), "")


def optimizer_of(model, viewed=False, scheduled=False, **options):
    """Return a Muon and its scheduler; with views of every matrix, and with another learning rate in every step."""
    # By its shape alone `Wide.down`, which has few rows, is a head.
    wide = {"muon_patterns": "down"} if isinstance(model, Wide) else {}
    optimizer = build_optimizer(model, **{**OPTIONS, **wide, **options})
    if viewed:
        muon = optimizer.param_groups[0]
        muon["views"] = [view_of(name) for name in muon["param_names"]]
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) if scheduled else None
    return optimizer, rate


# --- one process


@functools.lru_cache(maxsize=64)
def single(
    last,
    accumulate=1,
    clipping=None,
    clip_directions=False,
    moved=None,
    skipped=None,
    turns=False,
    fp32_sums=False,
    **options,
):
    """Train in one process with fp32 master weights, gradients in the model's dtype, and clipping before the step.

    Micro-batches of a step are its batch, cut in `accumulate`; they reach the branch as in `TURNS`, or never. To clip
    directions in place of gradients is wrong: it is a smaller learning rate. `moved` is a seed of
    `tests.support.bounds.move`, and the step `skipped` is left out.

    Returns:
        what `whole_state` returns before each step and after the last one, and the losses.
    """
    of_model, options = split(options)
    model, masters = build_model(**of_model), build_model(**{**of_model, "dtype": "float32"})
    move(model, moved)
    masters.load_state_dict(model.state_dict())
    optimizer, scheduler = optimizer_of(masters, **options)
    working, exact = dict(model.named_parameters()), dict(masters.named_parameters())
    trained = [name for group in optimizer.param_groups for name in group["param_names"]]

    def state():
        whole = {name: {"weight": param.detach().clone()} for name, param in working.items()}
        for name in trained:
            parts = {"master": exact[name].detach(), **optimizer.state[exact[name]]}
            whole[name] |= {key: part.reshape(-1).clone() for key, part in parts.items()}
        return whole

    states, losses = [state()], []
    for step in range(last):
        model.zero_grad()
        total, sums = 0.0, {name: torch.zeros_like(exact[name]) for name in trained}
        for micro in range(accumulate):
            reached = turns and TURNS[step % len(TURNS)](micro, accumulate)
            loss = loss_of(model, tokens_of(step, micro, accumulate), reached) / accumulate
            loss.backward()
            total += loss.item()
            if fp32_sums or micro == accumulate - 1:
                for name in trained:
                    sums[name] += 0 if working[name].grad is None else working[name].grad.float()
                model.zero_grad()
        losses.append(torch.tensor(total).item())  # in fp32, as ranks exchange it
        for name in trained:
            exact[name].grad = sums[name]
        if clipping:
            norm = torch.stack([exact[name].grad.norm() for name in trained]).norm()
            factor = 1 / max(float((norm + 1e-6) / clipping), 1.0)
            assert factor < 0.5, "clipping was not active"
            for name in trained:
                exact[name].grad.mul_(1 if clip_directions else factor)
            if clip_directions:
                optimizer.param_groups[0]["lr"] = OPTIONS["lr"] * factor
        if step != skipped:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        for name in trained:
            working[name].data.copy_(exact[name].data)
        states.append(state())
    return {"states": states, "losses": losses}


# --- ranks


def config_of(stage, dtype="float32", accumulate=1, clipping=None, zero=None):
    if stage == 3:  # it would last for the whole process, and rounds differently
        zero = {"memory_efficient_linear": False, **(zero or {})}
    return {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size() // accumulate,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clipping or 0.0,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": stage, **(zero or {})},
    }


def rank_of_environment():
    """Set what a launcher sets; DeepSpeed's counters and groups are those of a new process."""
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    deepspeed.zero.Init.param_id = 0  # these numbers are in the names of swap files
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def engine_of(stage, accumulate=1, clipping=None, zero_init=False, zero=None, config=None, fp32_sums=False, **options):
    """Start an engine as a script does; return the engine and its optimizer."""
    rank_of_environment()
    of_model, options = split(options)
    zero = dict(zero or {})
    if fp32_sums:  # without `reduce_scatter`, with which DeepSpeed loses some gradients of any optimizer
        zero["reduce_scatter"] = False
        config = {**(config or {}), "data_types": {"grad_accum_dtype": "fp32"}}
    if stage == 3:
        zero.setdefault("stage3_param_persistence_threshold", 100)
    config = {**config_of(stage, of_model.get("dtype"), accumulate, clipping, zero), **(config or {})}
    model = build_model(**of_model)
    if zero_init:
        whole = model
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Model()
        for target, source in zip(model.parameters(), whole.parameters(), strict=True):
            target.requires_grad_(source.requires_grad)
            with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
                if dist.get_rank() == 0:
                    target.data.copy_(source.data)
    optimizer, scheduler = optimizer_of(model, **options)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler)
    return engine, optimizer


def weights_of(model):
    """Return the whole weights by name."""
    weights = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            weights[name] = param.detach().clone()
    return weights


def whole_state(engine, optimizer):
    """Return for each parameter its weight, and its master weight and moments, flat, of all ranks' partitions.

    What DeepSpeed has swapped to a disk is left out.
    """
    result = {name: {"weight": weight} for name, weight in weights_of(engine.module).items()}
    if optimizer.partitioned.partitions is None:
        names = {param: name for name, param in engine.module.named_parameters()}
        of_groups = getattr(engine.optimizer, "fp16_groups", None) or [g["params"] for g in optimizer.param_groups]
        for group, standing in zip(of_groups, optimizer.param_groups, strict=True):
            for param, master in zip(group, standing["params"], strict=True):
                for key, value in {"master": master.detach(), **optimizer.state[master]}.items():
                    result[names[param]][key] = value.reshape(-1).clone()
        return result
    pieces = {}
    for flat, partition in optimizer.partitioned.partitions.items():
        state = dict(optimizer.state[flat])
        small = {key: state.pop(key) for key in list(state) if is_by_row(key)}
        for part in partition.slices if flat.numel() else ():
            for key, value in small.items():
                numel = row_numel(part.shape, part.view.text)
                result[part.name][key], small[key] = value[:numel].clone(), value[numel:]
            for key, value in {"master": flat.detach(), **state}.items():
                own = value.reshape(1) if key == "step" else value[part.elements(partition.rank)]
                pieces[part.name, key] = own.clone()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    for name, key in pieces:
        own = [rank[name, key] for rank in gathered]
        result[name][key] = own[0] if key == "step" else torch.cat(own)
    return result


def run(
    rank,
    stage,
    last,
    first=0,
    load=None,
    saves=None,
    shared=True,
    lost=None,
    skips=(None, None),
    turns=False,
    **options,
):
    """Train steps `first` to `last` under ZeRO.

    Args:
        rank: of this process.
        stage, options: of `engine_of`.
        last, first: steps.
        load: folder of a checkpoint, or None.
        saves: folders by the number of steps after which a checkpoint is written there.
        shared: whether all ranks have the whole batch, so that sums that DeepSpeed rounds are exact; else a shard each.
        lost: what a checkpoint is to lose, "zero" or "cast": momentum, or its precision.
        skips: "overflow" and a step whose loss is infinite on rank 1, or "drop" and one whose gradients a loop drops.
        turns: as in `single`.

    Returns:
        the whole state right after the load, and at the end; the losses; what the checkpoint counts; the optimizer's
        steps at the end; dtypes of moments; and for NVMe, which partitions are swapped.
    """
    engine, optimizer = engine_of(stage, **options)
    accumulate = options.get("accumulate", 1)
    counts = {0}
    if load:
        for param in engine.module.parameters():  # frozen ones, too
            for tensor in (param, getattr(param, "ds_tensor", param)):
                tensor.data.zero_()
        _, client = engine.load_checkpoint(load)
        assert not any("hf_muon" in key for key in client)
        steps = {group["step"] for group in optimizer.param_groups}
        calls = {int(calls) // accumulate for calls in engine.module.calls}
        counts = {engine.global_steps, client["last"], *steps, *calls}
    for state in optimizer.state.values() if lost else ():
        if "momentum_buffer" in state:
            buffer = state["momentum_buffer"]
            buffer.copy_(torch.zeros_like(buffer) if lost == "zero" else buffer.bfloat16())
    loaded = whole_state(engine, optimizer) if load else None
    shards, shard = (1, 0) if shared else (dist.get_world_size(), rank)
    losses = []
    for step in range(first, last):
        total = 0.0
        for micro in range(accumulate):
            reached = turns and TURNS[step % len(TURNS)](micro, accumulate)
            loss = loss_of(engine, tokens_of(step, micro, accumulate, shard, shards), reached)
            total += loss.item() / accumulate
            engine.backward(loss * torch.inf if skips == ("overflow", step) and rank == 1 else loss)
            (engine.optimizer.zero_grad if skips == ("drop", step) else engine.step)()
        summed = torch.tensor(total)
        dist.all_reduce(summed)
        losses.append(summed.item() / dist.get_world_size())
        if step + 1 in (saves or {}):
            engine.save_checkpoint(saves[step + 1], client_state={"last": step + 1})
    moments = {str(value.dtype) for state in optimizer.state.values() for value in state.values()}
    swaps = getattr(engine.optimizer, "swap_optimizer", False)
    result = {
        "loaded": loaded,
        "ended": whole_state(engine, optimizer),
        "losses": losses,
        "counts": counts,
        "steps": [group["step"] for group in optimizer.param_groups],
        "dtypes": moments,
        "swapped": [flat.numel() == 0 for flat in engine.optimizer.fp32_partitioned_groups_flat] if swaps else [],
    }
    engine.destroy()
    return result


# --- comparisons


def assert_same(state, expected, where=""):
    """Compare whole weights, master weights and moments bit for bit."""
    assert state.keys() == expected.keys(), where
    for name, tensors in expected.items():
        assert state[name].keys() == tensors.keys(), (where, name)
        for key, tensor in tensors.items():
            assert state[name][key].dtype == tensor.dtype, (where, name, key)
            assert torch.equal(state[name][key], tensor), (where, name, key)


def assert_weights(weights, expected):
    """Compare weights, by name, bit for bit."""
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


def why_no_async_io():
    """Return the reason why DeepSpeed's asynchronous I/O does not work here, or None."""
    from pathlib import Path

    from deepspeed.ops.op_builder import AsyncIOBuilder

    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if folder is None or not Path(folder, "async_io", "async_io.so").is_file():
        return "was not built (TORCH_EXTENSIONS_DIR, see the Makefile)"  # building it takes minutes
    try:
        AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # noqa: BLE001  compilers and linkers fail in any way
        return f"{type(error).__name__}: {error}"
    return None
