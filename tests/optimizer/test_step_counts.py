"""What a step counts, completes and logs: each step of a param group once, whoever has gradients in it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_muon import Muon, build_optimizer
from hf_muon.optimizer.partitioned import attach_partitions, expect_partitions
from hf_muon.storage.partitions import Partition
from tests.optimizer.cases import bits, equal

SHAPES = [(8, 6), (6, 8), (4,), (8, 6), (5, 7), (3,)]  # of two stages


def ones(shapes=SHAPES):
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def optimizer_over(params):
    groups = [
        {"params": [param for param in params if param.ndim == 2]},
        {"params": [param for param in params if param.ndim == 1], "use_muon": False},
    ]
    return Muon([group for group in groups if group["params"]], lr=0.05, momentum_warmup=4, max_batch_bytes=1)


def counts(optimizer):
    return [group["step"] for group in optimizer.param_groups]


def trained(cuts, dtype, steps=6):
    """Return the weights after steps of an optimizer for each part of the parameters, without gradients at times."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizers = [optimizer_over([params[i] for i in part]) for part in cuts]
    for step in range(steps):
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(dtype)
            without = (step in (1, 3) and i < 2) or (step == 2 and i >= 3) or step == 4 != i + 1
            param.grad = None if without else grad
        for optimizer in optimizers:
            optimizer.step()
    return bits(params), {count for optimizer in optimizers for count in counts(optimizer)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_of_a_pipeline_are_as_one_process(dtype):
    """In the second step the first stage has a gradient for a vector alone, in the third the second stage has none."""
    expected = trained([range(6)], dtype)
    for cuts in ([range(3), range(3, 6)], [[0, 1], [2], range(3, 6)]):
        assert equal(trained(cuts, dtype), expected)


class OutOfMemory(TorchDispatchMode):
    """Raises when something writes to a tensor."""

    def __init__(self, tensor):
        super().__init__()
        self.storage = tensor.untyped_storage()._cdata

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if torch.is_tensor(leaf)]
        if func._schema.is_mutable and any(tensor.untyped_storage()._cdata == self.storage for tensor in tensors):
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return func(*args, **(kwargs or {}))


def test_a_step_that_fails_and_is_taken_again_counts_once():
    params = ones()
    optimizer = optimizer_over(params)
    optimizer.step()
    for failing in (params[2], params[0]):  # in the step of AdamW's group; then in that of Muon's, which comes first
        with pytest.raises(torch.OutOfMemoryError), OutOfMemory(failing):
            optimizer.step()
        assert counts(optimizer) == [2, 1]


def test_a_step_without_gradients_before_the_first_one_makes_nothing_and_does_not_count():
    params = ones()
    optimizer = optimizer_over(params)
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.state
    params[2].grad = torch.ones(4)
    optimizer.step()
    assert counts(optimizer) == [1, 1]
    assert {*optimizer.state} == {*params}
    # AdamW counts for each parameter.
    assert [float(optimizer.state[params[i]]["step"]) for i in (2, 5)] == [1, 0]


# --- the protocol with a framework that replaces parameters with flat partitions, without a framework


def partition(**facts):
    return Partition(group=None, rank=0, slices=[], device=torch.device("cpu"), **facts)


