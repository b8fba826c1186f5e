"""Train the demo's small Qwen3 with fp32 and with bf16 weights, and compare held-out losses.

OMP_NUM_THREADS=1 python benchmarks/bf16_training.py --out benchmarks/bf16_training.json

*From random weights* is the demo's training with fewer layers: its text, tokenizer, learning rate and schedule.
*All four layers* is the same with the demo's own model. *Fine-tuning* goes on from the fp32 weights of two layers, on
docstrings of torch. A seed decides the random weights and the order of the text. Runs that the JSON file has are
skipped, so that an interrupted benchmark continues.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from meters import machine
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, get_cosine_schedule_with_warmup

from hf_muon import Muon, build_optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "demo"))
from prepare import CONTEXT, HELD_OUT_ONE_IN, INPUT, ROOT, prepare
from training import read_config, tokens_per_step

WEIGHTS = ROOT / "build" / "bf16_training"
SEEDS = (0, 1, 2)
RATES = (1e-5, 2e-5)
FINE_TUNING = {"max_steps": 80, "warmup_steps": 8}
NEW_TEXT = ("nn", "optim", "distributions", "fx")  # parts of torch

SCRATCH, DEMO, TUNED = "from random weights", "from random weights, all four layers", "fine-tuning"
LAYERS = {SCRATCH: 2, DEMO: 4, TUNED: 2}  # the demo has 4
FP32, AUTOCAST = "fp32 weights", "fp32 weights, bf16 autocast"
STOCHASTIC, NEAREST = "bf16 weights, stochastic", "bf16 weights, nearest"
BF16_MOMENTS = "bf16 weights, stochastic, AdamW's moments in bf16"
INT8_MOMENTS, INT8 = "fp32 weights, AdamW's moments in int8", "bf16 weights, stochastic, all moments in int8"
SIDES: dict[str, dict[str, Any]] = {
    FP32: {},
    STOCHASTIC: {"weight_rounding": "stochastic"},
    NEAREST: {"weight_rounding": "nearest"},
    BF16_MOMENTS: {"weight_rounding": "stochastic", "adamw_state_dtype": "bf16"},
    INT8_MOMENTS: {"adamw_state_dtype": "int8"},
    INT8: {"weight_rounding": "stochastic", "adamw_state_dtype": "int8", "momentum_dtype": "int8"},
    AUTOCAST: {},
}
Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bf16_training.json", help="the JSON file")
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    bench = Bench(parser.parse_args().out)
    for job in jobs():
        bench.run(*job)
    print(*(table(bench.runs, part) for part in LAYERS), sep="\n\n")


def jobs() -> Iterator[tuple[str, float | None, str, int]]:
    """Yield part, learning rate (None is the demo's), side and seed of each run, the most telling ones first."""
    yield from ((SCRATCH, None, side, seed) for seed in SEEDS for side in SIDES if side != AUTOCAST)
    yield from ((TUNED, lr, side, seed) for seed in SEEDS for lr in RATES for side in (FP32, STOCHASTIC, NEAREST))
    yield from ((SCRATCH, None, AUTOCAST, seed) for seed in SEEDS)
    yield from ((DEMO, None, side, seed) for seed in SEEDS for side in (FP32, STOCHASTIC, NEAREST, INT8_MOMENTS))


class Bench:
    """Text, settings, and the runs that a JSON file has."""

    def __init__(self, out: Path) -> None:
        self.out = out
        prepare()
        self.demo = read_config("muon")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(INPUT / "model")
        texts = dict.fromkeys((SCRATCH, DEMO), demo_text()) | {TUNED: new_text()}
        self.blocks = {part: [packed(text, tokenizer) for text in pair] for part, pair in texts.items()}
        self.setting = {"layers": LAYERS, "demo": self.demo, "tokens per step": tokens_per_step(self.demo)}
        self.setting |= {TUNED: FINE_TUNING, "new text": [f"docstrings of torch.{part}" for part in NEW_TEXT]}
        tokens = {part: [blocks.numel() for blocks in pair] for part, pair in self.blocks.items()}
        self.setting["tokens to train on, held out"] = tokens
        old = json.loads(out.read_text()) if out.is_file() else {}
        self.runs: list[Run] = old["runs"] if old.get("setting") == self.setting else []

    def run(self, part: str, lr: float | None, side: str, seed: int) -> None:
        """Train one side with one seed, unless the JSON file has it, and write the losses into that file."""
        key = {"part": part, "lr": lr or self.demo["learning_rate"], "side": side, "seed": seed}
        if any(key.items() <= run.items() for run in self.runs):
            return
        model = self.start(part, seed)
        if side in (STOCHASTIC, NEAREST, BF16_MOMENTS, INT8):
            for param in model.parameters():  # and no buffers: a checkpoint in bf16 is loaded so, too
                param.data = param.data.bfloat16()
        config = self.demo | (FINE_TUNING if part == TUNED else {}) | {"learning_rate": key["lr"]}
        before = self.loss(model, part, side)
        began = time.monotonic()
        train(model, side, config, self.batches(part, seed, config))
        losses = {"seconds": round(time.monotonic() - began), "before": before, "after": self.loss(model, part, side)}
        if (part, side) == (SCRATCH, FP32):
            WEIGHTS.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), WEIGHTS / f"{seed}.pt")
        losses["after, computed in fp32"] = self.loss(model.float(), part, FP32)
        self.runs.append(key | losses)
        report = {"machine": machine(transformers=transformers.__version__), "setting": self.setting}
        self.out.write_text(json.dumps(report | {"runs": self.runs}, indent=1) + "\n")
        print(self.runs[-1], flush=True)

    def start(self, part: str, seed: int, *, tied: bool = True) -> Qwen3ForCausalLM:
        """Return the demo's model, of as many layers as the part has, with random weights or those of fp32 training."""
        torch.manual_seed(seed)
        config = Qwen3Config.from_pretrained(INPUT / "model")
        config.num_hidden_layers, config.tie_word_embeddings = LAYERS[part], tied
        model = Qwen3ForCausalLM(config)
        if part == TUNED:
            model.load_state_dict(torch.load(WEIGHTS / f"{seed}.pt"))
        return model

    def batches(self, part: str, seed: int, config: dict[str, Any]) -> list[Tensor]:
        """Return a batch for each step, in the order that the seed decides."""
        blocks, size = self.blocks[part][0], config["per_device_train_batch_size"]
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        return list(blocks[order[: size * config["max_steps"]]].split(size))

    @torch.no_grad()
    def loss(self, model: nn.Module, part: str, side: str) -> float:
        """Return the mean loss of the held-out text."""
        with torch.autocast("cpu", torch.bfloat16, enabled=side == AUTOCAST):
            batches = self.blocks[part][1].split(8)
            return sum(model(ids, labels=ids).loss.item() * len(ids) for ids in batches) / sum(map(len, batches))


