"""Gradients that reach Muon under ZeRO: the sum of the micro-batches of one step, orthogonalized once.

LLaMA-Factory's stack has an older DeepSpeed, which loses gradients that later versions do not: it repeats cases with
the mark `every_deepspeed`. That version handles bf16 steps that overflow, and fp32 sums of bf16 gradients, differently.
"""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from importlib.metadata import version
from unittest import mock

import pytest
import torch
from torch import nn

from hf_muon import Muon, build_optimizer
from hf_muon.integrations.deepspeed.engine import initialize
from hf_muon.integrations.deepspeed.gradients import OrthogonalizedMomentum, hide_name
from hf_muon.versions import is_older
from tests.deepspeed.runs import CPU, STAGES, assert_weights, rank_of_environment, weights_of

pytestmark = pytest.mark.usefixtures("quiet")

ROWS = 4
STEPS = 4
CELLS = {
    **STAGES,
    "2-cpu-overlap": {"stage": 2, "zero": {**CPU, "overlap_comm": True, "reduce_bucket_size": 300}},
    "2-cpu-round-robin": {"stage": 2, "zero": {**CPU, "round_robin_gradients": True}},
    "3-sub-groups": {"stage": 3, "zero": {"sub_group_size": 300}},
    "3-cpu-sub-groups": {"stage": 3, "zero": {**CPU, "sub_group_size": 300}},
}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
later = pytest.mark.skipif(is_older(version("deepspeed"), "0.19"), reason="holds for later versions of DeepSpeed")


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


REACHED = {
    "odd steps never": lambda step, micro, count: step % 2 == 0,
    "first micro-batch only": lambda step, micro, count: micro == 0,
    "last micro-batch only": lambda step, micro, count: micro == count - 1,
    "in turn": lambda step, micro, count: (step + micro) % 2 == 0,
    "always": lambda step, micro, count: True,
}


def build(kind, dtype="float32"):
    torch.manual_seed(3)
    return kind().to(getattr(torch, dtype))


def optimizer_of(model):
    return build_optimizer(model, lr=0.02, weight_decay=0.1, ns_dtype="fp32", muon_patterns=r"(first|last)\.weight")


def loss_of(model, step, micro=0, reached=True, dtype=torch.float32):
    """Return the loss of a micro-batch, the same on all ranks."""
    x = torch.randn(ROWS, 18, generator=torch.Generator().manual_seed(100 * step + micro)).to(dtype)
    return (model(x, reached).float() - x.float()).square().mean()


@functools.cache
def branched(pattern, accumulate=1, clipping=None, dtype="float32", overflow=None):
    """Train in one process and return the weights. A missing gradient is zeros, and step `overflow` is skipped.

    The sum of gradients is in fp32.
    """
    model, masters = build(Branched, dtype), build(Branched, dtype).float()
    optimizer = optimizer_of(masters)
    for step in set(range(STEPS)) - {overflow}:
        for master in masters.parameters():
            master.grad = torch.zeros_like(master)
        for micro in range(accumulate):
            model.zero_grad()
            reached = REACHED[pattern](step, micro, accumulate)
            (loss_of(model, step, micro, reached, model.first.weight.dtype) / accumulate).backward()
            for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                if param.grad is not None:
                    master.grad += param.grad.float()
        if clipping:
            assert nn.utils.clip_grad_norm_(masters.parameters(), clipping) > 2 * clipping
        optimizer.step()
        for param, master in zip(model.parameters(), masters.parameters(), strict=True):
            param.data.copy_(master.data)
    return weights_of(model)


def start_engine(
    model, stage, zero=None, accumulate=1, clipping=None, dtype="float32", optimizer=optimizer_of, **config
):
    rank_of_environment()
    more = {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False} if stage == 3 else {}
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clipping or 0.0,
        "bf16": {"enabled": dtype != "float32"},
        "zero_optimization": {"stage": stage, **more, **(zero or {})},
        **config,
    }
    return initialize(model=model, optimizer=optimizer(model), config=settings)[0]


def branched_in_zero(rank, patterns, accumulate=1, dtype="float32", overflow=None, **options):
    """Train as `branched` under ZeRO; return the weights for each pattern."""
    weights = {}
    for pattern in patterns:
        engine = start_engine(build(Branched, dtype), accumulate=accumulate, dtype=dtype, **options)
        for step in range(STEPS):
            for micro in range(accumulate):
                reached = REACHED[pattern](step, micro, accumulate)
                loss = loss_of(engine, step, micro, reached, getattr(torch, dtype))
                engine.backward(loss * torch.inf if step == overflow else loss)
                engine.step()
        weights[pattern] = weights_of(engine.module)
        engine.destroy()
    return weights


def assert_as_in_one_process(ranks, patterns, zero, **options):
    """Train with each pattern, and compare with one process."""
    for weights in ranks.run(branched_in_zero, patterns=patterns, **options, **zero):
        for pattern in patterns:
            assert_weights(weights[pattern], branched(pattern, **options))


@pytest.mark.promise("deepspeed-gradients")
@pytest.mark.first_tier("^(2-cpu|3)-4")
@pytest.mark.parametrize(
    ("cell", "accumulate"),
    [
        pytest.param(cell, count, marks=[pytest.mark.every_deepspeed] if (cell, count) == ("2-cpu", 4) else [])
        for cell in CELLS
        for count in (1, 4)
    ],
)
def test_a_branch_that_not_every_micro_batch_reaches(ranks, cell, accumulate):
    """Run four micro-batches a step, of which DeepSpeed 0.18.4 loses the middle ones in ZeRO-2 with CPU offload."""
    patterns = list(REACHED) if accumulate > 1 else ["odd steps never"]
    assert_as_in_one_process(ranks, patterns, CELLS[cell], accumulate=accumulate)


