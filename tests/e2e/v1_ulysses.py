"""Runs LLaMA-Factory v1 with its own Ulysses on a CPU: ``torchrun ... v1_ulysses.py settings.json record.pt``.

As shipped it asks for CUDA and flash-attn in three places, and these alone are replaced: the attention it calls for
whole sequences of some heads, the device it moves a batch to, and the name of the attention it insists on.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.integrations.flash_attention
import transformers.modeling_flash_attention_utils
from llamafactory.v1.core.model_engine import ModelEngine
from llamafactory.v1.plugins.model_plugins.parallelization import sequence_parallel
from llamafactory.v1.trainers.sft_trainer import SFTTrainer, run_sft
from torch import Tensor

seen: dict[str, Any] = {"losses": [], "attended": set()}


def _flash_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Causal attention over (batch, length, heads, size); padding stands on the right, where nobody attends to it."""
    seen["attended"].add((*query.shape[1:3], key.shape[2]))
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads, is_causal=True, scale=kwargs["softmax_scale"], enable_gqa=True
    )
    return out.transpose(1, 2).contiguous()


class OnCpu:
    """torch.distributed, whose own rank stands for a device where no group is named."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_rank(self, group: Any = None) -> Any:
        return torch.device("cpu") if group is None else dist.get_rank(group)


def open_ulysses() -> None:
    for module in (transformers.modeling_flash_attention_utils, transformers.integrations.flash_attention):
        module._flash_attention_forward = _flash_attention_forward
    sequence_parallel.dist = OnCpu()
    init_model = ModelEngine._init_model

    @functools.wraps(init_model)
    def init_with_its_name(self: ModelEngine) -> Any:
        model = init_model(self)  # with sdpa, because the other is not installed
        model.config._attn_implementation = "flash_attention_2"
        return model

    ModelEngine._init_model = init_with_its_name


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def record() -> None:
    """Keep the first gradients, and the loss of every step."""
    fit = SFTTrainer.fit

    def fit_and_record(self: SFTTrainer) -> None:
        def before_step(*args: Any) -> None:
            if "gradients" not in seen:
                seen["gradients"] = {name: whole(p.grad) for name, p in self.model.named_parameters()}

        self.optimizer.register_step_pre_hook(before_step)
        log = self.callback_handler.on_log

        def log_and_record(args: Any, state: Any, logs: dict[str, Any]) -> None:
            seen["losses"].append(logs["loss"])
            log(args, state, logs)

        self.callback_handler.on_log = log_and_record
        fit(self)

    SFTTrainer.fit = fit_and_record


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "dist_config" in settings:
        open_ulysses()
    record()
    run_sft(settings)
    if os.environ.get("RANK", "0") == "0":
        torch.save(seen, sys.argv[2])
