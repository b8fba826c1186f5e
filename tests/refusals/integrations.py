"""Runs of Trainer, param groups as other programs make them, and batches and models under Ulysses."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import HfArgumentParser, MistralConfig, Qwen3Config, Trainer, TrainingArguments

from hf_muon import Muon, MuonOfGroups, _autoload
from hf_muon.integrations.transformers.run_refusals import (
    refuse_failed_hooks,
    refuse_fp8_weights,
    refuse_parts_of_sequences,
)
from hf_muon.integrations.ulysses import batches, gradients, refusals
from tests.integrations import plain_script
from tests.integrations.trainer_runs import arguments, lora, train
from tests.refusals import Refusal, error_of, table
from tests.rules.attention_models import make


def model() -> nn.Module:
    return plain_script.model()


def asked(tmp_path: Any, network: nn.Module | None = None, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Ask Trainer for the optimizer of a run whose arguments are changed when they are there."""
    args = arguments(tmp_path)
    for name, value in changes.items():
        setattr(args, name, value)
    return Trainer.get_optimizer_cls_and_kwargs(args, network)


def environment(**variables: str) -> Any:
    def attempt(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        asked(tmp_path, model())

    return attempt


def fsdp1_of_the_arguments(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # transformers would set it as a side effect
    args = arguments(tmp_path, fsdp="full_shard auto_wrap", fsdp_config={"version": 1})
    Trainer.get_optimizer_cls_and_kwargs(args, model())


def plain_shards(tmp_path: Any) -> None:
    network = model()
    network._tp_size = 2
    asked(tmp_path, network)


def deepspeed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert Trainer.get_optimizer_cls_and_kwargs(args, model())  # of a config with nothing in it
    args.deepspeed_plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"mics_shard_size": 2}})
    Trainer.get_optimizer_cls_and_kwargs(args, model())


def parallel(**sizes: int) -> Any:
    return lambda tmp_path: asked(tmp_path, parallelism_config=SimpleNamespace(**sizes))


def failed_hook(hook: str, fsdp: str | None = None, **sizes: int) -> Any:
    """Attempt a run that rests on a hook which has failed; one that does not rest on it is let through."""

    def attempt(monkeypatch: pytest.MonkeyPatch) -> None:
        args = SimpleNamespace(fsdp=fsdp, parallelism_config=SimpleNamespace(**sizes))
        refuse_failed_hooks(args)
        monkeypatch.setitem(_autoload._states, hook, "failed: AttributeError: gone")
        if fsdp or sizes:
            refuse_failed_hooks(SimpleNamespace(fsdp=None, parallelism_config=None))
        refuse_failed_hooks(args)

    return attempt


def old(package: str, version: str) -> Any:
    """Return attempts from Python and from the command line; another optimizer runs with these versions."""

    def attempt(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        installed = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else installed(name))
        assert arguments(tmp_path, optim="adamw_torch")
        line = ["--output_dir", str(tmp_path), "--optim", "muon", "--use_cpu", "true"]
        parser = HfArgumentParser(TrainingArguments)
        return [error_of(lambda: arguments(tmp_path)), error_of(lambda: parser.parse_args_into_dataclasses(line))]

    return attempt


def gathered_in_fp8() -> None:
    config = SimpleNamespace(enable_fsdp_float8_all_gather=True)
    refuse_fp8_weights(SimpleNamespace(ao_recipe_handler=SimpleNamespace(config=config)))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.table(input_ids).square().mean()}


def of_arguments(**options: Any) -> Any:
    return lambda tmp_path: arguments(tmp_path, **options)


def of_training(**options: Any) -> Any:
    return lambda given, tmp_path: train(given, tmp_path, **options)


