"""`qk_clip` on models of transformers: what is measured, and which rows are rescaled, in one process and on ranks."""

from __future__ import annotations

import copy
import gc
import json
import math
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from hf_muon import MuonOfGroups, build_optimizer
from hf_muon.optimizer import head_rules
from hf_muon.optimizer.head_rules import HeadRules
from hf_muon.optimizer.step import MuonStep
from hf_muon.routing import attention_logits
from hf_muon.storage import dtensor
from tests.distributed.training import wrap
from tests.equality.placed import whole
from tests.rules.attention_models import MODELS, backward, enlarge, make, tokens
from tests.rules.settings import TOGETHER

CLIPPED = [name for name in MODELS if name != "qwen3"]
THRESHOLD = 100.0


def measured(optimizer):
    """Return what is measured of each layer since the last step."""
    return [attention_logits._recorders[each.module]._largest.clone() for each in optimizer.head_rules._attentions]


def weights_of(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.promise("qk-clip")
@pytest.mark.parametrize("name", CLIPPED)
def test_a_planted_head_comes_below_the_threshold_and_all_others_keep_their_bits(name):
    layer, head, ids = 1, 2, tokens(1)
    model = make(name)
    start = float(backward(model, ids)[layer][head])
    enlarge(model, name, layer, head, 500 / start)
    model.zero_grad()
    optimizer = build_optimizer(model, lr=0.0, qk_clip=THRESHOLD)
    before, weights = backward(model, ids), weights_of(model)
    assert float(before[layer][head]) == pytest.approx(500, rel=1e-3)
    optimizer.step()
    after = backward(model, ids)
    assert float(after[layer][head]) == pytest.approx(THRESHOLD, rel=1e-5)
    for k, (old, new) in enumerate(zip(before, after, strict=True)):
        others = [h for h in range(4) if (k, h) != (layer, head)]
        assert torch.equal(old[others], new[others])
    expected = {n: w.clone() for n, w in weights.items()}
    restored = copy.deepcopy(model)
    restored.load_state_dict(expected, strict=False)
    gamma = float(torch.tensor(THRESHOLD) / before[layer][head])
    enlarge(restored, name, layer, head, gamma)
    changed = 0
    for (n, mine), other in zip(model.named_parameters(), restored.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)
        changed += not torch.equal(mine, weights[n])
        assert torch.equal(mine == weights[n], other == weights[n]), "other rows than those of the head have changed"
    assert changed


def test_logits_of_a_step_that_failed_are_forgotten(monkeypatch):
    model = make("llama")
    optimizer = build_optimizer(model, lr=0.0, qk_clip=THRESHOLD)
    weights = weights_of(model)
    enlarge(model, "llama", 1, 2, 1e5)
    assert max(map(torch.max, backward(model, tokens(1)))) > THRESHOLD
    monkeypatch.setattr(MuonStep, "run", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    monkeypatch.undo()
    model.load_state_dict(weights, strict=False)
    backward(model, tokens(1))
    optimizer.step()
    assert all(torch.equal(param, weights[name]) for name, param in model.named_parameters())


def test_parameters_that_a_framework_replaces_are_not_kept():
    """As `fully_shard` replaces them by shards, after the optimizer was built."""
    model = make("llama")
    optimizer = build_optimizer(model, qk_clip=THRESHOLD)
    projection = model.model.layers[0].self_attn.q_proj
    before, after = weakref.ref(projection.weight), torch.nn.Parameter(projection.weight.detach().clone())
    for group in optimizer.param_groups:
        group["params"] = [after if param is projection.weight else param for param in group["params"]]
    projection.weight = after
    gc.collect()
    assert before() is None


@pytest.mark.parametrize("name", MODELS)
def test_on_eager_attention_the_metric_is_the_true_maximum(name, tmp_path):
    model = make(name)
    file = tmp_path / "metrics.jsonl"
    optimizer = build_optimizer(model, lr=1e-3, qk_clip="inf", diagnostics_every=1, diagnostics_file=str(file))
    first, second = backward(model, tokens(1)), backward(model, tokens(2, length=20))
    for mine, a, b in zip(measured(optimizer), first, second, strict=True):
        torch.testing.assert_close(mine, torch.maximum(a, b), rtol=1e-6, atol=1e-8)
    optimizer.step()
    largest = [float(torch.maximum(a, b).max()) for a, b in zip(first, second, strict=True)]
    summary = optimizer.diagnostics.pop_summary()
    assert summary["muon/max_logit"] == pytest.approx(max(largest), rel=1e-5)
    line = json.loads(file.read_text().splitlines()[1])
    assert list(line["max_logit"].values()) == pytest.approx(largest, rel=1e-5)
    assert line["clipped_heads"] == summary["muon/clipped_heads"] == 0


def test_heads_that_share_a_key_all_come_down():
    model, ids = make("llama"), tokens(1)
    start = backward(model, ids)[0]
    for head in (2, 3):
        enlarge(model, "llama", 0, head, 100 * (head + 1) / float(start[head]))
    optimizer = build_optimizer(model, lr=0.0, qk_clip=THRESHOLD)
    key = model.model.layers[0].self_attn.k_proj.weight
    before = key.detach().clone()
    backward(model, ids)
    optimizer.step()
    torch.testing.assert_close(backward(model, ids)[0][2:], torch.tensor([THRESHOLD] * 2), rtol=1e-5, atol=0)
    assert torch.equal(key[:8], before[:8])
    torch.testing.assert_close(key[8:], before[8:] * 3**-0.5, rtol=1e-3, atol=0)


@pytest.mark.parametrize("logit", [math.inf, math.nan, -math.inf])
def test_a_head_whose_largest_logit_is_not_finite_keeps_its_rows(logit, monkeypatch):
    """How far it is above the threshold is unknown; the last one has seen no key."""
    model = make("llama")
    optimizer = build_optimizer(model, lr=0.0, qk_clip=THRESHOLD)
    weights = weights_of(model)
    backward(model, tokens(1))
    logits = measured(optimizer)
    logits[0][1], logits[0][2] = logit, 2 * THRESHOLD
    monkeypatch.setattr(optimizer.head_rules, "_logits_of", lambda: logits)
    optimizer.step()
    name = "model.layers.0.self_attn.q_proj.weight"
    rows = dict(model.named_parameters())[name].view(4, 8, -1)
    assert torch.equal(rows[1], weights[name].view(4, 8, -1)[1])
    assert not torch.equal(rows[2], weights[name].view(4, 8, -1)[2])


@pytest.mark.parametrize("attention_kind", ["sdpa", "eager"])
def test_evaluation_does_not_count_and_checkpointed_activations_count_once(attention_kind):
    plain, other = make("llama", attention_kind), make("llama", attention_kind)
    for model in (plain, other):
        model.optimizer = build_optimizer(model, qk_clip=1.0)
    other.gradient_checkpointing_enable()
    for model in (plain, other):
        model(input_ids=tokens(1), labels=tokens(1)).loss.backward()
    expected = measured(plain.optimizer)
    other.eval()(input_ids=tokens(2))
    other.train()
    with torch.no_grad():
        other(input_ids=tokens(3))
    for a, b in zip(expected, measured(other.optimizer), strict=True):
        assert torch.equal(a, b)
    plain.optimizer.step()
    assert plain.optimizer.head_rules._logits_of() == [None, None]


def test_without_stored_logits_the_metric_is_not_above_the_true_maximum_and_equal_for_short_sequences():
    eager, hidden = make("llama"), make("llama", "sdpa")
    optimizers = [build_optimizer(model, qk_clip="inf") for model in (eager, hidden)]
    for length in (attention_logits.MOST_QUERIES, 3 * attention_logits.MOST_QUERIES):
        ids = tokens(5, batch=2, length=length)
        for model in (eager, hidden):
            model(input_ids=ids, labels=ids).loss.backward()
        true, estimate = ([layer.clone() for layer in o.head_rules._logits_of()] for o in optimizers)
        for a, b in zip(true, estimate, strict=True):
            if length == attention_logits.MOST_QUERIES:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=0)
            assert (b <= a * (1 + 1e-5)).all()
            assert (b >= 0.5 * a).all()


def test_bf16_weights_are_rescaled_in_fp32_and_other_rows_keep_their_bits():
    model = make("llama").to(torch.bfloat16)
    enlarge(model, "llama", 0, 1, 1e4)
    optimizer = build_optimizer(model, lr=0.0, qk_clip=THRESHOLD, ns_dtype="fp32")
    weights = weights_of(model)
    backward(model, tokens(1))
    gamma = THRESHOLD / float(measured(optimizer)[0][1])
    assert gamma < 1
    optimizer.step()
    for name, param in model.named_parameters():
        expected = weights[name].clone()
        if name == "model.layers.0.self_attn.q_proj.weight":
            expected[8:16] = (expected[8:16].float() * gamma).bfloat16()
        assert torch.equal(param, expected), name


def test_a_resumed_run_takes_the_same_steps():
    def run(first, last, saved=None):
        model = make("deepseek")
        enlarge(model, "deepseek", 0, 1, 1e3)
        optimizer = build_optimizer(model, lr=1e-2, qk_clip=0.5)
        for loads, state in zip((model, optimizer), saved or (), strict=False):
            loads.load_state_dict(state)
        for step in range(first, last):
            optimizer.zero_grad()
            backward(model, tokens(step))
            optimizer.step()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    straight, resumed = run(0, 4)[0], run(2, 4, run(0, 2))[0]
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_off_hooks_nothing():
    before, model = dict(attention_logits._recorders), make("llama")
    build_optimizer(model)
    assert dict(attention_logits._recorders) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_groups_find_the_model_that_holds_them_and_models_that_normalize_are_measured():
    model = make("llama")
    optimizer = MuonOfGroups(model.named_parameters(), qk_clip=100)
    backward(model, tokens(1))
    assert len(measured(optimizer)) == 2
    build_optimizer(make("qwen3"), qk_clip="inf")


# --- on ranks: the largest logits of all of them, and the rows of one process


TP_PLAN = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}


