"""Train one trial in this process and write its result.

python -m evidence.trial SPEC.json RESULT.json
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from evidence.chat import INPUT, corpus_in
from evidence.corpus import BUILD, Corpus
from evidence.models import build_model
from evidence.rivals import build_rival
from examples.rules import bimaxwell, sinkhorn
from hf_muon.config import OPTIONS
from hf_muon.rules import register

HELD_OUT_BLOCKS = 128
EVALUATION_BATCH = 16
_NOT_FOR_TRAINER = {
    *("warmup", "weights", "lora_rank", "rival", "hidden_lr", "attention"),
    *("table_lr", "clip_muon", "clip_adamw", "spike", "hidden_betas", "betas_of", "decay_of"),
}

Result = dict[str, Any]


class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Blocks of tokens in the order that a seed decides, epoch after epoch.

    Args:
        blocks: ``(number of blocks, context)``, or ``(number of blocks, 2, context)`` of tokens and labels.
        count: number of blocks to train on, as often as it takes.
        seed: of the order.
    """

    def __init__(self, blocks: Tensor, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        epochs = -(-count // len(blocks))
        self.order = torch.cat([torch.randperm(len(blocks), generator=generator) for _ in range(epochs)])[:count]
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens, labels = tokens_and_labels(self.blocks[self.order[i]], 1)
        return {"input_ids": tokens, "labels": labels}


class ClipApart(TrainerCallback):
    """Clips the gradients of Muon's matrices, of AdamW's parameters, or of each, by their own norm.

    Args:
        norms: the largest norm, by `use_muon`; others are not clipped.
    """

    def __init__(self, norms: Mapping[bool, float]) -> None:
        self.norms = norms

    def on_train_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.optimizer.register_step_pre_hook(self._clip)  # of the one that accelerate wraps

    def _clip(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        for use_muon, norm in self.norms.items():
            groups = [group for group in optimizer.param_groups if group["use_muon"] is use_muon]
            torch.nn.utils.clip_grad_norm_([param for group in groups for param in group["params"]], norm)


class InOrder(Trainer):
    """Trainer that takes the blocks as they come, so that both sides see the same batches.

    Attributes:
        spike: what the gradients of the step in the middle are multiplied by.
    """

    spike = 1.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * self.spike if self.state.global_step == self.state.max_steps // 2 else loss

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class Watch(TrainerCallback):
    """Evaluates at some points of training, and measures what training takes without that.

    Attributes:
        losses: by step.
        cpu_seconds: processor time of this process in training, without evaluations.
    """

    def __init__(self, steps: list[int], evaluate: Any) -> None:
        self.steps, self.evaluate = steps, evaluate
        self.losses: dict[int, float] = {}
        self.cpu_seconds = 0.0
        self._began = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.steps:
            self.cpu_seconds += time.process_time() - self._began
            self.losses[state.global_step] = loss = self.evaluate()
            print(f"step {state.global_step}: {loss:.4f}", file=sys.stderr, flush=True)
            control.should_training_stop |= not math.isfinite(loss)
            self._began = time.process_time()


def train(spec: Mapping[str, Any], corpus: Corpus) -> Result:
    """Train by a spec and return the result.

    Args:
        spec: of `evidence.study.Trial`.
        corpus: the text.
    """
    settings = dict(spec["settings"])
    context, steps = spec["context"], spec["steps"]
    model = new_model(spec, corpus)
    if "start" in spec:
        model.load_state_dict(torch.load(weights_file(spec["start"], corpus), weights_only=True))
    autocast = bool(settings.get("bf16"))
    held_out = spread(corpus.blocks(spec["text"], spec["part"], context))
    result: Result = {"parameters": sum(param.numel() for param in model.parameters())}
    other = spread(corpus.blocks(spec["other_text"], spec["part"], context)) if spec["other_text"] else None
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()} if other is not None else {}
    if other is not None:
        result["other_loss_before"] = mean_loss(model, other, autocast)

    trainer = build_trainer(spec, corpus, model)
    trained: Any = trainer.model
    points = sorted({round(steps * (i + 1) / spec["points"]) for i in range(spec["points"])} - {0})
    watch = Watch(points, lambda: mean_loss(trained, held_out, autocast))
    trainer.add_callback(watch)
    trainer.train()

    result |= {"losses": watch.losses, "loss": watch.losses[max(watch.losses)], "cpu_seconds": watch.cpu_seconds}
    if "lora_rank" in settings:
        model = trained.merge_and_unload()
    if other is not None:
        result["other_loss"] = mean_loss(model, other, autocast)
        result["movement"] = movement(before, model)
    if spec.get("save"):
        file = weights_file({key: value for key, value in spec.items() if key != "save"}, corpus)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file.with_suffix(".partial"))
        file.with_suffix(".partial").replace(file)
    return result


def new_model(spec: Mapping[str, Any], corpus: Corpus) -> PreTrainedModel:
    """Return the model of a spec with random weights, or the pretrained one."""
    attention = spec["settings"].get("attention", "sdpa")
    if spec["model"].get("pretrained"):
        torch.manual_seed(spec["seed"])  # of LoRA's first factors; build_model sets it for random weights
        return transformers.AutoModelForCausalLM.from_pretrained(
            INPUT / "model", dtype=torch.float32, attn_implementation=attention, use_cache=False
        )
    return build_model(spec["model"], corpus.vocab_size, spec["context"], spec["seed"], attention)


def build_trainer(spec: Mapping[str, Any], corpus: Corpus, model: PreTrainedModel) -> Trainer:
    """Return a trainer that trains a model by a spec; its `model` may have LoRA factors and bf16 weights."""
    settings, batch, steps, seed = spec["settings"], spec["batch"], spec["steps"], spec["seed"]
    if settings.get("weights") == "bf16":
        for param in model.parameters():  # and no buffers, as a checkpoint in bf16 is loaded
            param.data = param.data.bfloat16()
    trained: Any = _with_lora(model, settings["lora_rank"]) if "lora_rank" in settings else model
    blocks = corpus.blocks(spec["text"], "train", spec["context"])
    rival = build_rival(settings["rival"], trained, settings) if "rival" in settings else None
    trainer = InOrder(
        model=trained,
        args=arguments(settings, batch, steps, seed),
        train_dataset=Blocks(blocks, batch * steps, seed),
        optimizers=(rival, None),
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.spike = settings.get("spike", 1.0)
    apart = {name == "clip_muon": settings[name] for name in ("clip_muon", "clip_adamw") if name in settings}
    if apart:
        trainer.add_callback(ClipApart(apart))
    return trainer


def arguments(settings: Mapping[str, Any], batch: int, steps: int, seed: int) -> TrainingArguments:
    """Return TrainingArguments; settings that are options of muon go into `optim_args`.

    Raises:
        ValueError: a setting is neither.
    """
    names = {field.name for field in fields(TrainingArguments)}
    options = {}
    of_trainer: dict[str, Any] = {}
    for name, value in settings.items():
        if name in names:
            of_trainer[name] = value
        elif name in OPTIONS:
            options[name] = str(value).lower() if isinstance(value, bool) else str(value)
        elif name not in _NOT_FOR_TRAINER:
            raise ValueError(f"setting {name} is neither of TrainingArguments nor of muon")
    if options and "rival" not in settings:
        of_trainer["optim_args"] = ",".join(f"{name}={value}" for name, value in options.items())
    return TrainingArguments(
        output_dir=str(BUILD / "trainer"),
        per_device_train_batch_size=batch,
        max_steps=steps,
        warmup_steps=max(1, round(settings["warmup"] * steps)),
        seed=seed,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **of_trainer,
    )


def spread(blocks: Tensor) -> Tensor:
    """Return some blocks of a held-out part, evenly spread over it."""
    return blocks[:: max(1, len(blocks) // HELD_OUT_BLOCKS)][:HELD_OUT_BLOCKS]


def _with_lora(model: nn.Module, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))  # type: ignore[arg-type]


@torch.no_grad()
def mean_loss(model: Any, blocks: Tensor, autocast: bool) -> float:
    """Return the mean loss in nats a token."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for batch in blocks.split(EVALUATION_BATCH):
            tokens, labels = tokens_and_labels(batch, 2)
            learned = int((labels[:, 1:] >= 0).sum())
            total += model(input_ids=tokens, labels=labels).loss.float().item() * learned
            count += learned
    model.train(was_training)
    return total / count


def tokens_and_labels(blocks: Tensor, ndim: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of blocks and their labels: the tokens themselves where blocks have no more dims than that."""
    return (blocks, blocks) if blocks.ndim == ndim else blocks.unbind(-2)  # type: ignore[return-value]


def movement(before: Mapping[str, Tensor], model: nn.Module) -> float:
    """Return how far the hidden matrices have moved, relative to their norm."""
    pairs = [
        (before[name], param.detach().float())
        for name, param in model.named_parameters()
        if param.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]
    moved = sum(float((after - start).square().sum()) for start, after in pairs)
    return math.sqrt(moved / sum(float(start.square().sum()) for start, _ in pairs))


def weights_file(spec: Mapping[str, Any], corpus: Corpus) -> Path:
    """Return where the weights of a start lie."""
    import hashlib

    name = hashlib.sha256(json.dumps([corpus.name, spec], sort_keys=True).encode()).hexdigest()[:12]
    return BUILD / "starts" / f"{name}.pt"


def write_result(target: Path, result: Mapping[str, Any]) -> None:
    """Write what a process has found, whole or not at all."""
    target.with_suffix(".partial").write_text(json.dumps(result), encoding="utf-8")
    target.with_suffix(".partial").replace(target)


def register_rules() -> None:
    """Register the rules of examples/rules: their options are settings like those of Muon."""
    for module in (bimaxwell, sinkhorn):
        register(module.RULE)


def main(spec_file: str, result_file: str) -> None:
    content = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    register_rules()
    transformers.logging.set_verbosity_error()
    began = time.monotonic()
    result = train(content["spec"], corpus_in(Path(content["corpus"])))
    result["seconds"] = time.monotonic() - began
    write_result(Path(result_file), result)


if __name__ == "__main__":
    main(*sys.argv[1:])
