"""`optim: muon` in LLaMA-Factory: its examples, run as they are but for a tiny model, tiny data, few steps and the CPU.

`test_llamafactory_deepspeed.py` runs the command itself, in one process and with torchrun.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.harness import (
    ALL_MATRICES,
    ALL_OTHERS,
    BIN,
    CPU_FSDP,
    LLAMAFACTORY_FSDP2,
    LLAMAFACTORY_PRETRAIN,
    LLAMAFACTORY_SFT,
    YAML,
    assert_close,
    assert_resumed,
    assert_routed,
    blocks_of,
    interrupt,
    llamafactory_launcher,
    llamafactory_server,
    llamafactory_settings,
    plain_loop,
    read_yaml,
    weights,
)
from tests.support import fixtures_text

pytestmark = [pytest.mark.slow, pytest.mark.llamafactory]


class Factory:
    """Runs LLaMA-Factory on the tiny model, with an example and settings that make it small."""

    def __init__(self, folder: Path, model: Path, data: Path) -> None:
        self.folder, self.model, self.data = folder, model, data

    def settings(self, name: str, example: str, changes: dict[str, Any]) -> dict[str, Any]:
        dataset = "tiny_pt" if example == LLAMAFACTORY_PRETRAIN else "tiny_sft"
        tiny = llamafactory_settings(self.model, self.data, self.folder / name, dataset)
        return read_yaml(YAML / example) | tiny | changes

    def train(self, name: str, example: str, *, ranks: int = 1, fails: bool = False, **changes: Any) -> str:
        """Train into the folder of this name; return what the processes print."""
        settings = self.settings(name, example, changes)
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps(settings, default=str), encoding="utf-8")
        words = [BIN / "llamafactory-cli", "train", file] if ranks == 1 else [llamafactory_launcher(), file]
        words = [CPU_FSDP, *words] if "fsdp" in settings else words
        full = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
        return llamafactory_server.run(words, cwd=self.folder, fails=fails, ranks=ranks, **full)

    def pretrain(self, name: str, *, ranks: int = 1, **changes: Any) -> str:
        """Pretrain for four steps in the order of the texts, with four blocks a step."""
        changes = {
            "optim_args": "ns_dtype=fp32",  # in bf16 the rounding of products would hide the order of a sum
            "disable_shuffling": True,
            "warmup_steps": 1,
            "learning_rate": 0.001,
            "max_steps": 4,
            "save_steps": 2,
            "per_device_train_batch_size": 4 // ranks,
            **changes,
        }
        return self.train(name, LLAMAFACTORY_PRETRAIN, ranks=ranks, **changes)


@pytest.fixture(scope="module")
def factory(tmp_path_factory, tiny_model, llamafactory_data):
    factory = Factory(tmp_path_factory.mktemp("factory"), tiny_model, llamafactory_data)
    factory.pretrain("one")
    return factory


def test_pretraining_is_routed_and_equals_a_plain_loop(factory, rounding):
    from transformers import AutoModelForCausalLM

    saved = assert_routed(factory.folder / "one" / "checkpoint-4", muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=4)
    decay = {(group["use_muon"], group["weight_decay"]): group["param_names"] for group in saved.groups}
    assert set(decay) == {(True, 0.01), (False, 0.01), (False, 0.0)}
    assert set(decay[False, 0.01]) == {"model.embed_tokens.weight", "lm_head.weight"}

    settings = json.loads((factory.folder / "one.yaml").read_text(encoding="utf-8"))
    blocks = blocks_of(fixtures_text.texts(), factory.model, settings["cutoff_len"] - 1)  # as it packs texts
    model = AutoModelForCausalLM.from_pretrained(factory.model, dtype=torch.float32)
    plain_loop(model, blocks, 4, settings)
    assert_close(weights(factory.folder / "one"), model.state_dict(), weights(factory.model), rounding)


@pytest.mark.promise("exact-resume")
def test_resumed_run_equals_the_uninterrupted_one(factory):
    checkpoint = interrupt(factory.folder / "one", after=2, destination=factory.folder / "resumed")
    factory.pretrain("resumed", resume_from_checkpoint=checkpoint)
    assert_resumed(factory.folder / "resumed" / "checkpoint-4", factory.folder / "one" / "checkpoint-4")


@pytest.mark.promise("ddp", "fsdp2", "llamafactory")
@pytest.mark.first_tier("fsdp2")
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_two_processes_agree_with_one(layout, factory, rounding):
    example = read_yaml(YAML / LLAMAFACTORY_FSDP2)
    changes = {key: example[key] for key in ("fsdp", "fsdp_config")} if layout == "fsdp2" else {}
    printed = factory.pretrain(layout, ranks=2, **changes)
    assert "world size: 2" in printed
    assert printed.count("which parameter goes where") == 1
    if layout == "fsdp2":
        assert (factory.folder / layout / "checkpoint-4" / "optimizer.bin").exists(), "the run was not sharded"
    else:
        assert_routed(factory.folder / layout / "checkpoint-4", muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=4)
    assert_close(weights(factory.folder / layout), weights(factory.folder / "one"), weights(factory.model), rounding)


def factors(modules: set[str], factor: str) -> set[str]:
    """Return the names of LoRA's factors A or B."""
    return {f"base_model.model.{name}.lora_{factor}.default.weight" for name in modules}


