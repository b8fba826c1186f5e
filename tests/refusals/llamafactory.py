"""Arguments of LLaMA-Factory v0 and v1, on stand-ins; `tests/e2e` runs the real ones."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hf_muon.integrations.llamafactory.v0 import MEGATRON, RIVALS, check_arguments
from hf_muon.integrations.llamafactory.v1 import config_from, refuse_unsupported
from tests.integrations.llamafactory_v1_stand_ins import ARGUMENTS, LAYOUTS, NEW, OLD
from tests.refusals import table
from tests.support.hooks import imported


def parsed(optim: str = "muon", *, do_train: bool = True, optim_args: Any = None, **finetuning: Any) -> None:
    training = SimpleNamespace(optim=optim, do_train=do_train, optim_args=optim_args)
    check_arguments((training, SimpleNamespace(**{"finetuning_type": "full", "stage": "sft", **finetuning})))


def only_with_muon(option: str, optim: str = "muon") -> Any:
    """Return an attempt with an option, which another optimizer may have, and which may be off."""

    def attempt() -> None:
        parsed("adamw_torch", **{option: True})
        parsed(optim, **{option: False})
        parsed(optim, **{option: True})

    return attempt


def lora_alone() -> None:
    lora: dict[str, Any] = {"finetuning_type": "lora"}
    for change in (
        {"optim": "adamw_torch"},
        {"finetuning_type": "full"},
        {"finetuning_type": "freeze"},
        {"additional_target": "embed_tokens"},
        {"stage": "rm"},
        {"optim_args": "lora=muon"},
        {"optim_args": {"muon_patterns": "lora_A"}},
        {"do_train": False},
    ):
        parsed(**(lora | change))
    parsed(optim_args="momentum=0.9", **lora)


def v1_arguments(layout: str, **options: Any) -> Any:
    def attempt(monkeypatch: pytest.MonkeyPatch) -> None:
        path, registry, arguments = LAYOUTS[layout]
        sources = {{OLD: NEW, NEW: OLD}[path]: None, path: registry, ARGUMENTS: arguments}
        imported(monkeypatch, sources)
        sys.modules[ARGUMENTS].TrainingArguments(optim_config=options)

    return attempt


def v1_options(**options: Any) -> Any:
    return lambda: config_from({"name": "muon", "lr": 1e-3, **options})


def v1_layout(**args: Any) -> Any:
    return lambda: refuse_unsupported(SimpleNamespace(**args))


V0, OPTIONS, LAYOUT = "LLaMA-Factory", "v1 optim_config", "v1 dist_config"
NAMES = ("muon", "hf_muon")
CASES = [
    *table(
        [
            *(("rival-optimizer", V0, only_with_muon(x, name), f"{x}: true") for x in RIVALS for name in NAMES),
            (
                "lora-without-muon",
                V0,
                lora_alone,
                '^Keep .*optim: adamw_torch.*finetuning_type: full;.* optim_args: "lora=muon"',
            ),
            *(
                ("unknown-option", f"v1 {x}", v1_arguments(x, name=name, momentun=0.9), "'momentum'")
                for x in LAYOUTS
                for name in NAMES
                if (x, name) != ("newer", "muon")  # which is LLaMA-Factory's own
            ),
            ("unknown-option", OPTIONS, v1_options(beta=1), "'beta'"),
            ("unknown-option", OPTIONS, v1_options(wd=0.1, weight_decay=0.2), "'wd'"),
            ("invalid-value", OPTIONS, v1_options(ns_steps=0), "ns_steps=0"),
            ("invalid-value", OPTIONS, v1_options(weight_decay=-1), "weight_decay=-1"),
            ("cp-without-fsdp2", LAYOUT, v1_layout(dist_config=None, cp_size=2), "cp_size: 2"),
            ("cp-without-fsdp2", LAYOUT, v1_layout(dist_config={"name": "other", "cp_size": 4}), "cp_size: 4"),
        ]
    ),
    *table(
        [
            *(("rival-trainer", V0, only_with_muon(x), f"{variable}=1") for x, (variable, _) in MEGATRON.items()),
            ("hyper-parallel", V0, only_with_muon("use_hyper_parallel")),
            ("unsupported-layout", LAYOUT, v1_layout(dist_config={"name": "deepspeed"}), "deepspeed"),
            ("unsupported-layout", LAYOUT, v1_layout(dist_config={"name": "fsdpturbo"}, cp_size=1), "fsdpturbo"),
        ],
        error=RuntimeError,
    ),
]