def old_peft(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for adapters with an old peft; a run without adapters does not need it."""
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0" if name == "peft" else installed(name))
    assert asked(tmp_path, model())
    asked(tmp_path, lora())


LAUNCH, ARGUMENTS, TRAINER, PARALLEL = "accelerate launch", "TrainingArguments", "Trainer", "ParallelismConfig"
SHARED = SimpleNamespace(parallelism_config=SimpleNamespace(sp_size=2))
HOOKS: dict[str, dict[str, Any]] = {
    "Ulysses": {"sp_size": 2},
    "batches of Ulysses": {"sp_size": 2},
    "whole states": {"fsdp": "full_shard"},
    "callback of Trainer": {},
}
OLD = [
    *(("transformers", version) for version in ("4.57.6", "5.1.0.dev0", "5.5.3")),
    ("accelerate", "1.10.1"),
]
RUNS = [
    *table(
        [
            ("fsdp1", LAUNCH, environment(ACCELERATE_USE_FSDP="true")),
            ("fsdp1", LAUNCH, environment(ACCELERATE_USE_FSDP="true", FSDP_VERSION="1")),
            ("fsdp1", ARGUMENTS, fsdp1_of_the_arguments),
            ("plain-shards", TRAINER, plain_shards, " 2 ranks"),
            ("mics", TRAINER, deepspeed),
            ("unsupported-layout", LAUNCH, environment(ACCELERATE_USE_MEGATRON_LM="true"), "Megatron-LM"),
            ("unsupported-layout", PARALLEL, parallel(cp_size=2), "cp_size"),
            ("sp-without-deepspeed", PARALLEL, parallel(sp_size=2), "sp_size"),
            ("qk-clip-under-sp", TRAINER, lambda: refuse_parts_of_sequences(SHARED, 100.0), "qk_clip=100"),
            *(("hook-not-in-place", TRAINER, failed_hook(hook, **own), f"'{hook}'") for hook, own in HOOKS.items()),
            *(("too-old", ARGUMENTS, old(package, version), version) for package, version in OLD),
            ("too-old", TRAINER, old_peft, "0.17.0"),
        ],
        error=RuntimeError,
    ),
    *table(
        [
            ("target-modules", ARGUMENTS, of_arguments(optim_target_modules=["mlp"]), "mlp"),
            ("unknown-option", ARGUMENTS, of_arguments(optim_args="moment=0.9"), "'moment'.*'momentum'"),
            ("unknown-option", ARGUMENTS, of_arguments(optim_args={"momentun": 0.8}), "'momentun'.*'momentum'"),
            ("not-name-value", ARGUMENTS, of_arguments(optim_args="momentum")),
            ("invalid-value", ARGUMENTS, of_arguments(optim_args="ns_steps=many"), "ns_steps=many"),
            ("invalid-value", ARGUMENTS, of_arguments(optim_args="momentum=1"), "momentum=1.0"),
        ]
    ),
    Refusal("lora-without-muon", TRAINER, of_training(), given=lora),
    Refusal("normalized-attention", TRAINER, of_training(optim_args="qk_clip=100"), given=lambda: make("qwen3")),
    Refusal("matches-nothing", TRAINER, of_training(optim_args="adamw_patterns=router"), given=model, says="'router'"),
    Refusal("nothing-for-muon", TRAINER, of_training(), given=Bag, says="Bag"),
    Refusal("unknown-tensor-class", "a dry run", gathered_in_fp8, RuntimeError, says="float8_all_gather=False"),
]


# --- param groups


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 30))


def with_strangers(tmp_path: Any) -> list[str]:
    network = model()
    cls, kwargs = asked(tmp_path, network)
    groups = [{"params": [*network.parameters(), nn.Parameter(torch.randn(3, 4))]}]
    ways = (lambda: cls(groups, **kwargs), lambda: cls()(network, optimizer_dict=groups, **kwargs))
    return [error_of(way) for way in ways]


def of_model(cls_to_groups: Any) -> Any:
    """Return an attempt with the class that Trainer returns, the other arguments, and a model."""

    def attempt(given: nn.Module, tmp_path: Any) -> None:
        cls, kwargs = asked(tmp_path, given)
        cls_to_groups(cls, kwargs, given)

    return attempt


def of_class(**group: Any) -> Any:
    return of_model(lambda cls, own, net: cls([{"params": list(net.parameters()), **group}], **own))


def several_rates(**options: float) -> Any:
    def attempt(given: nn.Sequential) -> None:
        groups = [{"params": list(given[0].parameters()), "lr": 1e-5}, {"params": list(given[1:].parameters())}]
        groups[1] |= {"lr": 2e-5} if "muon_lr" in options else {}
        MuonOfGroups(groups, model=given, **options)

    return attempt


def twice(**names: Any) -> Any:
    return lambda given: MuonOfGroups([{"params": list(given.parameters()), **names}])


def only_default(key: str, where: str) -> Any:
    def attempt(given: nn.Sequential) -> None:
        if where == "model":
            MuonOfGroups(given.parameters(), **{key: True})
        else:
            MuonOfGroups([{"params": [given[0].weight], key: True}])

    return attempt


BETAS = {"betas": (0.9, 0.95), "adamw_betas": (0.9, 0.95)}
CLASS, OF_GROUPS = "Trainer's class", "MuonOfGroups"
DEFAULTS = ("capturable", "differentiable", "maximize", "amsgrad")
GROUPS = [
    Refusal("no-live-model", CLASS, with_strangers, RuntimeError, says=r"1 of .*\(3, 4\)"),
    *table(
        [
            ("not-for-muon", CLASS, of_class(use_muon=True), "model.embed_tokens.weight"),
            ("unknown-option", CLASS, of_class(nesterof=True), "'nesterof'"),
            ("unknown-option", CLASS, of_model(lambda cls, own, net: cls()(net, nesterof=True, **own)), "'nesterof'"),
            (
                "unknown-option",
                CLASS,
                of_model(lambda cls, own, net: cls([{"params": list(net.parameters())}], nesterof=True, **own)),
                "'nesterof'",
            ),
        ],
        given=model,
    ),
    *table(
        [
            ("one-rate-for-several", OF_GROUPS, several_rates(muon_lr=1e-4), r"muon_lr=0.0001 .*1e-05, 2e-05"),
            ("one-rate-for-several", OF_GROUPS, several_rates(muon_lr=1e-4, lr=0.0)),
            ("one-rate-for-several", OF_GROUPS, several_rates(adamw_lr=1e-4), r"adamw_lr=0.0001 .*1e-05, none"),
            ("given-twice", OF_GROUPS, twice(**BETAS)),
            ("given-twice", OF_GROUPS, twice(eps=1e-8, adamw_eps=1e-8), "eps"),
            *(
                ("only-default", f"{OF_GROUPS} of a {where}", only_default(key, where), f"{key}=True")
                for key in DEFAULTS
                for where in ("model", "group")
            ),
        ],
        given=layers,
    ),
]


# --- Ulysses


def ignored_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    refusals.refuse_ignored_size()
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    refusals.refuse_ignored_size()


def gloo() -> None:
    refusals.refuse_groups_of_gloo(torch.device("cpu"), 2, 2)
    refusals.refuse_groups_of_gloo(torch.device("cuda"), 4, 2)
    refusals.refuse_groups_of_gloo(torch.device("cpu"), 4, 2)


def with_layers(kind: str) -> Any:
    return lambda: Qwen3Config(layer_types=[kind] * 32)


def of_model_config(config: Any, implementation: str) -> Any:
    return lambda: list(refusals.model_complaints(config(), implementation))


def of_batch(**rows: Any) -> Any:
    return lambda: {"input_ids": torch.zeros(2, 4, dtype=torch.long), **rows}


def dividing(without: str) -> Any:
    """Return an attempt with an engine that does not say by what it divides gradients."""

    def attempt() -> None:
        zero, engine = (SimpleNamespace(sequence_parallel_size=2) for _ in range(2))
        vars(engine).update(optimizer=zero, zero_optimization=lambda: True, mpu=SimpleNamespace())
        engine.mpu.initialize_sequence_parallel = None
        del (engine if without == "engine" else zero).sequence_parallel_size
        gradients.average_over_all_ranks(engine, Muon([layers()[0].weight]))

    return attempt


def two_muons() -> None:
    muons = [Muon([layers()[0].weight]) for _ in range(2)]
    Accelerator.prepare(SimpleNamespace(distributed_type=SimpleNamespace(value="DEEPSPEED")), *muons)  # type: ignore[arg-type]


MODEL, BATCH = "Ulysses' model", "Ulysses' batch"
ULYSSES = [
    *table(
        [
            ("ignored-sp-size", "Ulysses", ignored_size, "PARALLELISM_CONFIG_SP_SIZE=2"),
            ("groups-of-gloo", "Ulysses", gloo, "2 and 4"),
            ("several-muons", "Accelerator.prepare", two_muons, "2 Muon"),
            ("unknown-sp-gradients", "Ulysses", dividing("engine")),
            ("unknown-sp-gradients", "Ulysses", dividing("optimizer")),
        ],
        error=RuntimeError,
    ),
    *table(
        [
            ("sliding-window", MODEL, of_model_config(lambda: MistralConfig(sliding_window=8), "sdpa")),
            ("layers-across-ranks", MODEL, of_model_config(with_layers("chunked_attention"), "flash_attention_2")),
            ("layers-across-ranks", MODEL, of_model_config(with_layers("linear_attention"), "sdpa")),
            ("dropped-mask", MODEL, of_model_config(Qwen3Config, "flex_attention")),
        ]
    ),
    *table(
        [
            ("packed-texts", BATCH, of_batch(position_ids=torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]))),
            ("left-padding", BATCH, of_batch(attention_mask=torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]))),
            ("dropped-mask", BATCH, of_batch(attention_mask=torch.ones(1, 1, 4, 4))),
        ],
        attempt=lambda given: batches.complete(given, "sdpa"),
    ),
]
CASES = [*RUNS, *GROUPS, *ULYSSES]
