r"""Train an embedding model on pairs of texts with sentence-transformers and Muon.

    python examples/programs/sentence_transformers_pairs.py answerdotai/ModernBERT-base my_pairs.jsonl
    torchrun --nproc-per-node 4 examples/programs/sentence_transformers_pairs.py ...

A line of the file is {"anchor": ..., "positive": ...}. The script does not import hf_muon: `optim="muon"` is enough.
"""

import argparse
from pathlib import Path

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers.trainer_utils import get_last_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("pairs", help="a .jsonl file")
    parser.add_argument("--output", default="saves/sentence_transformers")
    parser.add_argument("--steps", type=int, default=-1, help="default: one epoch")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--cpu", action="store_true")
    words = parser.parse_args()

    model = SentenceTransformer(words.model, device="cpu" if words.cpu else None)
    args = SentenceTransformerTrainingArguments(
        words.output,
        optim="muon",
        learning_rate=words.lr,
        weight_decay=0.01,
        # optim_args="momentum=0.95,adamw_lr=1e-5",
        # learning_rate_mapping={r"embeddings\.": 1e-5},  # rates of parameters by name
        warmup_steps=0.1,
        num_train_epochs=1,
        max_steps=words.steps,
        per_device_train_batch_size=64,
        logging_steps=10,
        save_steps=500,
        report_to="none",
        use_cpu=words.cpu,
    )
    data = load_dataset("json", data_files=words.pairs, split="train").select_columns(["anchor", "positive"])
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss)
    last = get_last_checkpoint(words.output) if Path(words.output).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    model.save_pretrained(words.output)


if __name__ == "__main__":
    main()
