"""Count the launches, reads and elementwise traffic of one optimizer step on an accelerator: ``launches.json``.

    python -m benchmarks.launches            # compare with the table
    python -m benchmarks.launches --write    # write it

Nothing is measured, and no accelerator is needed: see `benchmarks.count`. A test asserts the table, so that a change
that costs launches shows as a difference.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from benchmarks.count import counting
from hf_muon import build_optimizer
from hf_muon.diagnostics import log
from hf_muon.optimizer import consensus, gradients

TABLE = Path(__file__).with_name("launches.json")
GRAM = ", bf16 weights, fp32 momentum, fp16 products"  # what `ns_dtype: auto` is on NVIDIA GPUs
MODELS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "Qwen3-0.6B": lambda: transformers.Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=28,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "Qwen3-30B-A3B, 2 layers": lambda: transformers.Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=2,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=1000,
    ),
    "Llama-3.1-8B, 4 layers": lambda: transformers.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=4,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
}
WEIGHTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
MOMENTA = ("fp32", "bf16", "int8")


def meta_model(config: transformers.PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """Return a model on the meta device, with gradients."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    return model


@contextlib.contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Yield a list of what the host reads of meta tensors, which answer with finite gradients."""
    reads: list[str] = []
    tolist = Tensor.tolist

    def read(self: Tensor) -> Any:
        if self.device.type != "meta":
            return tolist(self)
        reads.append("tolist")
        return True

    def has_data(tensor: Tensor) -> bool:
        return True

    with (
        mock.patch.object(Tensor, "tolist", read),
        mock.patch.object(consensus, "has_data", has_data),
        mock.patch.object(gradients, "has_data", has_data),
    ):
        yield reads


def count_step(
    config: transformers.PretrainedConfig, weights: str, momentum: str, products: str = "bf16"
) -> dict[str, float]:
    """Return the launches, reads and bytes of elementwise traffic a weight of the second step of one process.

    Args:
        config: of the model.
        weights: their dtype, one of `WEIGHTS`.
        momentum: `momentum_dtype`.
        products: `ns_dtype`: bf16, in the standard form, or fp16, in the Gram form.
    """
    model = meta_model(config, WEIGHTS[weights])
    optimizer = build_optimizer(model, {"lr": 1e-3, "ns_dtype": products, "momentum_dtype": momentum})
    optimizer.step()
    with counted_reads() as reads, counting() as count:
        optimizer.step()
    total = sum(param.numel() for param in model.parameters())
    return {
        "launches": sum(count.launches.values()),
        "products": sum(count.launches[name] for name in ("bmm", "baddbmm")),
        "reads": len(reads),
        "traffic": round(sum(count.traffic.values()) / total, 1),
    }


def count_all() -> dict[str, dict[str, float]]:
    """Return the counts of all models and dtypes."""
    counts = {
        f"{name}, {weights} weights, {momentum} momentum": count_step(config(), weights, momentum)
        for (name, config), weights, momentum in itertools.product(MODELS.items(), WEIGHTS, MOMENTA)
    }
    of_gram = {f"{name}{GRAM}": count_step(config(), "bf16", "fp32", "fp16") for name, config in MODELS.items()}
    return counts | of_gram


def main() -> None:
    """Print the counts beside the table's, or write them."""
    log.logger().setLevel("WARNING")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--write", action="store_true", help="write launches.json")
    counts = count_all()
    if parser.parse_args().write:
        TABLE.write_text(json.dumps(counts, indent=1) + "\n")
    table = json.loads(TABLE.read_text())
    for name, own in counts.items():
        print(f"{name}: {own}" + ("" if own == table.get(name) else f"; in the table {table.get(name)}"))


if __name__ == "__main__":
    main()
