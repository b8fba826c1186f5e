"""Run LLaMA-Factory v1 one or more times in the same ranks: ``... v1_worker.py cases.json``.

A case has the settings of a run, and `drop_momentum`: zero the momentum before the run trains. `record.pt` in its
output folder gets the gradients of the first step and the loss of every step.

For its Ulysses LLaMA-Factory asks for CUDA and flash-attn in three places, and only these are replaced: the attention
over whole sequences of some heads, the device of a batch, and the name of the attention that it requires.
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
from llamafactory.v1.accelerator.interface import DistributedInterface
from llamafactory.v1.core.model_engine import ModelEngine
from llamafactory.v1.plugins.model_plugins.parallelization import sequence_parallel
from llamafactory.v1.trainers.sft_trainer import SFTTrainer, run_sft
from torch import Tensor

attended: set[tuple[int, ...]] = set()


def _flash_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Causal attention over (batch, length, heads, size); padding is on the right, where no token attends to it."""
    attended.add((*query.shape[1:3], key.shape[2]))
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads, is_causal=True, scale=kwargs["softmax_scale"], enable_gqa=True
    )
    return out.transpose(1, 2).contiguous()


class OnCpu:
    """torch.distributed, except that `get_rank` without a group returns the CPU device."""

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
        model = init_model(self)  # with sdpa, because flash-attn is not installed
        model.config._attn_implementation = "flash_attention_2"
        return model

    ModelEngine._init_model = init_with_its_name


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def fit_and_record(self: SFTTrainer, recorded: dict[str, Any], *, drop_momentum: bool) -> None:
    def before_step(*args: Any) -> None:
        if "gradients" not in recorded:
            recorded["gradients"] = {name: whole(p.grad) for name, p in self.model.named_parameters()}

    def log_and_record(args: Any, state: Any, logs: dict[str, Any]) -> None:
        recorded["losses"].append(logs["loss"])
        log(args, state, logs)

    for state in self.optimizer.state.values():
        if drop_momentum and "momentum_buffer" in state:
            state["momentum_buffer"].zero_()
    self.optimizer.register_step_pre_hook(before_step)
    log, self.callback_handler.on_log = self.callback_handler.on_log, log_and_record
    fit(self)


fit = SFTTrainer.fit


def main(cases: dict[str, dict[str, Any]]) -> None:
    torch.accelerator.synchronize = lambda *args, **kwargs: None  # after each step, where there is no accelerator
    # All cases share the ranks and their mesh.
    DistributedInterface.destroy = lambda self: dist.is_initialized() and dist.barrier()
    for settings in cases.values():
        if "ulysses" in json.dumps(settings.get("dist_config")) or settings.get("cp_mode") == "ulysses":
            open_ulysses()
        recorded: dict[str, Any] = {"losses": [], "attended": attended}
        drop = settings.pop("drop_momentum", False)
        SFTTrainer.fit = functools.partialmethod(fit_and_record, recorded, drop_momentum=drop)
        run_sft(settings)
        if os.environ.get("RANK", "0") == "0":
            torch.save(recorded, Path(settings["output_dir"], "record.pt"))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # finalizing the interpreter may make a waiting thread of gloo abort the process


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
