"""The plan of a run compared with a measured step, on the ranks of each layout; tests/deepspeed has those of ZeRO."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_muon import MuonConfig, route_parameters
from hf_muon.cli.model_source import known_configs, model_from
from hf_muon.plan import facts_of, numbers_of
from hf_muon.storage.tensors import local_of
from tests.equality import runs
from tests.equality.cells import Cell
from tests.equality.checks import everywhere
from tests.equality.counted import Counted
from tests.equality.models import Routed
from tests.support.accelerated import uncomputed
from tests.support.live_bytes import LiveBytes


def measured(rank, cell, folder):
    """Return what is stored on this rank, and what a step of an accelerator sends, multiplies and allocates.

    Elementwise functions have no temporary tensors there.
    """
    with runs.numbers_of(cell), uncomputed(), runs.started(cell, rank, folder) as layout:
        runs.prepare(layout, 0)
        layout.optimizer.step()  # in which ranks connect
        runs.prepare(layout, 1)
        with Counted() as counted:
            layout.optimizer.step()
        runs.prepare(layout, 2)
        with LiveBytes() as memory:
            layout.optimizer.step()
        params = list(layout.module.parameters())
        tensors = {"weights": params, "gradients": [param.grad for param in params]}
        tensors["state"] = [value for own in layout.optimizer.state.values() for value in own.values()]
        nbytes = {name: sum(math.prod(local_of(t).shape) * t.itemsize for t in own) for name, own in tensors.items()}
        return {**nbytes, "sent": counted.bytes, "flops": counted.flops}, memory.peak


CELLS = [
    Cell("fsdp-2", "routed", numbers="gpu", rule="normuon", momentum="bf16", adamw="int8", batch=1125),
    Cell("ddp-2", "routed", numbers="gpu", rule="cautious", momentum="int8"),
    Cell("hsdp-4", "routed", numbers="gpu", rule="normuon", dtype="bfloat16"),
    Cell("single-1", "routed", numbers="gpu", rule="plain", momentum="int8", adamw="bf16"),
]


@pytest.mark.promise("plan")
@pytest.mark.first_tier("fsdp|ddp")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_plan_is_what_is_measured(pools, cell, tmp_path):
    """Expect the bytes and FLOPs of each rank; the bytes of temporary tensors are a bound."""
    results = everywhere(measured, cell, pools, str(tmp_path))
    config = MuonConfig.from_mapping({key: value for key, value in cell.options.items() if key != "lr"})
    with torch.device("meta"):
        model = Routed()
    run = {"layout": cell.layout, "ranks": cell.ranks, "dtype": getattr(torch, cell.dtype)}
    numbers = numbers_of(facts_of(model, route_parameters(model, config), config, **run))
    for name in ("weights", "gradients", "state", "sent", "flops"):
        assert getattr(numbers, name) == [rank[name] for rank, _ in results], name
    assert max(peak for _, peak in results) <= numbers.temporary


@pytest.mark.extended
@pytest.mark.promise("plan")
def test_activations_of_a_decoder_with_checkpointed_layers():
    """Compare the peak of a backward pass of 2,048 tokens on fake tensors. Other models have no estimate."""
    tokens, of_model = 2048, {}
    with FakeTensorMode():
        config = transformers.AutoConfig.for_model(**known_configs()["qwen3-0.6b"])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        model.gradient_checkpointing_enable()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        ids = torch.zeros((1, tokens), dtype=torch.long)
        # No mask: transformers makes none on real tensors, but under tracing.
        inputs = {"input_ids": ids, "labels": ids, "attention_mask": {"full_attention": None}, "use_cache": False}
        with LiveBytes() as memory:
            model(**inputs).loss.backward()
    with torch.device("meta"):
        of_model["gpt2"] = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(n_layer=2))
    of_model["qwen3"] = model_from("qwen3-0.6b")
    run = {"tokens": tokens, "dtype": torch.bfloat16}
    estimates = {
        name: numbers_of(facts_of(own, route_parameters(own), MuonConfig(), **run)).activations
        for name, own in of_model.items()
    }
    assert estimates == {"qwen3": pytest.approx(memory.peak, rel=0.05), "gpt2": None}


def test_a_small_part_of_the_experts_computes_for_a_token():
    mixture = model_from("qwen3-30b-a3b")
    facts = facts_of(mixture, [], MuonConfig())
    assert facts.flops_per_token == pytest.approx(6 * 3.0e9, rel=0.05)  # 3.3e9 active, .3e9 of them embeddings
    assert facts.decoder == (48, 2048, 8 * 768, 151936)


@pytest.mark.extended
def test_a_trillion_weights_on_a_thousand_ranks():
    model = model_from("kimi-k2")
    routes = route_parameters(model)
    alone, shared = (
        numbers_of(facts_of(model, routes, MuonConfig(), layout=layout, ranks=ranks))
        for layout, ranks in (("single", 1), ("fsdp", 1024))
    )
    assert sum(shared.flops) == alone.flops[0]
    assert max(shared.flops) * 1024 < 1.05 * sum(shared.flops)
    assert sum(shared.state) == pytest.approx(alone.state[0], rel=1e-3)
