"""A model of which a micro-batch reaches a part, and parameters that carry DeepSpeed's own `use_muon`."""

from __future__ import annotations

import logging
import os

import deepspeed
import torch
from torch import nn

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import initialize
from tests.deepspeed.cases import rank_of_environment  # first: it sets DeepSpeed up for the CPU

ROWS = 4
STEPS = 4


class Branched(nn.Module):
    """A branch with a matrix and a bias, one for each half, that a micro-batch reaches or not."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(18, 26, bias=False)
        self.branch = nn.Linear(26, 26)
        self.last = nn.Linear(26, 18, bias=False)

    def forward(self, x, reached):
        x = torch.tanh(self.first(x))
        return self.last(x + self.branch(x) if reached else x)


class Partial(nn.Module):
    """DeepSpeed's test of partial training: its flag on every matrix, the table and the output among them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.output = nn.Linear(64, 100)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.output(x)


REACHED = {
    "odd steps never": lambda step, micro, count: step % 2 == 0,
    "first micro-batch only": lambda step, micro, count: micro == 0,
    "last micro-batch only": lambda step, micro, count: micro == count - 1,
    "in turn": lambda step, micro, count: (step + micro) % 2 == 0,
    "always": lambda step, micro, count: True,
}


def _made(kind, dtype="float32"):
    torch.manual_seed(3)
    return kind().to(getattr(torch, dtype))


def _optimizer(model):
    return build_optimizer(model, lr=0.02, weight_decay=0.1, ns_dtype="fp32", muon_patterns=r"(first|last)\.weight")


def _rows(step, micro):
    return torch.randn(ROWS, 18, generator=torch.Generator().manual_seed(100 * step + micro))


def branched(pattern, accumulate=1, clipping=None, dtype="float32", overflow=None):
    """Weights after steps in one process, zeros for a gradient that is missing. Step `overflow` is skipped.

    Gradients are added up in fp32.
    """
    model, masters = _made(Branched, dtype), _made(Branched, dtype).float()
    optimizer = _optimizer(masters)
    for step in range(STEPS):
        if step == overflow:
            continue
        for master in masters.parameters():
            master.grad = torch.zeros_like(master)
        for micro in range(accumulate):
            model.zero_grad()
            x = _rows(step, micro).to(model.first.weight)
            reached = REACHED[pattern](step, micro, accumulate)
            ((model(x, reached).float() - x.float()).square().mean() / accumulate).backward()
            for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                if param.grad is not None:
                    master.grad += param.grad.float()
        if clipping:
            assert nn.utils.clip_grad_norm_(masters.parameters(), clipping) > 2 * clipping
        optimizer.step()
        for param, master in zip(model.parameters(), masters.parameters(), strict=True):
            param.data.copy_(master.data)
    return weights_of(model)


def weights_of(model, partitioned=False):
    found = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=partitioned):
            found[name] = param.detach().clone()
    return found


def started(model, stage, zero, batch=ROWS, accumulate=1, clipping=None, optimizer=_optimizer, **config):
    rank_of_environment()
    settings = {"stage": stage, **(zero or {})}
    if stage == 3:
        settings.setdefault("stage3_param_persistence_threshold", 0)
        settings.setdefault("memory_efficient_linear", False)
    engine, *_ = initialize(
        model=model,
        optimizer=optimizer(model),
        config={
            "train_micro_batch_size_per_gpu": batch,
            "gradient_accumulation_steps": accumulate,
            "gradient_clipping": clipping or 0.0,
            "zero_optimization": settings,
            **config,
        },
    )
    return engine


def branched_in_zero(
    rank, stage, patterns, accumulate=1, zero=None, clipping=None, dtype="float32", overflow=None, **config
):
    """The same under ZeRO, each rank with the same data: for each pattern the weights."""
    found = {}
    for pattern in patterns:
        model = _made(Branched, dtype)
        engine = started(
            model, stage, zero, accumulate=accumulate, clipping=clipping, bf16={"enabled": dtype != "float32"}, **config
        )
        for step in range(STEPS):
            for micro in range(accumulate):
                x = _rows(step, micro).to(getattr(torch, dtype))
                reached = REACHED[pattern](step, micro, accumulate)
                loss = (engine(x, reached).float() - x.float()).square().mean()
                engine.backward(loss * torch.inf if step == overflow else loss)
                engine.step()
        found[pattern] = weights_of(model, stage == 3)
        engine.destroy()
    return found


