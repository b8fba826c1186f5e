"""What ranks hold and send in steps of a model that transformers cuts by tensor and expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_muon import build_optimizer
from hf_muon.plan.live_bytes import LiveBytes
from hf_muon.storage.tensors import local_of
from tests.accelerated import accelerated, uncomputed
from tests.distributed.cases import Counted

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 321,  # no number of ranks divides it
}


def network(*, experts: bool = False) -> Any:
    """Return a small decoder, or one with four experts in each layer, which bring tokens to other ranks."""
    torch.manual_seed(11)
    if not experts:
        return Qwen3ForCausalLM(Qwen3Config(intermediate_size=56, tie_word_embeddings=True, **SIZES))
    inner = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=56, **inner, **SIZES))


def steps(*, experts: bool, load: dict[str, int], folder: Path, **options: Any) -> list[dict[str, int]]:
    """Return for each rank what it holds after two steps, what it sends in one, and the peak of one.

    Elementwise functions compute nothing, and have no temporary tensors, as on an accelerator.

    Args:
        experts: of `network`.
        load: options of DistributedConfig.
        folder: where the model lies while it is loaded.
        **options: of the optimizer.
    """
    from transformers.distributed import DistributedConfig

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = network(experts=experts)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(**load)
    model = type(model).from_pretrained(folder, dtype=torch.float32, distributed_config=config)
    optimizer = build_optimizer(model, {"ns_dtype": "fp32", **options})
    tokens = torch.arange(48).view(2, 24) + 3 * (dist.get_rank() // config.tp_size)
    with accelerated(), uncomputed():
        model(input_ids=tokens, labels=tokens).loss.backward()
        with Counted() as counted:
            optimizer.step()
        with LiveBytes() as memory:
            optimizer.step()
    own = {
        "sent_bytes": counted.bytes,
        "flops": counted.flops,
        "state_bytes": _nbytes(value for state in optimizer.state.values() for value in state.values()),
        "weights": _nbytes(model.parameters()),
        "gradients": _nbytes(param.grad for param in model.parameters()),
        "peak": memory.peak,
    }
    of_ranks: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, own)
    return of_ranks


def _nbytes(tensors: Any) -> int:
    return sum(local_of(tensor).numel() * tensor.element_size() for tensor in tensors)


def on_meta(*, experts: bool) -> nn.Module:
    """Return the model without memory."""
    with torch.device("meta"):
        model: nn.Module = network(experts=experts)
    return model
