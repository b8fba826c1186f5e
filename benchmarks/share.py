"""Measure the optimizer's share of a training step, by tokens, on a small model, and model it for published models."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from models import MODELS, build, real_config, small_qwen3
from optimizer_step import ADAMW, OURS, TORCH, adamw_step, ours, torch_step
from setting import Row, Setting
from timing import columns, executed_flops, taking_turns

from hf_muon.config import MuonConfig
from hf_muon.plan.step_plan import Plan, plan_step

MEASURED, MODELLED = "measured", "modelled"
SMALL = "Qwen3, small"
TOKENS = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20)


def _small(setting: Setting) -> tuple[Any, int, int, tuple[int, ...]]:
    """Return a Qwen3 config, the length of a sequence, tokens per micro-batch, and the numbers of tokens per step."""
    tokens: tuple[int, ...]
    if setting.quick:
        width, layers, vocabulary, length, at_once, tokens = 32, 1, 64, 16, 32, (32, 64)
    elif setting.on_cpu:
        width, layers, vocabulary, length, at_once, tokens = 256, 4, 8192, 256, 1024, (256, 1024, 2048, 4096)
    else:
        width, layers, vocabulary, length, at_once = 1024, 8, 32768, 1024, 8192
        tokens = (2**10, 2**12, 2**14, 2**16, 2**18)
    return small_qwen3(width, layers, vocabulary), length, at_once, tokens


def _plan(model: Any, setting: Setting) -> Plan:
    return plan_step(model, MuonConfig(), "single", 1, ns_dtype=setting.dtype)


def run(setting: Setting) -> list[Row]:
    """Return the measured rows, with the shares that `hf-muon plan` predicts, and the modelled rows."""
    logging.getLogger("hf_muon").setLevel(logging.ERROR)
    return _measured(setting) + _modelled(setting)


def _measured(setting: Setting) -> list[Row]:
    torch.manual_seed(0)
    config, length, at_once, all_tokens = _small(setting)
    model = build(config).to(setting.device)
    model.train()
    plan = _plan(model, setting)
    half = setting.dtype if setting.on_cpu else torch.bfloat16
    ids = torch.randint(config.vocab_size, (at_once // length, length), device=setting.device)

    def forward_backward(tokens: int) -> None:
        model.zero_grad()
        for start in range(0, tokens, at_once):
            some = ids[: max(1, min(at_once, tokens - start) // length)]
            with torch.autocast(setting.device.type, torch.bfloat16, enabled=not setting.on_cpu):
                loss = model(input_ids=some, labels=some).loss
            loss.backward()

    forward_backward(all_tokens[0])
    copies = {side: copy.deepcopy(model) for side in (OURS, TORCH, ADAMW)}
    steps = {
        OURS: ours(copies[OURS]).step,
        TORCH: torch_step(copies[TORCH], half),
        ADAMW: adamw_step(copies[ADAMW]),
    }
    rows: list[Row] = []
    for copied in copies.values():
        for param in copied.parameters():
            param.grad = torch.randn_like(param)
    executed = executed_flops(steps[OURS])
    per_token: dict[str, float] = {}
    for place, tokens in enumerate(all_tokens, 1):
        calls = {"model": lambda tokens=tokens: forward_backward(tokens), **steps}
        times = taking_turns(calls, setting.clock, max(3, setting.rounds - 2) if not setting.quick else 1)
        for side in steps:
            shares = [own / (own + rest) for own, rest in zip(times[side], times["model"], strict=True)]
            row: Row = {
                "kind": MEASURED,
                "model": SMALL,
                "tokens": tokens,
                "side": side,
                **columns("share", shares),
                **columns("step ms", [1e3 * seconds for seconds in times[side]]),
                **columns("forward and backward ms", [1e3 * seconds for seconds in times["model"]]),
            }
            # Extrapolate from the smallest step: time in the model grows with tokens, the optimizer's time does not.
            per_token.setdefault(side, row["forward and backward ms"] / tokens / row["step ms"])
            row["from smallest"] = 1 / (1 + per_token[side] * tokens)
            if side == OURS:
                row |= {
                    "plan": plan.share(tokens),
                    "planned gflop": max(plan.flops) / 1e9,
                    "gflop": executed / 1e9,
                }
            rows.append(row)
        shares_of_sides = ", ".join(f"{row['side']} {row['share']:.1%}" for row in rows[-len(steps) :])
        setting.say(f"share {place}/{len(all_tokens)}  {tokens} tokens a step: {shares_of_sides}")
    return rows


def _modelled(setting: Setting) -> list[Row]:
    rows: list[Row] = []
    names = ["Qwen3-0.6B"] if setting.quick else list(MODELS)
    for name in names:
        with torch.device("meta"):
            model = build(real_config(name))
        plan = _plan(model, setting)
        for tokens in TOKENS:
            rows.append({"kind": MODELLED, "model": name, "tokens": tokens, "side": OURS, "plan": plan.share(tokens)})
        least, most = plan.share(TOKENS[-1]), plan.share(TOKENS[0])
        setting.say(f"share  {name} modelled: {most:.0%} at 1k tokens a step, {least:.2%} at 1M")
    return rows
