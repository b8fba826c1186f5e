"""A model with a branch that not every micro-batch reaches, and parameters with DeepSpeed's own `use_muon`."""

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
    """A branch with a weight and a bias that a micro-batch reaches or not."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(18, 26, bias=False)
        self.branch = nn.Linear(26, 26)
        self.last = nn.Linear(26, 18, bias=False)

    def forward(self, x, reached):
        x = torch.tanh(self.first(x))
        return self.last(x + self.branch(x) if reached else x)


class Partial(nn.Module):
    """The model of DeepSpeed's test of partial training, with a flag on every matrix, also embedding and output."""

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


def _build(kind, dtype="float32"):
    torch.manual_seed(3)
    return kind().to(getattr(torch, dtype))


def _optimizer(model):
    return build_optimizer(model, lr=0.02, weight_decay=0.1, ns_dtype="fp32", muon_patterns=r"(first|last)\.weight")


def _rows(step, micro):
    return torch.randn(ROWS, 18, generator=torch.Generator().manual_seed(100 * step + micro))


def branched(pattern, accumulate=1, clipping=None, dtype="float32", overflow=None):
    """Train in one process and return the weights. A missing gradient is zeros, and step `overflow` is skipped.

    The sum of gradients is in fp32.
    """
    model, masters = _build(Branched, dtype), _build(Branched, dtype).float()
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
    weights = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=partitioned):
            weights[name] = param.detach().clone()
    return weights


def start_engine(model, stage, zero, batch=ROWS, accumulate=1, clipping=None, optimizer=_optimizer, **config):
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
    """Train as `branched` under ZeRO, with the same data on each rank; return the weights for each pattern."""
    weights = {}
    for pattern in patterns:
        model = _build(Branched, dtype)
        engine = start_engine(
            model, stage, zero, accumulate=accumulate, clipping=clipping, bf16={"enabled": dtype != "float32"}, **config
        )
        for step in range(STEPS):
            for micro in range(accumulate):
                x = _rows(step, micro).to(getattr(torch, dtype))
                reached = REACHED[pattern](step, micro, accumulate)
                loss = (engine(x, reached).float() - x.float()).square().mean()
                engine.backward(loss * torch.inf if step == overflow else loss)
                engine.step()
        weights[pattern] = weights_of(model, stage == 3)
        engine.destroy()
    return weights


def dropped(rank, stage, zero=None):
    """Return weights after a run in which `zero_grad` drops a gradient of the branch, and after one without it."""
    weights = []
    for drops in (True, False):
        model = _build(Branched)
        engine = start_engine(model, stage, zero)
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


FROZEN = {"nothing": (), "all but the table": ("layers", "output"), "one layer": ("layers.0",)}


def flag(model):
    for param in model.parameters():
        param.use_muon = param.ndim >= 2


def _tokens(step):
    return torch.randint(0, 100, (ROWS, 7), generator=torch.Generator().manual_seed(step))


def _everything(model):
    return build_optimizer(model, lr=0.02, ns_dtype="fp32")


def partly_frozen(frozen):
    model = _build(Partial)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(name.startswith(start) for start in FROZEN[frozen]))
    return model


def partial(frozen):
    """Train the partly frozen model in one process and return its weights."""
    model = partly_frozen(frozen)
    optimizer = _everything(model)
    for step in range(STEPS):
        tokens = _tokens(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    return weights_of(model)


def partial_in_zero(rank, stage, zero=None):
    """Train as `partial` under ZeRO, with parameters flagged before or after DeepSpeed wraps the model."""
    weights = {}
    for frozen, flagged in (("nothing", "before"), ("nothing", "after"), ("one layer", "before")):
        model = partly_frozen(frozen)
        if flagged == "before":
            flag(model)
        engine = start_engine(model, stage, zero, optimizer=_everything)
        if flagged == "after":
            flag(engine.module)
        for step in range(STEPS):
            tokens = _tokens(step)
            engine.backward(nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
            engine.step()
        weights[frozen, flagged] = weights_of(model, stage == 3)
        engine.destroy()
    return weights


def reports(rank, stage, zero=None, named_view=("first.weight", "rows 20+6")):
    """Return this rank's reports of the first step, whose micro-batch does not reach the branch."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    def viewed(model):
        optimizer = _optimizer(model)
        name, view = named_view
        group = optimizer.param_groups[0]
        group["views"] = [view if one == name else "" for one in group["param_names"]]
        return optimizer

    logger, keep = logging.getLogger("hf_muon"), Keep()
    level = logger.level
    os.environ["HF_MUON_STEP_REPORT"] = "1"
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    try:
        model = _build(Branched)
        engine = start_engine(model, stage, zero, optimizer=viewed)
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