def train(
    model: nn.Module,
    side: str,
    config: dict[str, Any],
    batches: list[Tensor],
    before_step: Callable[[Muon], None] = lambda _: None,
) -> None:
    """Train a model as Trainer would, with the demo's settings."""
    options = {"lr": config["learning_rate"], "weight_decay": config["weight_decay"], **SIDES[side]}
    optimizer = build_optimizer(model, options, adamw_betas=(0.9, config["adam_beta2"]))
    schedule = get_cosine_schedule_with_warmup(optimizer, config["warmup_steps"], len(batches))
    for step, ids in enumerate(batches, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=side == AUTOCAST):
            loss = model(ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config["max_grad_norm"])
        before_step(optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"{side}: step {step} of {len(batches)}, loss {loss.item():.3f}", file=sys.stderr, flush=True)


def demo_text() -> list[list[str]]:
    """Return the demo's documents, those to train on and those held out."""
    files = (INPUT / "data" / f"{name}.json" for name in ("train", "held_out"))
    return [[entry["text"] for entry in json.loads(file.read_text())] for file in files]


def new_text() -> list[list[str]]:
    """Return docstrings of torch without repetitions, one document for each module: to train on, and held out."""
    parts: list[list[str]] = [[], []]
    folder, earlier = Path(torch.__file__).parent, set[str]()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in sorted(path for part in NEW_TEXT for path in (folder / part).rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        docstrings = [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
        if new := [text for text in dict.fromkeys(docstrings) if text and text not in earlier]:
            earlier.update(new)
            number = zlib.crc32(path.relative_to(folder).as_posix().encode())
            parts[number % HELD_OUT_ONE_IN == 0].append("\n\n".join(new))
    return parts


def packed(texts: list[str], tokenizer: Any) -> Tensor:
    """Return blocks of tokens, as many as the context holds, of texts that are joined by the end token."""
    tokens = [token for ids in tokenizer(texts).input_ids for token in (*ids, tokenizer.eos_token_id)]
    return torch.tensor(tokens[: len(tokens) // CONTEXT * CONTEXT]).view(-1, CONTEXT)


def table(runs: list[Run], part: str) -> str:
    """Return the losses as a Markdown table: means over seeds, and the least and greatest difference to fp32."""
    heads = ["learning rate", part, "held-out loss before", "after", "after, beside fp32", "gain / fp32's", "seeds"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    of_part = [run for run in runs if run["part"] == part]
    for lr, side in dict.fromkeys((run["lr"], run["side"]) for run in of_part):
        at_rate = [run for run in of_part if run["lr"] == lr]
        own, exact = ({run["seed"]: run for run in at_rate if run["side"] == name} for name in (side, FP32))
        before, after = (fmean(run[when] for run in own.values()) for when in ("before", "after"))
        apart = [run["after"] - exact[seed]["after"] for seed, run in own.items()]
        gain = (before - after) / fmean(exact[seed]["before"] - exact[seed]["after"] for seed in own)
        beside = f"{fmean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})" if side != FP32 else ""
        lines.append(f"| {lr:g} | {side} | {before:.4f} | {after:.4f} | {beside} | {gain:.2f} | {len(own)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
