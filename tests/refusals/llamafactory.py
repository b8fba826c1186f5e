"""Arguments of LLaMA-Factory v0 and v1, on stand-ins; `tests/e2e` runs the real ones."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hf_muon.integrations.llamafactory.v0 import MEGATRON, RIVALS, check_arguments
from hf_muon.integrations.llamafactory.v1 import config_from, refuse_unsupported
from tests.hooks import imported
from tests.integrations.llamafactory_v1_stand_ins import ARGUMENTS, LAYOUTS, NEW, OLD
from tests.refusals import Refusal


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


def v1_options(code: str, says: str, **options: Any) -> Refusal:
    attempt = lambda: config_from({"name": "muon", "lr": 1e-3, **options})  # noqa: E731
    return Refusal(code, "v1 optim_config", attempt, says=says, name=says.partition("=")[0].strip("'"))


def v1_layout(code: str, error: type[Exception], says: str, **args: Any) -> Refusal:
    return Refusal(
        code, "v1 dist_config", lambda: refuse_unsupported(SimpleNamespace(**args)), error, says=says, name=says
    )


CASES = [
    *(
        Refusal(
            "rival-optimizer",
            "LLaMA-Factory",
            only_with_muon(rival, name),
            says=f"{rival}: true",
            name=f"{rival} {name}",
        )
        for rival in RIVALS
        for name in ("muon", "hf_muon")
    ),
    *(
        Refusal(
            "rival-trainer", "LLaMA-Factory", only_with_muon(option), RuntimeError, says=f"{variable}=1", name=option
        )
        for option, (variable, _) in MEGATRON.items()
    ),
    Refusal("hyper-parallel", "LLaMA-Factory", only_with_muon("use_hyper_parallel"), RuntimeError),
    Refusal("lora-without-muon", "LLaMA-Factory", lora_alone, says='finetuning_type: full .* optim_args: "lora=muon"'),
    *(
        Refusal(
            "unknown-option",
            f"v1 {layout}",
            v1_arguments(layout, name=name, momentun=0.9),
            says="'momentum'",
            name=name,
        )
        for layout in LAYOUTS
        for name in ("muon", "hf_muon")
    ),
    v1_options("unknown-option", "'beta'", beta=1),
    v1_options("unknown-option", "'wd'", wd=0.1, weight_decay=0.2),
    v1_options("invalid-value", "ns_steps=0", ns_steps=0),
    v1_options("invalid-value", "weight_decay=-1", weight_decay=-1),
    v1_layout("cp-without-fsdp2", ValueError, "cp_size: 2", dist_config=None, cp_size=2),
    v1_layout("cp-without-fsdp2", ValueError, "cp_size: 4", dist_config={"name": "other", "cp_size": 4}),
    v1_layout("unsupported-layout", RuntimeError, "deepspeed", dist_config={"name": "deepspeed"}),
    v1_layout("unsupported-layout", RuntimeError, "fsdpturbo", dist_config={"name": "fsdpturbo"}, cp_size=1),
]