def dropped(rank, stage, zero=None):
    """Weights after a gradient of the branch that `zero_grad` dropped, and after a run that never had it."""
    weights = []
    for drops in (True, False):
        model = _made(Branched)
        engine = started(model, stage, zero)
        for step, reached in ((0, True), (1, True), (2, False)):
            x = _rows(step, 0)
            if step != 1 or drops:
                engine.backward((engine(x, reached) - x).square().mean())
            if step == 1:
                engine.optimizer.zero_grad()
            else:
                engine.step()
        weights.append(weights_of(model, stage == 3))
        engine.destroy()
    return weights


def forgetful(rank, **options):
    """The same with a DeepSpeed that keeps no sum of micro-batches but the first, as 0.18.4 with CPU offload."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    plain = DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu

    def accumulate(self, param):
        number = self.get_param_id(param)
        kept = self.accumulated_grads_in_cpu.get(number)
        before = 0.0 if kept is None else kept.clone()
        plain(self, param)
        if self.micro_step_id > 0:
            self.accumulated_grads_in_cpu[number].copy_(torch.as_tensor(before))

    DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu = accumulate
    try:
        return branched_in_zero(rank, **options)
    finally:
        DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu = plain


FROZEN = {"nothing": (), "all but the table": ("layers", "output"), "one layer": ("layers.0",)}


def flag(model):
    for param in model.parameters():
        param.use_muon = param.ndim >= 2


def _tokens(step):
    return torch.randint(0, 100, (ROWS, 7), generator=torch.Generator().manual_seed(step))


def _everything(model):
    return build_optimizer(model, lr=0.02, ns_dtype="fp32")


def partly_frozen(frozen):
    model = _made(Partial)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(name.startswith(start) for start in FROZEN[frozen]))
    return model


def partial(frozen):
    """Weights of the partly frozen model after some steps in one process."""
    model = partly_frozen(frozen)
    optimizer = _everything(model)
    for step in range(STEPS):
        tokens = _tokens(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    return weights_of(model)


def partial_in_zero(rank, stage, zero=None):
    """The same under ZeRO, with DeepSpeed's flag on the parameters, set before or after they are wrapped."""
    found = {}
    for frozen, flagged in (("nothing", "before"), ("nothing", "after"), ("one layer", "before")):
        model = partly_frozen(frozen)
        if flagged == "before":
            flag(model)
        engine = started(model, stage, zero, optimizer=_everything)
        if flagged == "after":
            flag(engine.module)
        for step in range(STEPS):
            tokens = _tokens(step)
            engine.backward(nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
            engine.step()
        found[frozen, flagged] = weights_of(model, stage == 3)
        engine.destroy()
    return found


def reported(rank, stage, zero=None, seen=("first.weight", "rows 20+6")):
    """The report of the first step, of which a micro-batch does not reach the branch."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    def viewed(model):
        optimizer = _optimizer(model)
        name, view = seen
        group = optimizer.param_groups[0]
        group["views"] = [view if one == name else "" for one in group["param_names"]]
        return optimizer

    logger, keep = logging.getLogger("hf_muon"), Keep()
    level = logger.level
    os.environ["HF_MUON_STEP_REPORT"] = "1"
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    try:
        model = _made(Branched)
        engine = started(model, stage, zero, optimizer=viewed)
        for step in (1, 2):
            x = _rows(step, 0)
            engine.backward((engine(x, False) - x).square().mean())
            engine.step()
        engine.destroy()
    finally:
        logger.removeHandler(keep)
        logger.setLevel(level)
        del os.environ["HF_MUON_STEP_REPORT"]
    return [line for line in lines if line.startswith("the first step")]
