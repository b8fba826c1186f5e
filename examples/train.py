"""Train a causal language model on local text with transformers' Trainer; a YAML file says how.

    python examples/train.py examples/yaml/trainer_qwen3_pretrain.yaml --data_path my_texts --max_steps 100
    torchrun --nproc-per-node 4 examples/train.py examples/yaml/trainer_qwen3_pretrain.yaml

The YAML file holds the fields of `ScriptArguments` below and of transformers' `TrainingArguments`; `--key value` on the
command line wins over the file. `optim: muon` is all that Muon needs: nothing in this script names it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

SUFFIXES = (".txt", ".json", ".jsonl")

Example = dict[str, torch.Tensor]


@dataclass
class ScriptArguments:
    """What to train, and on what.

    Attributes:
        model_name_or_path: a folder or a name on the hub, with weights unless `from_scratch`.
        data_path: a .txt, .json or .jsonl file, or a folder of them; a .json file holds a list of objects.
        from_scratch: start from random weights; only the configuration and the tokenizer are read.
        text_column: the key of the text in .json and .jsonl files.
        block_size: tokens in a training example; texts are joined and cut to this length.
        eval_fraction: the part of the examples, from the end, that is held out.
    """

    model_name_or_path: str = ""
    data_path: str = ""
    from_scratch: bool = False
    text_column: str = "text"
    block_size: int = 1024
    eval_fraction: float = 0.05


def fail(message: str) -> NoReturn:
    """End with a message and without a traceback."""
    sys.exit(f"train.py: {message}")


def parse_arguments(argv: list[str]) -> tuple[ScriptArguments, TrainingArguments]:
    """Read the YAML file named first, then what follows it."""
    if not argv or argv[0].startswith("-"):
        fail("usage: python train.py settings.yaml [--key value ...]")
    path = Path(argv[0])
    if not path.is_file():
        fail(f"{path} is not a file")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        fail(f"{path} does not hold keys and values")
    known = {field.name for kind in (ScriptArguments, TrainingArguments) for field in dataclasses.fields(kind)}
    if unknown := sorted(set(settings) - known):
        fail(f"{path}: unknown keys {', '.join(unknown)}")
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(**settings)  # text such as 1e-4, which YAML does not read as a number, is converted here, too
    script, training = parser.parse_args_into_dataclasses(args=argv[1:])
    for key in ("model_name_or_path", "data_path"):
        if not getattr(script, key):
            fail(f"{path}: {key} is missing")
    if script.block_size < 2 or not 0 < script.eval_fraction < 1:
        fail("block_size must be at least 2, and eval_fraction between 0 and 1")
    return script, training


def read_texts(path: Path, text_column: str) -> Iterator[str]:
    """Every text in a file, or in the files of a folder in alphabetical order."""
    if not path.exists():
        fail(f"data_path: {path} does not exist")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    for file in files:
        if file.suffix not in SUFFIXES:
            fail(f"data_path: {file} is none of {', '.join(SUFFIXES)}")
        content = file.read_text(encoding="utf-8")
        if file.suffix == ".txt":
            yield content
            continue
        if file.suffix == ".json":
            rows = json.loads(content)
        else:
            rows = [json.loads(line) for line in content.split("\n") if line.strip()]
        for row in rows:
            if not isinstance(row, dict) or text_column not in row:
                fail(f"data_path: an entry of {file} has no {text_column!r}; see text_column")
            yield row[text_column]


def make_examples(script: ScriptArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and those held out. All of them are kept in memory."""
    texts = [text for text in read_texts(Path(script.data_path), script.text_column) if text.strip()]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"] + end]
    count = len(ids) // script.block_size
    if count < 2:
        fail(
            f"data_path: {script.data_path} has {len(texts)} texts with {len(ids)} tokens; two examples of "
            f"block_size={script.block_size} tokens are the least, one to train on and one to hold out"
        )
    blocks = torch.tensor(ids[: count * script.block_size]).view(count, script.block_size)
    examples = [{"input_ids": block, "labels": block} for block in blocks]
    held_out = min(max(round(count * script.eval_fraction), 1), count - 1)
    return examples[:-held_out], examples[-held_out:]


def load_model(script: ScriptArguments) -> PreTrainedModel:
    """The model, with weights in float32; `bf16: true` computes in bfloat16."""
    if not script.from_scratch:
        return AutoModelForCausalLM.from_pretrained(script.model_name_or_path, dtype=torch.float32)
    config = AutoConfig.from_pretrained(script.model_name_or_path)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def main(argv: list[str]) -> None:
    """Train, evaluate, save."""
    script, training = parse_arguments(argv)
    set_seed(training.seed)  # before random weights are drawn
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    train, held_out = make_examples(script, tokenizer)
    trainer = Trainer(
        model=load_model(script),
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    last = get_last_checkpoint(training.output_dir) if Path(training.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint or last)
    trainer.save_model()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main(sys.argv[1:])
