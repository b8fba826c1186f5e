"""`hf-muon inspect` of training files whose runs `optim: muon` refuses."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.calls import call
from tests.refusals import Refusal
from tests.refusals.commands import CONFIG

ZERO3 = {"zero_optimization": {"stage": 3}}
FSDP1 = {"fsdp": True, "fsdp_config": {"version": 1}}
SP = {"parallelism_config": {"sp_size": 2}}
FULL = {"finetuning_type": "full"}
FILES: list[tuple[dict[str, Any], str, str]] = [
    ({"deepspeed": "lost.json"}, "unreadable-deepspeed-config", "lost.json, seen from "),
    ({"deepspeed": "not even a path"}, "unreadable-deepspeed-config", "not even a path"),
    ({"deepspeed": 3}, "unreadable-deepspeed-config", "deepspeed: 3"),
    ({"deepspeed": {**ZERO3, "optimizer": {"type": "AdamW"}}}, "optimizer-in-config", r"\(AdamW\)"),
    ({"deepspeed": {**ZERO3, "optimizer": {}, "expert_parallel": {}}}, "optimizer-in-config expert-parallel", ""),
    ({"deepspeed": ZERO3, "optim_args": "momentum_dtype=int8"}, "int8-partition", "momentum_dtype=int8"),
    ({"deepspeed": ZERO3, "optim_args": "adamw_state_dtype=int8"}, "int8-partition", "adamw_state_dtype=int8"),
    ({"deepspeed": {**ZERO3, "scheduler": {}}, "optim_args": "adamw_lr=1e-5"}, "scheduler-in-config", "and 1e-05"),
    ({**FULL, "use_muon": True}, "rival-optimizer", "use_muon"),
    ({**FULL, "use_muon": True, "optim": "hf_muon"}, "rival-optimizer", "use_muon"),
    ({**FULL, "use_galore": True}, "rival-optimizer", "use_galore"),
    ({**FULL, "use_hyper_parallel": True}, "hyper-parallel", ""),
    (FSDP1, "fsdp1", ""),
    ({"fsdp": True, "fsdp_config": {"version": 2, "xla": True}}, "unsupported-layout", "XLA"),
    ({"fsdp": True, "fsdp_config": "lost.json"}, "training-arguments", "'lost.json'.*: fsdp, fsdp_config"),
    ({"fsdp": [1]}, "training-arguments", "take: fsdp"),
    ({"parallelism_config": {"cp_size": 2}}, "unsupported-layout", "cp_size"),
    (SP, "sp-without-deepspeed", "sp_size"),
    ({**SP, "deepspeed": ZERO3, "label_smoothing_factor": 0.1}, "label-smoothing", ""),
    (
        {**FULL, "use_muon": True, "deepspeed": "lost.json", **FSDP1},
        "rival-optimizer unreadable-deepspeed-config fsdp1",
        "",
    ),
    ({"optim_target_modules": ["mlp"]}, "target-modules", r"\['mlp'\]"),
    ({"optim": "muonn"}, "unknown-optimizer", "did you mean muon"),
    ({"optim_args": "momentun=0.9"}, "unknown-option", "run.yaml: 'momentun'"),
    ({"optim_args": "beta1=0.9"}, "unknown-option", "mean 'adamw_betas'.*docs/options.md of the repository"),
    ({"optim_args": "qk_clip=100"}, "normalized-attention", "q_norm"),
    ({**FSDP1, "optim_args": "qk_clip=100"}, "fsdp1 normalized-attention", ""),
]
LORA, FREEZE = {"finetuning_type": "lora", "optim_args": "lora=muon"}, {"finetuning_type": "freeze"}
FILES_WITH_LLAMAFACTORY: list[tuple[dict[str, Any], str, str]] = [
    ({"finetuning_type": "lora"}, "lora-without-muon", ""),
    ({**LORA, "lora_target": "nothing_like_it"}, "program-refuses", "nothing_like_it"),
    ({**LORA, "lora_rank": "many"}, "program-refuses", "TypeError"),
    ({**LORA, "adapter_name_or_path": "nowhere"}, "program-refuses", "nowhere"),
    ({**FREEZE, "freeze_trainable_layers": "many"}, "program-refuses", "TypeError"),
    ({**FREEZE, "freeze_trainable_modules": "mlp,nonsense"}, "program-refuses", "nonsense.*choose from"),
    ({**FULL, "resize_voacb": True}, "program-refuses", "resize_voacb"),
    ({**FULL, "use_unsloth": True}, "program-missing", "unsloth"),
]
FILES_WITH_TRL: list[tuple[dict[str, Any], str, str]] = [
    ({"finetuning_type": "lora"}, "program-missing", "LLaMA-Factory"),
    ({"use_peft": True, "lora_r": "many"}, "program-refuses", "--lora_r.*'many'"),
    ({"use_peft": True, "lora_target_modules": ["nothing_like_it"]}, "program-refuses", "nothing_like_it"),
]
# Of LLaMA-Factory v1.
FILES_V1: list[tuple[dict[str, Any], str, str]] = [
    ({"dist_config": {"name": "deepspeed"}}, "unsupported-layout", "dist_config: deepspeed"),
    ({"cp_size": 2}, "cp-without-fsdp2", "cp_size: 2 "),
    ({"cp_size": [1]}, "invalid-value", r"cp_size: \[1\]"),
    ({"dist_config": "fsdp2"}, "not-a-mapping", r"dist_config: \{name: fsdp2\}"),
    ({"optim_config": {"name": "muon", "momentun": 0.9}}, "unknown-option", "'momentun'"),
    ({"optim_config": "muon"}, "not-a-mapping", r"optim_config: \{name: muon\}"),
]


def inspected(given: Path) -> str:
    """Return what a command writes to stderr; its JSON has the same reasons, and the environment stays."""
    environment = dict(os.environ)
    result = call("inspect", given / "run.yaml", "--json")
    assert result.exit_code == 1
    assert all(line in result.stderr for line in json.loads(result.stdout or '{"refused": []}')["refused"])
    assert dict(os.environ) == environment
    return result.stderr


def of(*row: Any, v1: bool = False, marks: Any = ()) -> Refusal:
    """Return the case of a training file beside the configuration of a small Qwen3."""
    keys, code, says = row

    def given(tmp_path: Path) -> Path:
        CONFIG.save_pretrained(tmp_path)
        own = {"model": str(tmp_path), "optim_config": {"name": "muon"}}
        own = own if v1 else {"model_name_or_path": str(tmp_path), "optim": "muon"}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**own, **keys}))
        return tmp_path

    return Refusal(code, "hf-muon inspect", inspected, given=given, says=says, name="v1" if v1 else "", marks=marks)


def with_megatron(given: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("USE_MCA", "1")
    return inspected(given)


MEGATRON = dataclasses.replace(of({"finetuning_type": "full"}, "rival-trainer", "USE_MCA"), attempt=with_megatron)
CASES = [
    *(of(*row) for row in FILES),
    *(of(*row, marks=[pytest.mark.llamafactory]) for row in FILES_WITH_LLAMAFACTORY),
    *(of(*row) for row in FILES_WITH_TRL),
    *(of(*row, v1=True) for row in FILES_V1),
    of({"peft_config": {"name": "lora"}}, "lora-without-muon", "", v1=True, marks=[pytest.mark.llamafactory]),
    of({"peft_config": {"name": "lora"}}, "program-missing", "v1", v1=True),
    MEGATRON,
]
