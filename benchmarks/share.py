"""Measure the optimizer's share of a training step, by tokens, on a small model, and model it for published models."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from benchmarks.measure import Row, Setting, columns, executed_flops, taking_turns
from benchmarks.models import MODELS, build, config_of, small_qwen3
from benchmarks.optimizer_step import ADAMW, OURS, TORCH, adamw_step, give_gradients, ours, torch_step
from hf_muon.config import MuonConfig
from hf_muon.plan.step_plan import Plan, plan_step

TOKENS = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20)


def _small(setting: Setting) -> tuple[Any, int, int, tuple[int, ...]]:
    """Return a Qwen3 config, the length of a sequence, tokens per micro-batch, and the numbers of tokens per step."""
    if setting.quick:
        return small_qwen3(32, 1, 64), 16, 32, (32, 64)
    if setting.on_cpu:
        return small_qwen3(256, 4, 8192), 256, 1024, (256, 1024, 2048, 4096)
    return small_qwen3(1024, 8, 32768), 1024, 8192, (2**10, 2**12, 2**14, 2**16, 2**18)


def _plan(model: Any, setting: Setting) -> Plan:
    return plan_step(model, MuonConfig(), "single", 1, ns_dtype=setting.dtype)


def run(setting: Setting) -> list[Row]:
    """Return measured rows, with the shares that `hf-muon plan` predicts, and modelled rows."""
    logging.getLogger("hf_muon").setLevel(logging.ERROR)
    return _measured(setting) + _modelled(setting)


def _measured(setting: Setting) -> list[Row]:
    torch.manual_seed(0)
    config, length, at_once, all_tokens = _small(setting)
    model = build(config).to(setting.device).train()
    plan = _plan(model, setting)
    ids = torch.randint(config.vocab_size, (at_once // length, length), device=setting.device)

    def forward_backward(tokens: int) -> None:
        model.zero_grad()
        for start in range(0, tokens, at_once):
            some = ids[: max(1, min(at_once, tokens - start) // length)]
            with torch.autocast(setting.device.type, torch.bfloat16, enabled=not setting.on_cpu):
                loss = model(input_ids=some, labels=some).loss
            loss.backward()

    copies = [copy.deepcopy(model) for _ in range(3)]
    give_gradients(copies)
    steps = {
        OURS: ours(copies[0]).step,
        TORCH: torch_step(copies[1], setting.half),
        ADAMW: adamw_step(copies[2]),
    }
    executed = executed_flops(steps[OURS])
    per_token: dict[str, float] = {}
    rows: list[Row] = []
    for place, tokens in enumerate(all_tokens, 1):
        calls = {"model": lambda tokens=tokens: forward_backward(tokens), **steps}
        times = taking_turns(calls, setting.clock, 1 if setting.quick else max(3, setting.rounds - 2))
        for side in steps:
            shares = [own / (own + rest) for own, rest in zip(times[side], times["model"], strict=True)]
            row: Row = {
                "kind": "measured",
                "model": "Qwen3, small",
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
                row |= {"plan": plan.share(tokens), "planned gflop": max(plan.flops) / 1e9, "gflop": executed / 1e9}
            rows.append(row)
        found = ", ".join(f"{row['side']} {row['share']:.1%}" for row in rows[-len(steps) :])
        setting.say(f"share {place}/{len(all_tokens)}  {tokens} tokens a step: {found}")
    return rows


def _modelled(setting: Setting) -> list[Row]:
    rows: list[Row] = []
    for name in ["Qwen3-0.6B"] if setting.quick else MODELS:
        with torch.device("meta"):
            model = build(config_of(MODELS[name]))
        plan = _plan(model, setting)
        rows += [
            {"kind": "modelled", "model": name, "tokens": tokens, "side": OURS, "plan": plan.share(tokens)}
            for tokens in TOKENS
        ]
    return rows
