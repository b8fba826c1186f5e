"""Planned memory compared with what autograd saves, and with the tensors that are alive in a step."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from allpairspy import AllPairs
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_muon import MuonConfig, build_optimizer, route_parameters
from hf_muon.cli.model_source import known_configs
from hf_muon.math import cost
from hf_muon.plan.activations import Activations, estimate_activations
from hf_muon.plan.step_plan import plan_step
from tests.equality.models import Routed
from tests.support.accelerated import accelerated, uncomputed
from tests.support.live_bytes import LiveBytes

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40, "tie_word_embeddings": False}
MODES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "autocast": (torch.float32, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
}
BATCH, LENGTH = 2, 128


def decoder(kind, vocabulary, dtype):
    experts = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2} if kind == "qwen3_moe" else {}
    config = transformers.AutoConfig.for_model(kind, **SIZES, **experts, vocab_size=vocabulary)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def loss_of(model, autocast):
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def saved_bytes(model, autocast):
    """Return the bytes that autograd saves, by storage, without parameters and tensors as wide as the vocabulary."""
    own = {param.untyped_storage()._cdata for param in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own and tensor.shape[-1:] != (model.config.vocab_size,):
            storages[storage._cdata] = tensor, storage.nbytes()  # alive, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, autocast)
    return sum(nbytes for _, nbytes in storages.values())


def estimate(model, mode, checkpointing=False):
    stored, computed = MODES[mode]
    return estimate_activations(
        model, BATCH * LENGTH, computed, autocast=stored != computed, checkpointing=checkpointing
    )


@pytest.mark.promise("plan")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [*itertools.product(["qwen3", "qwen3_moe"], MODES), ("llama", "bf16"), ("qwen2", "autocast"), ("mistral", "bf16")],
)
def test_activations_are_what_autograd_saves(kind, mode):
    """Compare with the bytes that autograd holds at the end of the forward pass: within 1 %."""
    model = decoder(kind, 512, MODES[mode][0])
    planned = estimate(model, mode)
    assert isinstance(planned, Activations)
    # The head's copy is left out with the logits: the vocabulary is its last dim.
    copies = planned.saved_copies - 2 * model.lm_head.weight.numel() * (mode == "autocast")
    assert planned.saved + copies == pytest.approx(saved_bytes(model, mode == "autocast"), rel=0.01)


@pytest.mark.parametrize(
    ("kind", "mode", "checkpointing", "vocabulary"),
    list(AllPairs([["qwen3", "llama", "qwen3_moe"], list(MODES), [False, True], [64, 8192]])),
)
def test_the_peak_of_a_backward_pass(kind, mode, checkpointing, vocabulary):
    """Compare the peak: at the loss for a large vocabulary, else in a layer. Gradients are there before."""
    model = decoder(kind, vocabulary, MODES[mode][0])
    if checkpointing:
        model.gradient_checkpointing_enable()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with LiveBytes() as memory:
        loss_of(model, mode == "autocast").backward()
    planned = estimate(model, mode, checkpointing).peak
    assert planned == pytest.approx(memory.peak, rel=0.005 if vocabulary > 1000 else 0.15)


@pytest.mark.first_tier("qwen3-0.6b-True-bf16|qwen3-0.6b-False-bf16")
@pytest.mark.parametrize("mode", ["bf16", "autocast"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("card", ["qwen3-0.6b", "qwen3-4b"])
def test_the_peak_of_a_published_model(card, checkpointing, mode):
    """Compare with a pass of 2,048 tokens on fake tensors: within .3 %."""
    tokens = 2048
    with FakeTensorMode():
        config = transformers.AutoConfig.for_model(**known_configs()[card])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=MODES[mode][0]).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        ids = torch.zeros((1, tokens), dtype=torch.long)
        # No mask: transformers makes none on real tensors, but under tracing.
        inputs = {"input_ids": ids, "labels": ids, "attention_mask": {"full_attention": None}, "use_cache": False}
        with LiveBytes() as memory:
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                loss = model(**inputs).loss
            loss.backward()
    planned = estimate_activations(
        model, tokens, torch.bfloat16, autocast=mode == "autocast", checkpointing=checkpointing
    )
    assert planned.peak == pytest.approx(memory.peak, rel=0.003)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "deepseek_v3", "mamba"])
def test_other_models_have_no_estimate(kind):
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind)
        auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
        config.num_hidden_layers = 2
        model = auto.from_config(config)
    assert estimate_activations(model, 1, torch.bfloat16) is None


class Matrices(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        shapes = {"wide": (960, 3200), "square": (1920, 1920), "experts": (6, 640, 960)}
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.randn(s).to(dtype)) for name, s in shapes.items()})
        self.embed_tokens = nn.Embedding(20480, 64, dtype=dtype)


@pytest.mark.promise("plan")
@pytest.mark.parametrize(
    ("moments", "dtype", "ns_dtype"),
    list(AllPairs([["fp32", "bf16", "int8"], [torch.float32, torch.bfloat16], ["fp32", "bf16"]])),
)
def test_the_buffers_of_a_step_are_bounded(moments, dtype, ns_dtype, monkeypatch):
    """Compare with a second step in the chunks of an accelerator, because the first creates the state."""
    monkeypatch.setattr(cost, "_BLOCK_ROWS", {})
    options = {
        "momentum_dtype": moments,
        "adamw_state_dtype": moments,
        "ns_dtype": ns_dtype,
        "muon_patterns": "weights",
    }
    with FakeTensorMode():
        model = Matrices(dtype)
        planned = plan_step(model, MuonConfig.from_mapping(options), "single", 1, dtype=dtype).memory.step
        optimizer = build_optimizer(model, options)
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            with accelerated(), uncomputed(), LiveBytes() as memory:
                optimizer.step()
    assert memory.peak <= planned <= 2 * memory.peak + 16 * 2**22


@pytest.mark.parametrize(("autocast", "checkpointing"), [(False, False), (True, True)])
def test_lora_saves_the_inputs_of_its_factors(autocast, checkpointing):
    """Check an upper bound: under autocast the copies are bf16, and frozen weights need no inputs."""
    model = get_peft_model(decoder("qwen3", 4096, torch.bfloat16), LoraConfig(r=8, target_modules="all-linear"))
    for param in model.parameters():
        param.data = param.data.float() if param.requires_grad else param.data
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    with LiveBytes() as memory:
        loss_of(model, autocast).backward()
    assert memory.peak <= estimate(model, "bf16", checkpointing).peak <= 1.2 * memory.peak


def test_one_process_has_all_the_work_of_a_model_with_weights_of_every_kind():
    """`tests/equality` compares plans of this model with measured steps."""
    with torch.device("meta"):
        model = Routed()
    views = {route.view for route in route_parameters(model) if route.view}
    assert views == {"rows 10+10+10", "flat, rows 2x4", "transposed"}
    plan = plan_step(model, MuonConfig(), "single", 1)
    assert (plan.balance, plan.sent_bytes) == (1, [0])