def clipped(rank, layout, name="llama", steps=3, lr=0.0, accumulate=1, evaluating=(), **options):
    """Train, and return the whole weights and the logits of each step; one head begins far beyond the threshold.

    Args:
        rank: of this process.
        layout: as of `wrap`; with `fsdp-swapped` the optimizer is built before the model is sharded.
        name: of the model.
        steps: number of steps.
        lr: learning rate.
        accumulate: batches of a step and rank.
        evaluating: ranks whose model is in evaluation mode, so that they measure nothing.
        **options: of the optimizer.
    """
    model = make(name)
    enlarge(model, name, 1, 2, 1e5)
    options = {"lr": lr, "ns_dtype": "fp32", "qk_clip": 2.0, **options}
    optimizer = build_optimizer(model, **options) if layout == "fsdp-swapped" else None
    layers = model.transformer.h if name == "gpt2" else model.model.layers
    model, shards, place = wrap(model, layout.removesuffix("-swapped"), layers, TP_PLAN)
    model.train(rank not in evaluating)
    optimizer = optimizer or build_optimizer(model, **options)
    params = dict(model.named_parameters())
    for group in optimizer.param_groups if layout == "fsdp-swapped" else ():  # as accelerate does
        group["params"] = [params[n] for n in group["param_names"]]
    logits, finish = [], optimizer.head_rules.finish

    def keep(*args, **kwargs):
        logits.append(finish(*args, **kwargs))
        return logits[-1]

    optimizer.head_rules.finish = keep
    for step in range(steps):
        optimizer.zero_grad()
        ids = tokens(step, batch=12)
        for part in ids.view(shards, accumulate, -1, ids.shape[-1])[place]:
            (model(input_ids=part, labels=part).loss / accumulate).backward()
        optimizer.step()
    return {n.removeprefix("module."): whole(p) for n, p in params.items()}, logits


