"""A tiny tokenizer, a tiny Qwen3 and tiny data sets, built from the standard library's documentation."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import inspect
import json
import pathlib
import random
import string
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SOURCES = (argparse, collections, contextlib, functools, inspect, json, pathlib, random, string, textwrap, threading)
END, USER_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The template of LLaMA-Factory's qwen3_nothink; `generation` marks what TRL trains with assistant_only_loss.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAYERS = 2


@functools.cache
def documents() -> tuple[tuple[str, str], ...]:
    """Return names of classes and functions with their documentation, always in the same order."""
    by_name: dict[str, str] = {}
    for module in SOURCES:
        for name, member in sorted(vars(module).items()):
            own = not name.startswith("_") and getattr(member, "__module__", None) == module.__name__
            text = inspect.getdoc(member) if own else None
            if text and text not in by_name.values():
                by_name[f"{module.__name__}.{name}"] = text
    return tuple(by_name.items())


def texts(count: int | None = None) -> list[str]:
    """Return the text of the first documents; all by default."""
    return [text for _, text in documents()[:count]]


def build_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer and give it a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, USER_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


def build_model_folder(folder: Path, *, layers: int = LAYERS, tied: bool = False, seed: int = 0) -> Path:
    """Save a randomly initialized Qwen3 of about 40,000 parameters in fp32 and its tokenizer; return the folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def qwen3_matrices(layers: Sequence[int] = range(LAYERS)) -> set[str]:
    """Return the names of the modules of a Qwen3 whose weights are hidden matrices."""
    attention = {f"self_attn.{x}_proj" for x in "qkvo"}
    mlp = {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    return {f"model.layers.{layer}.{module}" for layer in layers for module in attention | mlp}


def qwen3_norms(layers: Sequence[int] = range(LAYERS)) -> set[str]:
    """Return the names of the modules in a Qwen3's layers whose weights are vectors."""
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    return {f"model.layers.{layer}.{norm}" for layer in layers for norm in norms}


def write_llamafactory_data(folder: Path) -> Path:
    """Write data for LLaMA-Factory: `tiny_sft` in alpaca format, `tiny_pt` as plain text, and dataset_info.json."""
    alpaca = [{"instruction": f"What is {name}?", "input": "", "output": text[:120]} for name, text in documents()]
    write_jsonl(folder / "tiny_sft.jsonl", alpaca)
    write_jsonl(folder / "tiny_pt.jsonl", [{"text": text} for text in texts()])
    info = {
        "tiny_sft": {"file_name": "tiny_sft.jsonl"},
        "tiny_pt": {"file_name": "tiny_pt.jsonl", "columns": {"prompt": "text"}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


def write_v1_data(folder: Path, data: Path) -> Path:
    """Write LLaMA-Factory v1's description of the `tiny_sft` that `write_llamafactory_data` wrote."""
    path = folder / "v1_sft.yaml"
    info = {"tiny_sft": {"path": str(data / "tiny_sft.jsonl"), "source": "local", "converter": "alpaca"}}
    path.write_text(json.dumps(info), encoding="utf-8")
    return path


def write_messages(folder: Path) -> Path:
    """Write conversations for TRL into a folder that `datasets.load_dataset` reads as a train split."""
    rows = [
        {"messages": [_says("user", f"What is {name}?"), _says("assistant", text[:120])]} for name, text in documents()
    ]
    return write_jsonl(folder / "train.jsonl", rows).parent


def write_preferences(folder: Path) -> Path:
    """Write prompts with a chosen and a rejected answer, as TRL's DPO reads them from a folder."""
    rows = [
        {
            "prompt": [_says("user", f"What is {name}?")],
            "chosen": [_says("assistant", text[:80])],
            "rejected": [_says("assistant", name)],
        }
        for name, text in documents()
    ]
    return write_jsonl(folder / "train.jsonl", rows).parent


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