@later
@pytest.mark.first_tier("2-cpu")
@pytest.mark.parametrize("zero", [{}, CPU], ids=["2", "2-cpu"])
def test_gradients_of_bf16_that_are_added_up_in_fp32(ranks, zero):
    """Run without `reduce_scatter`, with which DeepSpeed loses some gradients of any optimizer."""
    cell = {"stage": 2, "zero": {**zero, "reduce_scatter": False}, **FP32_SUMS}
    assert_as_in_one_process(ranks, list(REACHED), cell, dtype="bfloat16", accumulate=4)


@pytest.mark.every_deepspeed
@pytest.mark.first_tier("^(2|3)$")
@pytest.mark.parametrize("cell", [cell for cell in STAGES if cell != "0"])
def test_what_a_step_does_not_reach_does_not_count_when_gradients_are_clipped(ranks, cell):
    pattern = "odd steps never"
    expected = branched(pattern, clipping=0.1)
    # Gradients of four rows have a low rank, so that Muon orthogonalizes their rounding, too. The bound is measured: it
    # is how far a few units in the last place of the factor move the weights. An old gradient moves them 10,000 times
    # as far.
    rounded = branched(pattern, clipping=0.1 * (1 + 2**-20))
    weights = ranks.run(branched_in_zero, patterns=[pattern], clipping=0.1, **CELLS[cell])[0][pattern]
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() < 10 * (rounded[name] - weight).norm(), name


@later
@pytest.mark.first_tier("^(2|2-cpu-fp32)$")
@pytest.mark.parametrize("cell", [*(cell for cell in STAGES if cell != "0"), "1-cpu-fp32", "2-cpu-fp32"])
def test_gradients_of_a_step_that_overflowed_do_not_stay(ranks, cell):
    """Overflow in a step that reaches the branch; the next one does not reach it.

    With the optimizer offloaded and sums in fp32, DeepSpeed without hf_muon then skips all later steps.
    """
    if cell.endswith("fp32"):
        zero = {"stage": int(cell[0]), "zero": {**CPU, "reduce_scatter": False}, **FP32_SUMS}
        assert_as_in_one_process(ranks, ["always"], zero, dtype="bfloat16", overflow=1)
    else:
        assert_as_in_one_process(ranks, ["odd steps never"], CELLS[cell], dtype="bfloat16", overflow=2)


def dropped(rank, stage, zero=None):
    """Return weights after a run in which `zero_grad` drops a gradient of the branch, and after one without it."""
    weights = []
    for drops in (True, False):
        engine = start_engine(build(Branched), stage, zero)
        for step, reached in ((0, True), (1, True), (2, False)):
            if step != 1 or drops:
                engine.backward(loss_of(engine, step, reached=reached))
            if step == 1:
                engine.optimizer.zero_grad()
            else:
                engine.step()
        weights.append(weights_of(engine.module))
        engine.destroy()
    return weights


@pytest.mark.every_deepspeed
@pytest.mark.first_tier("^2$")
@pytest.mark.parametrize("cell", ["2", "2-cpu", "3", "3-cpu"])
def test_gradients_that_were_dropped_do_not_stay(ranks, cell):
    """Skip a batch as a loop that leaves out a non-finite loss: backward, zero_grad, and the next batch."""
    for one, other in ranks.run(dropped, **CELLS[cell]):
        assert_weights(one, other)


@pytest.mark.parametrize("kind", [Muon, type("MyMuon", (Muon,), {})])
def test_the_name_that_deepspeed_sees(kind):
    """Hide the class name everywhere, because a later DeepSpeed may look at it in more places; it is still a Muon."""
    optimizer = kind([torch.nn.Parameter(torch.ones(3, 4))])
    hide_name(optimizer)
    assert isinstance(optimizer, kind)
    assert "muon" not in type(optimizer).__name__.lower()
    hide_name(optimizer)
    assert "muon" not in type(copy.deepcopy(optimizer)).__name__.lower()
    if kind is Muon:
        assert type(pickle.loads(pickle.dumps(optimizer))) is OrthogonalizedMomentum


def reports(rank, **options):
    """Return this rank's reports of the first step, whose micro-batch does not reach the branch."""

    def viewed(model):
        optimizer = optimizer_of(model)
        group = optimizer.param_groups[0]
        group["views"] = ["rows 20+6" if name == "first.weight" else "" for name in group["param_names"]]
        return optimizer

    logger, lines = logging.getLogger("hf_muon"), []
    logger.setLevel(logging.INFO)
    keep = mock.patch.object(logger, "handle", lambda record: lines.append(record.getMessage()))
    with keep, mock.patch.dict("os.environ", HF_MUON_STEP_REPORT="1"):
        engine = start_engine(build(Branched), optimizer=viewed, **options)
        for step in (1, 2):
            engine.backward(loss_of(engine, step, reached=False))
            engine.step()
        engine.destroy()
    logger.setLevel(logging.WARNING)
    return [line for line in lines if line.startswith("the first step")]


@pytest.mark.first_tier("2-cpu|^3$")
@pytest.mark.parametrize("cell", ["1", "2", "2-cpu", "3", "3-cpu", "3-cpu-sub-groups"])
def test_the_report_has_an_entry_for_each_kind_of_both_halves(ranks, cell, golden):
    (report,), others = ranks.run(reports, **CELLS[cell])
    assert others == []  # rank 1
    golden("deepspeed/first-step", report)
