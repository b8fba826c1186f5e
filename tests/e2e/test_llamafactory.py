"""`optim: muon` in LLaMA-Factory as users start it: `llamafactory-cli train`, in one process and in two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import fixtures_text
from tests.e2e.example_files import ALL_MATRICES, ALL_OTHERS
from tests.e2e.harness import (
    BIN,
    assert_close,
    assert_resumed,
    assert_routed,
    interrupt,
    llamafactory_launcher,
    llamafactory_server,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.llamafactory]

BASE = {
    "do_train": True,
    "optim": "muon",
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "template": "qwen3_nothink",
    "cutoff_len": 64,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
}
PRETRAIN = {
    "stage": "pt",
    "finetuning_type": "full",
    "dataset": "tiny_pt",
    "packing": True,
    "optim_args": "ns_dtype=fp32",  # in bf16 the rounding of products would hide the order of a sum
    "save_steps": 2,
}
LORA = {
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "q_proj,v_proj",
    "dataset": "tiny_sft",
}


class Factory:
    """Runs LLaMA-Factory on the tiny model, with a YAML file written from settings."""

    def __init__(self, folder: Path, model: Path, data: Path) -> None:
        self.folder = folder
        self.inputs = {"model_name_or_path": model, "dataset_dir": data}

    def train(self, name: str, settings: dict[str, Any], *, fails: bool = False, ranks: int = 1) -> tuple[Path, str]:
        """Train and return the output folder and what the processes printed; `test_examples_llamafactory` launches."""
        output = self.folder / name
        everything = self.inputs | BASE | settings | {"output_dir": output}
        file = self.folder / f"{name}.yaml"
        file.write_text("".join(f"{key}: {value}\n" for key, value in everything.items()), encoding="utf-8")
        words = [BIN / "llamafactory-cli", "train", file] if ranks == 1 else [llamafactory_launcher(), file]
        return output, llamafactory_server.run(words, cwd=self.folder, fails=fails, ranks=ranks)


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, llamafactory_data: Path) -> Factory:
    return Factory(tmp_path_factory.mktemp("factory"), tiny_model, llamafactory_data)


@pytest.fixture(scope="module")
def straight(factory: Factory) -> Path:
    """Pretrain for four steps in one process, with two blocks a step in LLaMA-Factory's shuffled order."""
    return factory.train("straight", PRETRAIN)[0]


def test_full_pretraining_is_routed(straight: Path) -> None:
    saved = assert_routed(straight / "checkpoint-4", muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=4)
    decay = {(group["use_muon"], group["weight_decay"]): group["param_names"] for group in saved.groups}
    assert set(decay) == {(True, 0.1), (False, 0.1), (False, 0.0)}
    assert set(decay[False, 0.1]) == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.promise("exact-resume")
def test_resumed_run_equals_the_uninterrupted_one(factory: Factory, straight: Path) -> None:
    checkpoint = interrupt(straight, after=2, destination=factory.folder / "resumed")
    output, _ = factory.train("resumed", PRETRAIN | {"resume_from_checkpoint": checkpoint})
    assert_resumed(output / "checkpoint-4", straight / "checkpoint-4")


@pytest.mark.promise("ddp", "llamafactory")
def test_two_processes_agree_with_one(
    factory: Factory, straight: Path, tiny_model: Path, rounding: dict[str, float]
) -> None:
    output, printed = factory.train("two", PRETRAIN | {"per_device_train_batch_size": 1}, ranks=2)
    assert "world size: 2" in printed
    assert printed.count("which parameter goes where") == 1
    assert_routed(output / "checkpoint-4", muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=4)
    assert_close(weights(output), weights(straight), weights(tiny_model), rounding)


@pytest.mark.extended
def test_lora_plus_gives_the_b_factors_their_own_rate(factory: Factory) -> None:
    settings = LORA | {"optim_args": "lora=muon", "loraplus_lr_ratio": 4.0, "save_steps": 3}
    output, _ = factory.train("lora_plus", settings)
    factors = {
        factor: {
            f"base_model.model.model.layers.{layer}.self_attn.{x}_proj.lora_{factor}.default.weight"
            for layer in range(fixtures_text.LAYERS)
            for x in "qv"
        }
        for factor in "AB"
    }
    saved = assert_routed(output / "checkpoint-3", muon=factors["A"] | factors["B"], adamw=set(), steps=3)
    rates = {name: group["initial_lr"] for group in saved.groups for name in group["param_names"]}
    assert {rates[name] for name in factors["A"]} == {1e-3}
    assert {rates[name] for name in factors["B"]} == {4e-3}
    scheduled = {name: group["lr"] for group in saved.groups for name in group["param_names"]}
    assert {scheduled[name] for name in factors["B"]} == {4 * scheduled[name] for name in factors["A"]}
    assert 0 < min(scheduled.values()) < 1e-3


