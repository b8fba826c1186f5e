"""Training LoRA factors with `lora: product` under ZeRO, on ranks of a pool, and the same in one process."""

from __future__ import annotations

import deepspeed
import torch
from torch.nn import functional as F  # noqa: N812

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import initialize
from tests.deepspeed.cases import config_of, rank_of_environment
from tests.rules.factors import WIDTH, AdaptedModel

OPTIONS = {"lora": "product", "lr": 1e-2, "weight_decay": 0.1, "ns_dtype": "fp32"}


def build_model(dtype="float32"):
    torch.manual_seed(0)
    return AdaptedModel().to(getattr(torch, dtype))


def loss_of(model, step, dtype="float32"):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, WIDTH, generator=generator), torch.randn(8, 7, generator=generator)
    return F.mse_loss(model(x.to(getattr(torch, dtype))).float(), y)


def refusal(rank, stage):
    """Return the error of a start under ZeRO, and whether weights are as they were."""
    rank_of_environment()
    deepspeed.zero.Init.param_id = 0
    model = build_model()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = build_optimizer(model, **OPTIONS)
    try:
        initialize(model=model, optimizer=optimizer, config=config_of(stage, "float32", 1, None, {}))
    except RuntimeError as error:
        same = all(torch.equal(param, own) for param, own in zip(model.parameters(), before, strict=True))
        return str(error), same
    return "", False