def assert_like_one_process(results, expected, rtol=1e-5):
    weights, logits = expected
    for rank_weights, rank_logits in results:
        for (largest, count), (own, own_count) in zip(logits, rank_logits, strict=True):
            assert own == pytest.approx(largest, rel=rtol)
            assert own_count == count
        for name, weight in weights.items():
            bound = rtol * float(weight.abs().max()) + 1e-9
            assert float((rank_weights[name] - weight).abs().max()) <= bound, name
            assert torch.equal(rank_weights[name], results[0][0][name]), f"ranks differ in {name}"


# Three ranks cut heads.
LAYOUTS = [("ddp", 2, "llama"), ("ddp", 2, "gpt2"), ("fsdp", 2, "llama"), ("fsdp", 3, "gpt2"), ("fsdp", 3, "deepseek")]
SWAPPED = [("fsdp-swapped", 2, "llama")]
MODEL_PARALLEL = [("tp", 2, "llama"), ("fsdp-tp", 4, "llama")]


@pytest.mark.promise("qk-clip")
@pytest.mark.first_tier("ddp-2|fsdp-3-deep|^tp")
@pytest.mark.parametrize(("layout", "ranks", "name"), LAYOUTS + SWAPPED + MODEL_PARALLEL)
def test_every_layout_rescales_as_one_process_does(pools, layout, ranks, name):
    expected = clipped(0, "single", name)
    first = expected[1][0]
    assert first[1] >= 1
    assert max(first[0].values()) > 100
    results = pools[ranks].run(clipped, layout=layout, name=name)
    assert_like_one_process(results, expected)
    unchanged = clipped(0, "single", name, qk_clip=math.inf)[0]
    for key, weight in expected[0].items():
        same = weight == unchanged[key]
        assert torch.equal(results[0][0][key] == unchanged[key], same), "other rows than those of one process changed"


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize(("options", "accumulate"), [({}, 2), (TOGETHER, 1)], ids=["accumulated", "together"])
def test_training_goes_on_alike(pools, layout, options, accumulate):
    training = {"lr": 1e-3, "steps": 4, **options}
    expected = clipped(0, "single", **training)
    assert sum(count for _, count in expected[1]) > 1
    results = pools[2].run(clipped, layout=layout, accumulate=accumulate, **training)
    assert_like_one_process(results, expected, rtol=1e-3)


def test_a_rank_that_measures_nothing_follows_the_others(pools):
    results = pools[2].run(clipped, layout="fsdp", evaluating=(1,))
    assert results[0][1] == results[1][1]
    assert results[0][1][0][1] >= 1
    assert all(torch.equal(weight, results[1][0][name]) for name, weight in results[0][0].items())


def test_a_rank_that_stores_no_row_rescales_none(monkeypatch):
    """As where two rows are sharded over four ranks: after other ranks have moved, it must not fail."""
    rules, weight = HeadRules(), nn.Parameter(torch.ones(0, 8))
    rules._places = {"q_proj.weight": (0, 0)}
    monkeypatch.setattr(head_rules, "is_dtensor", lambda _: True)
    monkeypatch.setattr(dtensor, "own_region", lambda *_: SimpleNamespace(dims=[(), ((0, 8),)]))
    ((stored, outputs),) = rules._stored([{"params": [weight]}], None, "q_proj.weight", 0)
    assert (stored.shape, outputs.shape) == ((0, 8), (0, 1))