# --- refusals


def test_a_rival_is_refused_before_the_model_is_loaded(factory: Factory) -> None:
    settings = PRETRAIN | {"use_muon": True, "model_name_or_path": factory.folder / "no_model_is_here"}
    _, printed = factory.train("rival", settings, fails=True)
    assert "[rival-optimizer]" in printed


def test_lora_without_anything_for_muon_is_refused(factory: Factory) -> None:
    output, printed = factory.train("lora_adamw", LORA, fails=True)
    assert "[lora-without-muon]" in printed
    assert "Loading weights" not in printed  # the arguments suffice
    assert not list(output.glob("checkpoint-*"))


# A stand-in for mcore_adapter, of which LLaMA-Factory's parser needs one name.
MEGATRON = """
import importlib.machinery, sys, types
import transformers
for name in [name for name in sys.modules if name.partition(".")[0] == "llamafactory"]:
    del sys.modules[name]  # it asks for Megatron when it is imported
stub = types.ModuleType("mcore_adapter")
stub.__spec__ = importlib.machinery.ModuleSpec("mcore_adapter", None)
stub.TrainingArguments = stub.Seq2SeqTrainingArguments = transformers.Seq2SeqTrainingArguments
sys.modules["mcore_adapter"] = stub
import llamafactory.extras.packages as packages
packages.is_mcore_adapter_available = packages.is_megatron_bridge_available = lambda: True
import llamafactory.hparams.parser as parser
parser._check_extra_dependencies = lambda *args, **kwargs: None
try:
    parser.get_train_args(dict(stage="sft", do_train=True, model_name_or_path="x", dataset="d", template="default",
        output_dir=sys.argv[1], optim="muon", use_cpu=True, bf16=False))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.promise("refused-layouts")
def test_megatron_is_refused(tmp_path: Path) -> None:
    printed = llamafactory_server.run_code(MEGATRON, tmp_path, cwd=tmp_path, USE_MCA="1")
    assert "[rival-trainer]" in printed


# --- PPO, which builds its optimizer from param groups

PPO = """
import sys
from types import SimpleNamespace

import torch
from llamafactory.hparams import FinetuningArguments, TrainingArguments
from llamafactory.train.ppo.trainer import CustomPPOTrainer
from transformers import Trainer
from trl import AutoModelForCausalLMWithValueHead

model = AutoModelForCausalLMWithValueHead.from_pretrained(sys.argv[1])
arguments = TrainingArguments(
    output_dir=sys.argv[2], optim="muon", learning_rate=1e-3, weight_decay=0.1, use_cpu=True, report_to="none"
)
trainer = SimpleNamespace(get_decay_parameter_names=lambda model: Trainer.get_decay_parameter_names(None, model))
finetuning = FinetuningArguments(stage="ppo", reward_model="none")
optimizer = CustomPPOTrainer.create_optimizer(trainer, model, arguments, finetuning)

from hf_muon import Muon

assert isinstance(optimizer, Muon), type(optimizer)
assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
torch.save(optimizer.state_dict(), sys.argv[2] + "/optimizer.pt")
"""


@pytest.mark.extended
def test_ppo_gets_our_optimizer(tiny_model: Path, tmp_path: Path) -> None:
    llamafactory_server.run_code(PPO, tiny_model, tmp_path, cwd=tmp_path)
    inner = "pretrained_model."
    saved = assert_routed(
        tmp_path,
        muon={inner + name for name in ALL_MATRICES},
        adamw={inner + name for name in ALL_OTHERS} | {"v_head.summary.weight", "v_head.summary.bias"},
        steps=1,
    )
    decay = {name: group["weight_decay"] for group in saved.groups for name in group["param_names"]}
    assert all(decay[inner + name] == 0.1 for name in ALL_MATRICES | {"model.embed_tokens.weight", "lm_head.weight"})
    assert all(decay[f"{inner}{name}.weight"] == 0.0 for name in fixtures_text.qwen3_norms() | {"model.norm"})
