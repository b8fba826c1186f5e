"""A model with LoRA stepped in float64: Muon, AdamW, and each option of `OF_MODELS` as its source writes it."""

from __future__ import annotations

import copy
import math
import re

import peft
import torch
import transformers

from hf_muon.math.coefficients import resolve
from tests.rules.attention_models import logits_before_softmax
from tests.rules.settings import OF_MODELS, TRIPLES
from tests.rules.slow import SlowMuon
from tests.rules.slow_rules import SLOW

LAYERS, HEADS, HEAD_SIZE = 2, 2, 6


def make():
    """Return a Llama with LoRA on one projection of each layer, whose other weights are all trained."""
    sizes = {"hidden_size": 16, "intermediate_size": 22, "vocab_size": 20, "head_dim": HEAD_SIZE}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, attn_implementation="eager"))
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["down_proj"])).train()
    generator = torch.Generator().manual_seed(5)
    for name, param in model.named_parameters():
        param.requires_grad_("base_layer" not in name)
        if "norm" not in name:
            param.data.normal_(0, 0.1 + 0.2 * ("q_proj" in name), generator=generator)
    return model


def gradients(model, steps):
    """Return gradients by step and parameter: noise, and a constant of rank one, which a high-pass filter keeps."""
    generator = torch.Generator().manual_seed(6)
    trained = [param for param in model.parameters() if param.requires_grad]

    def random(*shape):
        return torch.randn(shape, generator=generator)

    large = [random(p.shape[0], 1) @ random(1, p.shape[-1]) if p.ndim == 2 else random(*p.shape) for p in trained]
    return [[4 * one + random(*one.shape) for one in large] for _ in range(steps)]


class SlowModel(SlowMuon):
    """Plain Muon on hidden matrices, AdamW on everything else."""

    betas, eps = (0.9, 0.999), 1e-8

    def __init__(self, model, lr, weight_decay):
        self.model = copy.deepcopy(model).double()
        params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        self.names = list(params)
        super().__init__(params.values(), lr, weight_decay)
        for param, weight in zip(params.values(), self.weights, strict=True):
            param.data = weight
        self.moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in self.weights]

    def is_hidden(self, name):
        return name.endswith("_proj.weight")

    def forward(self, ids):
        """Look at a batch before a step."""

    def step_of(self, k, grad):
        if self.is_hidden(self.names[k]):
            super().step_of(k, grad)
            return
        weight, (mean, square) = self.weights[k], self.moments[k]
        for moment, value, beta in ((mean, grad, self.betas[0]), (square, grad * grad, self.betas[1])):
            moment.copy_(beta * moment + (1 - beta) * value)
        mean, square = (m / (1 - b**self.number) for m, b in zip((mean, square), self.betas, strict=True))
        decay = 0.0 if "norm" in self.names[k] else self.weight_decay_of(k)
        weight.copy_(weight - self.rate_of(k) * (decay * weight + mean / (square.sqrt() + self.eps)))


def factor_of(name, scales):
    return next((factor for pattern, factor in scales.items() if re.search(pattern, name)), 1.0)


class LrScales(SlowModel):
    def rate_of(self, k):
        return super().rate_of(k) * factor_of(self.names[k], OF_MODELS["lr_scales"]["lr_scales"])


class UpdateRms(SlowModel):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.rms = 0.3


def coefficients(value):
    class Coefficients(SlowModel):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.steps = resolve(value)

    return Coefficients


class QkClip(SlowModel):
    """Kimi Team, https://arxiv.org/abs/2507.20534, Algorithm 1, with one key for each query head."""

    def forward(self, ids):
        with logits_before_softmax() as self.logits, torch.no_grad():
            self.model(input_ids=ids)

    def after_step(self):
        for layer, logits in enumerate(self.logits):
            for head, largest in enumerate(logits.tolist()):
                gamma = min(1.0, 1.0 / largest) if largest > 0 else 1.0
                for name, weight in zip(self.names, self.weights, strict=True):
                    if re.search(rf"layers\.{layer}\.self_attn\.[qk]_proj", name):
                        weight[head * HEAD_SIZE : (head + 1) * HEAD_SIZE] *= math.sqrt(gamma)


class MuonB(SlowModel):
    def is_hidden(self, name):
        return super().is_hidden(name) or "lora_B" in name


SLOW_MODELS = {
    **SLOW,
    "lr_scales": LrScales,
    "update_rms": UpdateRms,
    "list": coefficients(TRIPLES),
    "deepseek_v4": coefficients("deepseek_v4"),
    "qk_clip": QkClip,
    "muon_b": MuonB,
}
"""By the names of `OF_MODELS`."""


def slow_model(names, model, **options):
    """Return a model that is stepped by several rules."""
    return type("Slow", (*(SLOW_MODELS[name] for name in names), SlowModel), {})(model, **options)
