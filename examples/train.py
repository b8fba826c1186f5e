"""Train a causal language model on local text with transformers' Trainer; a YAML file says how.

    python examples/train.py examples/yaml/trainer_qwen3_pretrain.yaml --data_path my_texts --max_steps 100
    torchrun --nproc-per-node 4 examples/train.py examples/yaml/trainer_qwen3_pretrain.yaml

The YAML file holds the fields of `ScriptArguments` below and of transformers' `TrainingArguments`; `--key value` on the
command line wins over the file. `optim: muon` is all that Muon needs: nothing in this script names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import yaml
from accelerate.utils import broadcast_object_list
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
        prompt_column: the key of the prompt, on which no loss is computed (supervised fine-tuning). Each entry is then
            one example. Without a prompt column, texts are concatenated and cut into examples of equal length.
        block_size: number of tokens in an example; with prompts, the maximum.
        attn_implementation: of transformers, such as sdpa or flash_attention_2.
        eval_fraction: the fraction of the examples, from the end, that is held out.
    """

    model_name_or_path: str = ""
    data_path: str = ""
    from_scratch: bool = False
    text_column: str = "text"
    prompt_column: str = ""
    block_size: int = 1024
    attn_implementation: str = "sdpa"
    eval_fraction: float = 0.05


def fail(message: str) -> NoReturn:
    """End with a message and without a traceback."""
    sys.exit(f"train.py: {message}")


def parse_arguments(argv: list[str]) -> tuple[ScriptArguments, TrainingArguments]:
    """Return the settings of the YAML file that comes first in `argv`, overridden by the rest of `argv`."""
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


def read_texts(path: Path, text_column: str, prompt_column: str = "") -> Iterator[tuple[str, str]]:
    """Yield every prompt and text in a file, or in the files of a folder in alphabetical order."""
    if not path.exists():
        fail(f"data_path: {path} does not exist")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    for file in files:
        if file.suffix not in SUFFIXES:
            fail(f"data_path: {file} is none of {', '.join(SUFFIXES)}")
        content = file.read_text(encoding="utf-8")
        if file.suffix == ".txt":
            if prompt_column:
                fail(f"data_path: {file} has no prompts; see prompt_column")
            yield "", content
            continue
        if file.suffix == ".json":
            rows = json.loads(content)
        else:
            rows = [json.loads(line) for line in content.split("\n") if line.strip()]
        for row in rows:
            for column in filter(None, (text_column, prompt_column)):
                if not isinstance(row, dict) or column not in row:
                    fail(f"data_path: an entry of {file} has no {column!r}; see text_column and prompt_column")
            yield row[prompt_column] if prompt_column else "", row[text_column]


def make_examples(script: ScriptArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Example], list[Example]]:
    """Return the examples to train on, and the held-out ones, all in memory."""
    pairs = read_texts(Path(script.data_path), script.text_column, script.prompt_column)
    pairs = [(prompt, text) for prompt, text in pairs if text.strip()]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if script.prompt_column:
        examples, tokens = [], 0
        for prompt, text in pairs:
            before, learned = ids_of(prompt), ids_of(text) + end
            ids, labels = torch.tensor(before + learned), torch.tensor([-100] * len(before) + learned)
            tokens += len(ids)
            if len(before) < script.block_size:  # otherwise nothing of it would be learned
                examples.append({"input_ids": ids[: script.block_size], "labels": labels[: script.block_size]})
    else:
        ids = [i for _, text in pairs for i in ids_of(text) + end]
        count, tokens = len(ids) // script.block_size, len(ids)
        blocks = torch.tensor(ids[: count * script.block_size]).view(count, script.block_size)
        examples = [{"input_ids": block, "labels": block} for block in blocks]
    count = len(examples)
    if count < 2:
        fail(
            f"data_path: {script.data_path} has {len(pairs)} texts with {tokens} tokens; two examples of "
            f"block_size={script.block_size} tokens are the least, one to train on and one to hold out"
        )
    held_out = min(max(round(count * script.eval_fraction), 1), count - 1)
    return examples[:-held_out], examples[-held_out:]


@dataclass
class PadRight:
    """Collate examples of any length into a batch, padded on the right."""

    pad_token_id: int

    def __call__(self, examples: list[Example]) -> Example:
        length = max(len(example["input_ids"]) for example in examples)
        batch = {name: torch.full((len(examples), length), -100) for name in ("input_ids", "labels")}
        batch["input_ids"].fill_(self.pad_token_id)
        batch["attention_mask"] = torch.zeros_like(batch["labels"])
        for i, example in enumerate(examples):
            end = len(example["input_ids"])
            batch["input_ids"][i, :end] = example["input_ids"]
            batch["labels"][i, :end] = example["labels"]
            batch["attention_mask"][i, :end] = 1
        return batch


def start_deepspeed_on_cpu() -> None:
    """Initialize DeepSpeed with gloo, which it does not choose by itself, and without its shared-memory collectives.

    DeepSpeed would compile those for a minute.
    """
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")


def load_model(script: ScriptArguments) -> PreTrainedModel:
    """Return the model with weights in float32; `bf16: true` computes in bfloat16."""
    how = {"dtype": torch.float32, "attn_implementation": script.attn_implementation}
    if not script.from_scratch:
        return AutoModelForCausalLM.from_pretrained(script.model_name_or_path, **how)
    config = AutoConfig.from_pretrained(script.model_name_or_path)
    return AutoModelForCausalLM.from_config(config, **how)


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return a run's checkpoints by step, without any whose saving was interrupted.

    Trainer writes trainer_state.json last, and cannot resume without it.
    """
    found = {}
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        if number := re.fullmatch(r"checkpoint-(\d+)", state.parent.name):
            with contextlib.suppress(ValueError):  # half a file is no JSON
                json.loads(state.read_text(encoding="utf-8"))
                found[int(number[1])] = state.parent
    return found


def main(argv: list[str]) -> None:
    """Train, evaluate, save."""
    script, training = parse_arguments(argv)
    # Where sequences are shared among ranks, accelerate wants to know the attention, too.
    os.environ.setdefault("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", script.attn_implementation)
    if training.use_cpu and training.deepspeed:
        start_deepspeed_on_cpu()
    set_seed(training.seed)  # before random weights are drawn
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    train, held_out = make_examples(script, tokenizer)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    collate = PadRight(pad) if script.prompt_column else default_data_collator
    trainer = Trainer(
        model=load_model(script),
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=collate,
    )
    checkpoints = complete_checkpoints(Path(training.output_dir))
    last = [str(checkpoints[max(checkpoints)]) if checkpoints else None]
    broadcast_object_list(last)  # all ranks resume from the one that rank 0 has found
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint or last[0])
    trainer.save_model()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
