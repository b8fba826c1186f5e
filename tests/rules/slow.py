"""A model with LoRA stepped in float64, one matrix at a time, by SVD, with each option as its source writes it."""

from __future__ import annotations

import collections
import contextlib
import copy
import math
import re

import peft
import torch
import transformers

from hf_muon.math.coefficients import resolve
from tests.rules.attention_models import logits_before_softmax
from tests.support.reference import newton_schulz_on_singular_values

HEADS, HEAD_SIZE = 2, 6


def make():
    """Return a Llama with LoRA on one projection of each layer, whose other weights are all trained."""
    sizes = {"hidden_size": 16, "intermediate_size": 22, "vocab_size": 20, "head_dim": HEAD_SIZE}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": 2}
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


class Slow:
    """Muon on hidden matrices, AdamW on everything else.

    Attributes:
        weights: of the parameters that are trained.
        unclear: elements of each that rounding decides.
    """

    def __init__(self, model, options):
        self.model = copy.deepcopy(model).double()
        trained = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        self.names, self.weights = list(trained), [param.data for param in trained.values()]
        self.unclear = [torch.zeros_like(weight, dtype=torch.bool) for weight in self.weights]
        self.state = [collections.defaultdict(float) for _ in trained]
        self.options, self.number = options, 0
        own = options.get("ns_coefficients")
        self.steps = resolve(own) if own else resolve("polar_express", 5)

    @torch.no_grad()
    def step(self, ids, grads, lr, weight_decay):
        self.number += 1
        with logits_before_softmax() if "qk_clip" in self.options else contextlib.nullcontext() as logits:
            self.model(input_ids=ids)
        for k, (name, weight, grad) in enumerate(zip(self.names, self.weights, grads, strict=True)):
            scales = self.options.get("lr_scales", {})
            rate = lr * next((factor for pattern, factor in scales.items() if re.search(pattern, name)), 1.0)
            is_hidden = name.endswith("_proj.weight") or ("lora_B" in name and self.options.get("lora") == "muon")
            move, decaying = (self.muon if is_hidden else self.adamw)(k, weight, grad.double())
            weight -= rate * (move + weight_decay * decaying)
        for layer, largest in enumerate(logits or ()):
            self.clip(layer, largest.tolist())

    def adamw(self, k, weight, grad):
        state, (beta1, beta2) = self.state[k], (0.9, 0.999)
        state["mean"] = beta1 * state["mean"] + (1 - beta1) * grad
        state["square"] = beta2 * state["square"] + (1 - beta2) * grad**2
        mean, square = state["mean"] / (1 - beta1**self.number), state["square"] / (1 - beta2**self.number)
        return mean / (square.sqrt() + 1e-8), 0 if "norm" in self.names[k] else weight

    def muon(self, k, weight, grad):
        state, beta = self.state[k], self.momentum()
        state["momentum"] = beta * state["momentum"] + (1 - beta) * grad
        update = beta * state["momentum"] + (1 - beta) * grad
        direction = self.orthogonalized(update)
        if "normalize" in self.options:
            direction = self.normalized(state, direction)
        decaying = weight
        if "weight_decay_mode" in self.options:  # Chen et al., https://arxiv.org/abs/2510.12402
            decaying = torch.where(weight * direction >= 0, weight, 0)
            self.unclear[k] |= direction.abs() < 1e-4 * direction.square().mean().sqrt()  # fp32 may have another sign
        return self.options.get("update_rms", 0.2) * math.sqrt(max(weight.shape)) * direction, decaying

    def momentum(self):
        """Return what modded-nanogpt's `get_muon_momentum` does."""
        step, warmup = self.number - 1, self.options.get("momentum_warmup", 0)
        return 0.85 + step / warmup * (0.95 - 0.85) if step < warmup else 0.95

    def orthogonalized(self, update):
        """Chang et al., https://arxiv.org/abs/2603.28254 (R)."""
        if "balance" in self.options:
            update = update.square().sum(1).rsqrt().diag() @ update
        return newton_schulz_on_singular_values(update, self.steps)

    def normalized(self, state, direction):
        """Li et al., https://arxiv.org/abs/2510.05491, with the norm of the authors' code."""
        rows = []
        for i, row in enumerate(direction):
            state[i] = 0.95 * state[i] + (1 - 0.95) * (row * row).mean()
            rows.append(row / (state[i].sqrt() + 1e-10))
        normalized = torch.stack(rows)
        return normalized * direction.norm() / normalized.norm()

    def clip(self, layer, logits):
        """Kimi Team, https://arxiv.org/abs/2507.20534, Algorithm 1, with one key for each query head."""
        for head, largest in enumerate(logits):
            gamma = min(1.0, self.options["qk_clip"] / largest) if largest > 0 else 1.0
            for name, weight in zip(self.names, self.weights, strict=True):
                if re.search(rf"layers\.{layer}\.self_attn\.[qk]_proj", name):
                    weight[head * HEAD_SIZE : (head + 1) * HEAD_SIZE] *= math.sqrt(gamma)

    def distance(self, weights, start):
        """Return how far a weight is at most from the one here, divided by how far that has moved."""
        return max(
            float((weight.detach().double() - own).masked_fill(unclear, 0).norm() / (own - first.detach()).norm())
            for weight, own, first, unclear in zip(weights, self.weights, start, self.unclear, strict=True)
        )
