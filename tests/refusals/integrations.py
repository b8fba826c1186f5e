"""Runs of Trainer, param groups as other programs make them, and batches and models under Ulysses."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import HfArgumentParser, MistralConfig, Qwen3Config, Trainer, TrainingArguments

from hf_muon import MuonOfGroups, _autoload
from hf_muon.integrations.timm import muon_of_groups
from hf_muon.integrations.transformers.refusals import refuse_failed_hooks, refuse_parts_of_sequences
from hf_muon.integrations.ulysses import batches, refusals
from tests.integrations import plain_script, trainer_runs
from tests.integrations.trainer_runs import arguments, train
from tests.refusals import Refusal
from tests.rules.attention_models import make


def model() -> nn.Module:
    return plain_script.model()


def lora() -> nn.Module:
    return trainer_runs.lora()


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
        texts = []
        for parse in (
            lambda: arguments(tmp_path),
            lambda: HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line),
        ):
            with pytest.raises(RuntimeError) as error:
                parse()
            texts.append(str(error.value))
        return texts

    return attempt


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.table(input_ids).square().mean()}


def of_arguments(code: str, name: str = "", says: str = "", **options: Any) -> Refusal:
    """Return the refusal of TrainingArguments, before there is a model."""
    return Refusal(code, "TrainingArguments", lambda tmp_path: arguments(tmp_path, **options), says=says, name=name)


def of_training(code: str, network: Any, says: str = "", **options: Any) -> Refusal:
    attempt = lambda given, tmp_path: train(given, tmp_path, **options)  # noqa: E731
    return Refusal(code, "Trainer.train", attempt, given=network, says=says)


TRAINER = [
    Refusal("fsdp1", "Trainer under accelerate launch", environment(ACCELERATE_USE_FSDP="true"), RuntimeError),
    Refusal(
        "fsdp1",
        "Trainer under accelerate launch",
        environment(ACCELERATE_USE_FSDP="true", FSDP_VERSION="1"),
        RuntimeError,
        name="said",
    ),
    Refusal("fsdp1", "TrainingArguments.fsdp", fsdp1_of_the_arguments, RuntimeError),
    Refusal("plain-shards", "Trainer", plain_shards, RuntimeError, says=" 2 ranks"),
    Refusal("mics", "Trainer under DeepSpeed", deepspeed, RuntimeError),
    Refusal(
        "unsupported-layout",
        "Trainer under accelerate launch",
        environment(ACCELERATE_USE_MEGATRON_LM="true"),
        RuntimeError,
        says="Megatron-LM",
    ),
    Refusal("unsupported-layout", "ParallelismConfig", parallel(cp_size=2), RuntimeError, says="cp_size"),
    Refusal("sp-without-deepspeed", "ParallelismConfig", parallel(sp_size=2), RuntimeError, says="sp_size"),
    *(
        Refusal("hook-not-in-place", "Trainer", failed_hook(hook, **needs), RuntimeError, says=f"'{hook}'", name=hook)
        for hook, needs in {
            "Ulysses": {"sp_size": 2},
            "batches of Ulysses": {"sp_size": 2},
            "whole states": {"fsdp": "full_shard"},
            "callback of Trainer": {},
        }.items()
    ),
    *(
        Refusal("too-old", "TrainingArguments", old(package, version), says=version, name=f"{package} {version}")
        for package, version in (
            ("transformers", "4.57.6"),
            ("transformers", "5.1.0.dev0"),
            ("transformers", "5.5.3"),
            ("accelerate", "1.10.1"),
            ("peft", "0.17.0"),
        )
    ),
    of_arguments("target-modules", says="mlp", optim_target_modules=["mlp"]),
    of_arguments("unknown-option", "text", "'moment'.*'momentum'", optim_args="moment=0.9"),
    of_arguments("unknown-option", "mapping", "'momentun'.*'momentum'", optim_args={"momentun": 0.8}),
    of_arguments("not-name-value", optim_args="momentum"),
    of_arguments("invalid-value", "unreadable", "ns_steps=many", optim_args="ns_steps=many"),
    of_arguments("invalid-value", "too large", "momentum=1.0", optim_args="momentum=1"),
    of_training("lora-without-muon", lora),
    of_training("matches-nothing", model, "'router'", optim_args="adamw_patterns=router"),
    of_training("nothing-for-muon", Bag, "Bag"),
    Refusal(
        "normalized-attention",
        "Trainer.create_optimizer",
        lambda tmp_path: Trainer(make("qwen3"), arguments(tmp_path, optim_args="qk_clip=100")).create_optimizer(),
    ),
    Refusal(
        "qk-clip-under-sp",
        "Trainer",
        lambda: refuse_parts_of_sequences(SimpleNamespace(parallelism_config=SimpleNamespace(sp_size=2)), 100.0),
        RuntimeError,
        says="qk_clip=100",
    ),
]


# --- param groups


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 30))


def with_strangers(tmp_path: Any) -> list[str]:
    network = model()
    cls, kwargs = asked(tmp_path, network)
    groups = [{"params": [*network.parameters(), nn.Parameter(torch.randn(3, 4))]}]
    texts = []
    for call in (lambda: cls(groups, **kwargs), lambda: cls()(network, optimizer_dict=groups, **kwargs)):
        with pytest.raises(RuntimeError) as error:
            call()
        texts.append(str(error.value))
    return texts


def of_model(cls_to_groups: Any) -> Any:
    """Return an attempt with the class that Trainer returns, the other arguments, and a model."""

    def attempt(given: nn.Module, tmp_path: Any) -> None:
        cls, kwargs = asked(tmp_path, given)
        cls_to_groups(cls, kwargs, given)

    return attempt


def several_rates(**options: float) -> Any:
    def attempt(given: nn.Sequential) -> None:
        groups = [{"params": list(given[0].parameters()), "lr": 1e-5}, {"params": list(given[1:].parameters())}]
        groups[1] |= {"lr": 2e-5} if "muon_lr" in options else {}
        MuonOfGroups(groups, model=given, **options)

    return attempt


def twice(**names: Any) -> Any:
    return lambda given: MuonOfGroups([{"params": list(given.parameters()), **names}])


GROUPS = [
    Refusal("no-live-model", "Trainer's class", with_strangers, RuntimeError, says=r"1 of .*\(3, 4\)"),
    Refusal(
        "not-for-muon",
        "Trainer's class",
        of_model(lambda cls, kwargs, net: cls([{"params": list(net.parameters()), "use_muon": True}], **kwargs)),
        given=model,
        says="model.embed_tokens.weight",
    ),
    *(
        Refusal("unknown-option", "Trainer's class", of_model(call), given=model, says="'nesterof'", name=name)
        for name, call in {
            "handler": lambda cls, kwargs, net: cls()(net, nesterof=True, **kwargs),
            "class": lambda cls, kwargs, net: cls([{"params": list(net.parameters())}], nesterof=True, **kwargs),
            "group": lambda cls, kwargs, net: cls([{"params": list(net.parameters()), "nesterof": True}], **kwargs),
        }.items()
    ),
    Refusal(
        "one-rate-for-several",
        "MuonOfGroups",
        several_rates(muon_lr=1e-4),
        given=layers,
        says=r"muon_lr=0.0001 .*1e-05, 2e-05",
    ),
    Refusal(
        "one-rate-for-several", "MuonOfGroups", several_rates(muon_lr=1e-4, lr=0.0), given=layers, name="no rate at all"
    ),
    Refusal(
        "one-rate-for-several",
        "MuonOfGroups",
        several_rates(adamw_lr=1e-4),
        given=layers,
        says=r"adamw_lr=0.0001 .*1e-05, none",
        name="none",
    ),
    Refusal("given-twice", "MuonOfGroups", twice(betas=(0.9, 0.95), adamw_betas=(0.9, 0.95)), given=layers),
    Refusal("given-twice", "MuonOfGroups", twice(eps=1e-8, adamw_eps=1e-8), given=layers, says="eps", name="eps"),
    Refusal(
        "given-twice",
        "timm",
        lambda given: muon_of_groups(given.parameters(), betas=(0.9, 0.95), adamw_betas=(0.9, 0.95)),
        given=layers,
    ),
    *(
        Refusal(
            "only-default",
            f"MuonOfGroups of a {where}",
            lambda given, key=key, where=where: (
                MuonOfGroups(given.parameters(), **{key: True})
                if where == "model"
                else MuonOfGroups([{"params": [given[0].weight], key: True}])
            ),
            given=layers,
            says=f"{key}=True",
            name=key,
        )
        for key in ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad")
        for where in ("model", "group")
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


def of_model_config(code: str, config: Any, implementation: str) -> Refusal:
    def attempt() -> list[str]:
        return list(refusals.model_complaints(config(), implementation))

    return Refusal(code, "Ulysses' model", attempt, name=f"{config().model_type} {implementation}")


def of_batch(code: str, name: str, **rows: Any) -> Refusal:
    rows = {"input_ids": torch.zeros(2, 4, dtype=torch.long), **rows}
    return Refusal(code, "Ulysses' batch", lambda given: batches.complete(given, "sdpa"), given=lambda: rows, name=name)


ULYSSES = [
    Refusal("ignored-sp-size", "Ulysses", ignored_size, RuntimeError, says="PARALLELISM_CONFIG_SP_SIZE=2"),
    Refusal("groups-of-gloo", "Ulysses", gloo, RuntimeError, says="2 and 4"),
    of_model_config("sliding-window", lambda: MistralConfig(sliding_window=8), "sdpa"),
    of_model_config(
        "layers-across-ranks", lambda: Qwen3Config(layer_types=["chunked_attention"] * 32), "flash_attention_2"
    ),
    of_model_config("layers-across-ranks", lambda: Qwen3Config(layer_types=["linear_attention"] * 32), "sdpa"),
    of_model_config("dropped-mask", Qwen3Config, "flex_attention"),
    of_batch("packed-texts", "two texts in a row", position_ids=torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])),
    of_batch("left-padding", "padded", attention_mask=torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])),
    of_batch("dropped-mask", "masked", attention_mask=torch.ones(1, 1, 4, 4)),
]

CASES = [*TRAINER, *GROUPS, *ULYSSES]
