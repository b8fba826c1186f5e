"""A Trainer script that does not import hf_muon; run by the tests in processes of its own."""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments


class InOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main(optim: str, path: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=False,
        )
    )
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(0, 48, (256, 1), generator=generator)
    stride = torch.randint(1, 4, (256, 1), generator=generator)
    rows = [{"input_ids": row, "labels": row} for row in (start + stride * torch.arange(16)) % 48]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            optim=optim,
            max_steps=6,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            weight_decay=0.1,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
        )
        InOrder(model, args, train_dataset=rows).train()
    torch.save(model.state_dict(), path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
