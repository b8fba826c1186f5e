"""A Trainer script that does not import hf_muon; tests run it in its own processes.

Usage: plain_script.py OPTIM WEIGHTS_FILE
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

STEPS = 6
BATCH = 4
LR = 0.01
OPTIONS: dict[str, Any] = {
    "optim": "muon",
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "learning_rate": LR,
    "weight_decay": 0.1,
    "logging_steps": 1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}


def sentences(count: int = 256, length: int = 16, vocabulary: int = 48) -> Tensor:
    """Return sentences of an artificial language, with something to learn, of shape (count, length)."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(0, vocabulary, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    return (start + stride * torch.arange(length)) % vocabulary


def dataset(count: int = 256) -> list[dict[str, Tensor]]:
    """Return rows whose first label is ignored, so that all versions of transformers count the same tokens."""
    ignored = torch.tensor([-100])
    return [{"input_ids": row, "labels": torch.cat([ignored, row[1:]])} for row in sentences(count)]


def model(dtype: torch.dtype = torch.float32, **options: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        **options,
    )
    return Qwen3ForCausalLM(config).to(dtype)


class InOrder(Trainer):
    """A Trainer that does not shuffle, so that a loop can read the same batches."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main(optim: str, path: str) -> None:
    torch.set_num_threads(1)
    network = model()
    with tempfile.TemporaryDirectory() as folder:
        # bf16 products would hide differences on some machines.
        options = {**OPTIONS, "optim": optim} | ({"optim_args": "ns_dtype=fp32"} if optim == "muon" else {})
        InOrder(network, TrainingArguments(folder, **options), train_dataset=dataset()).train()
    torch.save(network.state_dict(), path)
    # Only a run that asks for Muon loads it.
    assert ("hf_muon.optimizer.muon" in sys.modules) == (optim == "muon")


if __name__ == "__main__":
    main(*sys.argv[1:])
