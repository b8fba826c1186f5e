"""Plain implementations of other Muons' rules and states, the reference for `hf_muon.convert`."""

from __future__ import annotations

import torch
from torch import nn

from hf_muon import orthogonalize

WORDS = {"llamafactory-v0": ("embed", "lm_head"), "llamafactory-v1": ("embed", "lm_head", "wte", "wpe", "lora")}


class OtherMuon(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as Moonlight has them, or as Jordan and DeepSpeed.

    Newton-Schulz runs in fp32. Implementations add eps at different places of AdamW's denominator; an eps of 1e-8 hides
    that. There is no weight decay.
    """

    def __init__(self, groups, to_muon, *, moonlight):
        super().__init__(groups, {})
        self.to_muon, self.moonlight = {id(p) for p in to_muon}, moonlight
        self.averages = ("moment1", "moment2") if moonlight else ("exp_avg", "exp_avg_sq")
        if moonlight:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["use_muon"] = id(p) in self.to_muon

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    (self._muon if id(p) in self.to_muon else self._adamw)(group, p, p.grad, self.state[p])

    def _muon(self, group, p, g, state):
        mu = group["momentum"]
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
        rows, columns = p.shape
        if self.moonlight:
            buffer.copy_(mu * buffer + g)
            update, scale = g + mu * buffer, 0.2 * max(rows, columns) ** 0.5
        else:
            buffer.lerp_(g, 1 - mu)
            update, scale = g.lerp(buffer, mu), max(1, rows / columns) ** 0.5
        p.sub_(group["lr"] * scale * orthogonalize(update, ns_coefficients="original", ns_dtype="fp32"))

    def _adamw(self, group, p, g, state):
        beta1, beta2 = group.get("betas") or group["adamw_betas"]
        state["step"] = state.get("step", 0) + 1
        first, second = (state.setdefault(name, torch.zeros_like(p)) for name in self.averages)
        first.lerp_(g, 1 - beta1)
        second.lerp_(g.square(), 1 - beta2)
        corrected = second / (1 - beta2 ** state["step"])
        p.sub_(group["lr"] * (first / (1 - beta1 ** state["step"])) / (corrected.sqrt() + 1e-8))


def halves(model, words=("embed", "lm_head")):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    muon = [p for name, p in named if p.ndim == 2 and not any(word in name for word in words)]
    return muon, [p for _, p in named if all(p is not other for other in muon)]


def moonlight_like(model, source="llamafactory-v0", lr=0.02, **options):
    muon, adamw = halves(model, WORDS[source])
    own = {"wd": 0.0, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}
    return OtherMuon([{"params": [*muon, *adamw], "lr": lr, **own, **options}], muon, moonlight=True)


def deepspeed_like(model, lr=0.02):
    muon, adamw = halves(model)
    of_both = {"lr": lr, "weight_decay": 0.0}
    by_size = sorted(muon, key=lambda p: p.size(), reverse=True)
    groups = [
        {"params": by_size, "momentum": 0.95, "use_muon": True, **of_both},
        {"params": adamw, "betas": (0.9, 0.95), "eps": 1e-8, "use_muon": False, **of_both},
    ]
    return OtherMuon(groups, muon, moonlight=False)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(16, 16)
        self.o_proj = nn.Linear(16, 16, bias=False)
        self.up_proj = nn.Linear(16, 40, bias=False)
        self.down_proj = nn.Linear(40, 16, bias=False)
        self.norm = nn.LayerNorm(16)


class Model(nn.Module):
    """Parameters named and shaped as in a small language model; Muon and AdamW each get several of one shape."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 50, bias=False)


def gradients(model, steps, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(steps)]


def run(model, all_grads, *optimizers):
    """Step with precomputed gradients, so that momentum depends on nothing else."""
    for grads in all_grads:
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad.to(p.dtype) if p.requires_grad else None
        for optimizer in optimizers:
            optimizer.step()
