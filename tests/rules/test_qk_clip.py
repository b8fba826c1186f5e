"""`qk_clip` on models of transformers: what is measured, which rows are rescaled, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from hf_muon import MuonOfGroups, build_optimizer
from hf_muon.integrations.transformers import attention
from hf_muon.rules.heads import Heads
from hf_muon.rules.qk_clip import rescaling
from tests.rules.attention_models import MODELS, backward, enlarge, make, tokens

CLIPPED = [name for name in MODELS if name != "qwen3"]
THRESHOLD = 100.0


def measured(optimizer):
    """Return what is measured of each layer since the last step."""
    return [logits.clone() for logits in (r._largest for r in optimizer.head_rules._known.source._recorders)]


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
    summary = optimizer.metrics.pop_summary()
    assert summary["muon/max_logit"] == pytest.approx(max(largest), rel=1e-5)
    line = json.loads(file.read_text().splitlines()[1])
    assert list(line["max_logit"].values()) == pytest.approx(largest, rel=1e-5)
    assert line["clipped_heads"] == summary["muon/clipped_heads"] == 0


def test_a_key_is_rescaled_as_far_as_all_of_its_heads_are():
    heads, options = Heads(queries=4, keys=2), {"qk_clip": 100.0}
    factors = rescaling(torch.tensor([400.0, 50.0, 400.0, 1600.0]), heads, options)
    assert factors["key"].tolist() == [1.0, 0.5]
    assert factors["query"].tolist() == [0.25, 1.0, 0.5, 0.125]
    factors = rescaling(torch.tensor([400.0, -torch.inf]), Heads(2, 2), options)
    assert factors["key"].tolist() == factors["query"].tolist() == [0.5, 1.0]


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
    assert plain.optimizer.head_rules._known.source.pop() == [None, None]


def test_without_stored_logits_the_metric_is_not_above_the_true_maximum_and_equal_for_short_sequences():
    eager, hidden = make("llama"), make("llama", "sdpa")
    optimizers = [build_optimizer(model, qk_clip="inf") for model in (eager, hidden)]
    for length in (attention.MOST_QUERIES, 3 * attention.MOST_QUERIES):
        ids = tokens(5, batch=2, length=length)
        for model in (eager, hidden):
            model(input_ids=ids, labels=ids).loss.backward()
        true, estimate = ([layer.clone() for layer in o.head_rules._known.source.pop()] for o in optimizers)
        for a, b in zip(true, estimate, strict=True):
            if length == attention.MOST_QUERIES:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=0)
            assert (b <= a * (1 + 1e-5)).all()
            assert (b >= 0.5 * a).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_are_rescaled_in_fp32_and_other_rows_keep_their_bits(dtype):
    model = make("llama").to(dtype)
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
            expected[8:16] = (expected[8:16].float() * gamma).to(dtype)
        assert torch.equal(param, expected), name


def test_a_resumed_run_takes_the_same_steps(tmp_path):
    def run(first, last, load=None, save=None):
        model = make("deepseek")
        enlarge(model, "deepseek", 0, 1, 1e3)
        optimizer = build_optimizer(model, lr=1e-2, qk_clip=0.5)
        if load:
            model.load_state_dict(load["model"])
            optimizer.load_state_dict(load["optimizer"])
        for step in range(first, last):
            optimizer.zero_grad()
            model(input_ids=tokens(step), labels=tokens(step)).loss.backward()
            optimizer.step()
        if save:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, save)
        return weights_of(model)

    straight = run(0, 4)
    run(0, 2, save=tmp_path / "half.pt")
    resumed = run(2, 4, load=torch.load(tmp_path / "half.pt", weights_only=True))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_off_hooks_nothing():
    before = dict(attention._recorders)
    model = make("llama")
    optimizer = build_optimizer(model)
    assert dict(attention._recorders) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    backward(model, tokens(1))
    assert optimizer.head_rules._known is None
    optimizer.step()
    assert optimizer.head_rules._logits is None


def test_groups_find_the_model_that_holds_them_and_models_that_normalize_are_measured():
    model = make("llama")
    optimizer = MuonOfGroups(model.named_parameters(), qk_clip=100)
    backward(model, tokens(1))
    assert len(measured(optimizer)) == 2
    build_optimizer(make("qwen3"), qk_clip="inf")