def test_partitions_that_are_attached_complete_steps_and_groups():
    """Until then steps create state only; afterwards a step ends with the last of the partitions."""
    matrix, vector = ones([(4, 4), (4,)])
    optimizer = Muon([{"params": [matrix], "views": ["rows 2+2"]}, {"params": [vector], "use_muon": False}])
    flats = ones([(4,)] * 3)
    expect_partitions(optimizer, "Framework")
    assert optimizer.partitioned.views[matrix].text == "rows 2+2"
    matrix.grad, vector.grad = None, torch.zeros(4)
    optimizer.step()
    assert set(optimizer.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}
    assert counts(optimizer) == [0, 0]
    attach_partitions(optimizer, None)
    optimizer.step()
    assert counts(optimizer) == [1, 1]
    own = optimizer.partitioned
    assert own.count([{"params": flats[:1]}])  # nothing is attached
    assert own.completes_group({"params": flats[:1]})
    own.clear_stale_gradients([{"params": flats}])
    stale = {"last": False, "without_gradient": lambda: [slice(1, 3)]}
    attach_partitions(optimizer, {flats[0]: partition(**stale), flats[1]: partition(), flats[2]: partition()})
    own = optimizer.partitioned

    def complete(*positions):
        return [own.count([{"params": [flats[k]]}]) for k in positions]

    assert complete(0, 1, 2, 0, 1, 2) == [False, False, True] * 2
    assert complete(0, 1) == [False, False]
    assert [own.begins_step([{"params": [flat]}]) for flat in flats] == [True, True, False]
    assert complete(0, 1, 2) == [False, False, True]  # the first two were refused on the way
    assert own.count([{"params": flats}])
    parts = flats[:1], flats[1:2], flats[:2], []
    assert [own.completes_group({"params": part}) for part in parts] == [False, True, False, False]
    own.clear_stale_gradients([{"params": flats}])
    assert [flat.grad.tolist() for flat in flats] == [[1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]


# --- the report of the first step; `tests/e2e/test_llamafactory_v1.py` reads it under DDP and FSDP2


@pytest.fixture
def optimizer():
    """Return an optimizer over layers that share an entry, a fused matrix, a head in bf16, and one without gradient."""
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(12))})
    model["up"] = nn.Linear(5, 5)
    model["attention"] = nn.MultiheadAttention(4, 2, bias=False)
    model["lm_head"] = nn.Linear(5, 7).bfloat16()
    optimizer = build_optimizer(model, ns_steps=4, ns_dtype="fp32")
    for name, param in model.named_parameters():
        if name != "up.weight":
            param.grad = torch.ones_like(param)
    return optimizer


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"HF_MUON_STEP_REPORT": "yes"}, 1),
        ({"LLAMAFACTORY_MUON_DIAG": "1"}, 1),
        ({"HF_MUON_STEP_REPORT": "1", "RANK": "1"}, 0),
        *(({"HF_MUON_STEP_REPORT": value}, 0) for value in ("", "0", "false")),
        ({}, 0),
    ],
)
def test_one_report_with_one_entry_for_each_kind(variables, count, optimizer, caplog, monkeypatch, golden, capsys):
    """Also of a step that is refused, but not of one that only creates state."""
    for name in ("HF_MUON_STEP_REPORT", "LLAMAFACTORY_MUON_DIAG", "RANK"):
        monkeypatch.setenv(name, variables[name]) if name in variables else monkeypatch.delenv(name, raising=False)

    def reports():
        return [text for text in caplog.messages if text.startswith("the first step of Muon")]

    making_state, refused = copy.deepcopy(optimizer), copy.deepcopy(optimizer)
    for each, lr, value in ((making_state, 0.0, 0.0), (refused, 0.1, float("nan"))):
        for group in each.param_groups:
            group["lr"] = lr
            for param in group["params"]:
                param.grad = torch.full_like(param, value)
    making_state.step()
    assert reports() == []
    with pytest.raises(RuntimeError, match="gradient-not-finite"):
        refused.step()
    assert len(reports()) == count
    caplog.clear()
    for _ in range(3):
        optimizer.step()
    assert len(reports()) == count
    for report in reports():
        golden("optimizer/first_step_report", report)
    assert capsys.readouterr().out == ""


# --- a step in which no parameter has a gradient trains nothing; the optimizer warns once, with the likely cause

WARNING = "[no-gradients]"


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("late", [False, True])
def test_built_before_fully_shard(late, caplog):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = net()
        if not late:
            fully_shard(model)
        optimizer = build_optimizer(model)
        if late:
            fully_shard(model)
        train(model, optimizer)
    finally:
        dist.destroy_process_group()
    assert caplog.text.count(WARNING) == ("fully_shard" in caplog.text) == late


def test_built_before_to_empty(caplog):
    with torch.device("meta"):
        model = net()
    optimizer = build_optimizer(model)
    train(model.to_empty(device="cpu"), optimizer)
    assert caplog.text.count(WARNING) == ("meta device" in caplog.text) == 1


def test_it_warns_after_a_resume_too_but_not_of_gradients_of_some(caplog):
    """Warn although the loaded state counts steps: another optimizer took them."""
    model, frozen = net(), net()
    optimizer, other, of_frozen = map(build_optimizer, (model, model, frozen))
    get_optimizer_state_dict(model, optimizer)  # takes a step to make state
    assert optimizer.state
    model[0](torch.randn(2, 6)).sum().backward()
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    assert WARNING not in caplog.text
    model.zero_grad()
    other.step()
    assert caplog.text.count(WARNING) == 1
    frozen.requires_grad_(False)
    of_frozen.step()
    assert "none of them requires a gradient" in caplog.text