MATRICES = fixtures_text.qwen3_matrices()
SFT = {
    "full": (ALL_MATRICES, ALL_OTHERS),
    "8b": (ALL_MATRICES, ALL_OTHERS),
    "freeze": (
        {f"{name}.weight" for name in fixtures_text.qwen3_matrices([1])},
        {f"{name}.weight" for name in fixtures_text.qwen3_norms([1])},
    ),
    "lora": (factors(MATRICES, "A") | factors(MATRICES, "B"), set()),
}


@pytest.mark.extended
@pytest.mark.second_tier("full|freeze|lora")
@pytest.mark.parametrize("kind", SFT)
def test_sft_is_routed(kind, factory):
    name = f"llamafactory_qwen3_{kind}_sft.yaml"
    factory.train(kind, name, **LLAMAFACTORY_SFT[name])
    muon, adamw = SFT[kind]
    saved = assert_routed(factory.folder / kind / "checkpoint-3", muon=muon, adamw=adamw, steps=3)
    assert {group["initial_lr"] for group in saved.groups} == {read_yaml(YAML / name)["learning_rate"]}


@pytest.mark.extended
def test_lora_plus_gives_the_b_factors_their_own_rate(factory):
    factory.train("lora_plus", "llamafactory_qwen3_lora_sft.yaml", loraplus_lr_ratio=4.0, learning_rate=1e-3)
    checkpoint = factory.folder / "lora_plus" / "checkpoint-3"
    saved = assert_routed(checkpoint, muon=SFT["lora"][0], adamw=set(), steps=3)
    rates = {(name, group["initial_lr"]) for group in saved.groups for name in group["param_names"]}
    assert rates == {(n, r) for f, r in (("A", 1e-3), ("B", 4e-3)) for n in factors(MATRICES, f)}
    scheduled = {name: group["lr"] for group in saved.groups for name in group["param_names"]}
    assert {scheduled[n] for n in factors(MATRICES, "B")} == {4 * scheduled[n] for n in factors(MATRICES, "A")}


# --- stages that run other passes through DDP's wrapper, without gradients, between backward passes

PREFERENCES = """
import os

import torch
import torch.distributed as dist
from llamafactory.train.tuner import run_exp
from transformers import TrainerCallback

from tests.integrations.accelerate_cases import counted, shared_steps

class AtTheEnd(TrainerCallback):
    def on_train_end(self, args, state, control, model=None, **kwargs):
        weights = torch.cat([param.detach().flatten() for param in model.parameters()])
        everyone = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(everyone, weights)
        assert torch.equal(*everyone)

with counted() as counts, shared_steps() as shared:
    run_exp(callbacks=[AtTheEnd()])
print(f"rank {os.environ['RANK']} shared {all(shared)} of {len(shared)} steps and {sum(counts)} matrices")
"""
STAGES = {
    "dpo": ("llamafactory_qwen3_lora_sft.yaml", {"prompt": "prompt", "chosen": "good", "rejected": "bad"}, 28),
    "kto": ("llamafactory_qwen3_full_sft.yaml", {"prompt": "prompt", "response": "good", "kto_tag": "is_good"}, 14),
}


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_preference_stages_share_every_step_on_two_ranks(stage, factory):
    """DPO with LoRA asks the wrapped model itself for the reference, and KTO always for unrelated answers."""
    example, columns, matrices = STAGES[stage]
    rows = [
        {"prompt": f"What is {name}?", "good": text[:80], "bad": name, "is_good": i % 2 == 0}
        for i, (name, text) in enumerate(fixtures_text.documents()[:40])
    ]
    data = factory.folder / f"{stage}_data"
    fixtures_text.write_jsonl(data / "rows.jsonl", rows)
    info = {"tiny": {"file_name": "rows.jsonl", "ranking": stage == "dpo", "columns": columns}}
    (data / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    changes = {"stage": stage, "dataset": "tiny", "dataset_dir": data, "per_device_train_batch_size": 2}
    file = factory.folder / f"{stage}.yaml"
    file.write_text(json.dumps(factory.settings(stage, example, changes), default=str), encoding="utf-8")
    printed = llamafactory_server.run_code(PREFERENCES, file, cwd=factory.folder, ranks=2)
    assert "[ranks-part]" not in printed
    counts = re.findall(r"rank [01] shared True of 3 steps and (\d+) matrices", printed)
    assert len(counts) == 2, printed[-3000:]
    assert sum(map(int, counts)) == 3 * matrices
    assert "0" not in counts


# --- refusals, whose texts `tests/refusals` has: here they come before a model is loaded


@pytest.mark.parametrize(
    ("example", "changes", "code"),
    [
        (LLAMAFACTORY_PRETRAIN, {"use_muon": True, "model_name_or_path": "no_model_is_here"}, "[rival-optimizer]"),
        ("llamafactory_qwen3_lora_sft.yaml", {"optim_args": ""}, "[lora-without-muon]"),
    ],
)
def test_refused_before_the_model_is_loaded(example, changes, code, factory):
    printed = factory.train("refused", example, fails=True, **changes)
    assert code in printed
    assert "Loading weights" not in printed  # the arguments suffice
    assert not list((factory.folder / "refused").glob("checkpoint-*"))


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
def test_megatron_is_refused(tmp_path):
    printed = llamafactory_server.run_code(MEGATRON, tmp_path, cwd=tmp_path, USE_MCA="1")
    assert "[rival-trainer]" in printed


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
def test_ppo_gets_our_optimizer(tiny_model, tmp_path):
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
