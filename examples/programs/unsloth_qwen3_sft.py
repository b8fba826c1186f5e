"""Fine-tune all weights of Qwen3-0.6B with Unsloth and Muon, on one GPU.

    python examples/programs/unsloth_qwen3_sft.py

`optim="muon"` is all that Muon needs. Written for Unsloth 2026.10, which needs a GPU; not run in this repository's
tests.
"""

from pathlib import Path

from unsloth import FastLanguageModel  # isort: skip, Unsloth comes before transformers and TRL
from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

OUTPUT = "saves/qwen3-0.6b/unsloth/sft_muon"


def main() -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(
        "Qwen/Qwen3-0.6B", max_seq_length=2048, load_in_4bit=False, full_finetuning=True
    )
    args = SFTConfig(
        OUTPUT,
        optim="muon",
        learning_rate=2e-5,
        weight_decay=0.0,
        # optim_args="momentum=0.95,adamw_lr=1e-5",
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        max_length=2048,
        logging_steps=10,
        save_steps=500,
        report_to="none",
    )
    data = load_dataset("trl-lib/Capybara", split="train")
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(OUTPUT) if Path(OUTPUT).is_dir() else None)


if __name__ == "__main__":
    main()
