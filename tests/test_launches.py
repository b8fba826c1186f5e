"""What a step asks of an accelerator, counted on the meta device, is what the committed table says."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from benchmarks import launches, launches_of_ranks
from benchmarks.count import counting
from hf_muon import build_optimizer
from tests.accelerated import accelerated

COUNTED = json.loads(launches.TABLE.read_text())
# The others take as long, and would show nothing else.
ASSERTED = [
    ("Qwen3-0.6B", "bf16", "fp32"),
    ("Qwen3-0.6B", "bf16", "int8"),
    ("Qwen3-0.6B", "fp32", "fp32"),
    ("Qwen3-30B-A3B, 2 layers", "bf16", "fp32"),
    ("Llama-3.1-8B, 4 layers", "bf16", "bf16"),
]


@pytest.mark.parametrize(("model", "weights", "momentum"), ASSERTED)
def test_the_table_is_what_a_step_takes(model, weights, momentum):
    """After a change that should change them, write the table: ``python -m benchmarks.launches --write``."""
    counts = launches.count_step(launches.MODELS[model](), weights, momentum)
    assert counts == COUNTED[f"{model}, {weights} weights, {momentum} momentum"]


def test_the_table_has_every_model_and_dtype():
    names = {
        f"{m}, {w} weights, {k} momentum" for m in launches.MODELS for w in launches.WEIGHTS for k in launches.MOMENTA
    }
    assert names | {f"{m}{launches.GRAM}" for m in launches.MODELS} == COUNTED.keys()


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("fsdp", 8)])
def test_the_table_is_what_ranks_take(layout, ranks):
    """After a change that should change them, write the table: ``python -m benchmarks.launches_of_ranks --write``."""
    counts, _ = launches_of_ranks.count_case(layout, ranks)
    assert counts == json.loads(launches_of_ranks.TABLE.read_text())[f"{launches_of_ranks.MODEL}, {layout} on {ranks}"]


def test_the_gram_form_of_fp16():
    name = next(iter(launches.MODELS))
    counts = launches.count_step(launches.MODELS[name](), "bf16", "fp32", "fp16")
    assert counts == COUNTED[f"{name}{launches.GRAM}"]


def test_launches_and_traffic_are_within_their_aims():
    dense, experts = (COUNTED[f"{name}, bf16 weights, fp32 momentum"] for name in list(launches.MODELS)[:2])
    assert dense["launches"] <= 300
    assert experts["launches"] <= 600
    assert dense["traffic"] <= 45
    assert all(counts["reads"] == 1 for counts in COUNTED.values())


def test_a_step_with_values_reads_the_device_once(monkeypatch):
    """Take a step by the paths of accelerators on a CPU, where reads that are no operators are seen, too."""
    params = [nn.Parameter(torch.randn(shape)) for shape in [(20, 30), (30, 20), (40,)]]
    optimizer = build_optimizer(nn.ParameterList(params), {"muon_patterns": ".", "adamw_patterns": "2"})
    reads = []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__"):
        own = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, own=own, name=name: reads.append((name, self.ndim)) or own(self))
    with accelerated():
        for _ in range(2):
            for param in params:
                param.grad = torch.randn_like(param)
            reads.clear()
            optimizer.step()
    # AdamW's step counter is on the host.
    assert [name for name, _ in reads if name != "__float__"] == ["tolist"]


class TestCount:
    def test_views_and_allocations_are_free(self):
        with counting() as count:
            torch.empty(4, 6, device="meta").view(24)[3:].t().unsqueeze(0)
        assert not count.launches

    def test_in_place_reads_and_writes(self):
        a, b = torch.empty(10, device="meta"), torch.empty(10, device="meta", dtype=torch.bfloat16)
        with counting() as count:
            a.add_(b)
            a.copy_(b)
        assert dict(count.launches) == {"add": 1, "copy": 1}
        assert dict(count.traffic) == {"add": 40 + 20 + 40, "copy": 20 + 40}

    def test_a_multi_tensor_call_is_one_launch_if_torch_has_a_kernel_for_it(self):
        a, b = ([torch.empty(4, 6, device="meta") for _ in range(3)] for _ in range(2))
        with counting() as count:
            torch._foreach_copy_(a, b)
        assert count.launches["_foreach_copy"] == 1
        assert count.traffic["_foreach_copy"] == 3 * 2 * 24 * 4
        with counting() as count:
            torch._foreach_copy_(a, [tensor.view(6, 4).mT for tensor in b])
        assert count.launches["_foreach_copy"] == 3

    def test_products_are_no_elementwise_traffic(self):
        with counting() as count:
            torch.empty(2, 4, 6, device="meta") @ torch.empty(2, 6, 4, device="meta")
        assert count.launches["bmm"] == 1
        assert not count.traffic
