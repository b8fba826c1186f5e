"""`hf-muon inspect` and `plan` of training files say what the programs themselves train.

The reference is the program, run with small real weights until it has its model: a workflow of LLaMA-Factory, a trainer
of its v1, a command of TRL, or a Trainer.
"""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_muon.integrations.transformers.training_file import own_environment
from tests.cli.calls import report_of
from tests.support.fixtures_text import build_tokenizer

SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ROPE = {"rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [2, 1, 1]}}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 32}
MULTI = {key: value for key, value in TEXT.items() if key != "head_dim"} | ROPE
THINKER = {"text_config": MULTI, "vision_config": VISION, "audio_config": {**AUDIO, "num_mel_bins": 16}}
MODELS = {
    "text": ("Qwen3ForCausalLM", {**TEXT, "dtype": "bfloat16"}),
    "headless": ("Qwen3Model", TEXT),
    "classes": ("Qwen3ForSequenceClassification", {**TEXT, "num_labels": 3}),
    "experts": ("Qwen3MoeForCausalLM", {**TEXT, "num_experts": 4, "moe_intermediate_size": 16}),
    "vision": ("Qwen2_5_VLForConditionalGeneration", {"text_config": MULTI, "vision_config": VISION}),
    "omni": ("Qwen2_5OmniForConditionalGeneration", {"thinker_config": THINKER, "enable_audio_output": False}),
    "seq2seq": (
        "T5ForConditionalGeneration",
        {"vocab_size": 320, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2},
    ),
}
LORA = {"optim_args": "lora=muon"}
V0 = {
    "model_name_or_path": "text",
    "stage": "sft",
    "do_train": True,
    "dataset": "any",
    "optim": "muon",
    "use_cpu": True,
}
FULL, FREEZE = {**V0, "finetuning_type": "full"}, {**V0, "finetuning_type": "freeze"}
FACTORS = {**V0, **LORA}
V1 = {"model": "text", "optim_config": {"name": "muon"}}
FACTORS_V1 = {**V1, "optim_config": {"name": "muon", "lora": "muon"}}
TRL = {"model_name_or_path": "text", "optim": "muon", "use_cpu": True, "dataset_name": "any", "report_to": "none"}
FACTORS_TRL = {**TRL, **LORA, "use_peft": True}
SCRIPT = {"model_name_or_path": "text", "optim": "muon", "use_cpu": True}


class ReachedError(Exception):
    """The program has its model."""


def stop(*values):
    raise ReachedError(*values)


def reference(program, settings):
    """Return the model that a program would train, and its arguments."""
    with own_environment(), ExitStack() as replaced:

        def replace(owner, name, value):
            replaced.enter_context(mock.patch.object(owner, name, value, create=True))

        try:
            PROGRAMS[program](settings, replace)
        except ReachedError as reached:
            return reached.args
        except (AttributeError, ImportError, RuntimeError) as error:
            pytest.skip(f"the program does not start here: {error}")
    raise AssertionError("no model was reached")


def llamafactory(settings, replace):
    from llamafactory.model import load_model
    from llamafactory.train import tuner

    parts = []
    parse = tuner.get_train_args
    replace(tuner, "get_train_args", lambda args: parts.extend(parse(args)) or parts)
    workflow = importlib.import_module(f"llamafactory.train.{settings['stage']}.workflow")
    replace(workflow, "get_dataset", lambda *_, **__: {})
    replace(workflow, "load_model", lambda *args, **options: stop(load_model(*args, **options), parts))
    tuner._training_function({"args": settings, "callbacks": []})


def llamafactory_v1(settings, replace):
    from llamafactory.v1.trainers import sft_trainer

    replace(sft_trainer, "DataEngine", lambda _: None)
    replace(sft_trainer, "SFTTrainer", lambda args, model, **_: stop(model, [args]))
    sft_trainer.run_sft(settings)


def trl(settings, replace):
    import datasets

    script = importlib.import_module(f"trl.scripts.{settings.pop('command')}")
    row = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}
    data = datasets.Dataset.from_list([{**row, "label": True}])
    for module in (datasets, script):
        replace(module, "load_dataset", lambda *_, **__: {"train": data})
    replace(Trainer, "train", lambda self, *_, **__: stop(self.model, [self.args]))
    parser = script.make_parser()
    parser.set_defaults_with_config(**settings)
    script.main(*parser.parse_args_into_dataclasses(args=[]))


def script(settings, replace):
    model = AutoModelForCausalLM.from_pretrained(settings.pop("model_name_or_path"))
    trainer = Trainer(model, TrainingArguments(**settings))
    stop(trainer.model, [trainer.args])


PROGRAMS = {"v0": llamafactory, "v1": llamafactory_v1, "trl": trl, "script": script}
CASES = {
    "v0-full": {**FULL, "bf16": True, "cutoff_len": 96, "per_device_train_batch_size": 3},
    "v0-full_without_checkpointing": {**FULL, "pure_bf16": False, "disable_gradient_checkpointing": True},
    "v0-freeze": {**FREEZE, "freeze_trainable_layers": -1, "freeze_extra_modules": "norm"},
    "v0-freeze_modules": {**FREEZE, "freeze_trainable_layers": 1, "freeze_trainable_modules": "mlp"},
    "v0-llama_pro": {**FREEZE, "freeze_trainable_layers": 1, "use_llama_pro": True},
    "v0-lora": {**FACTORS, "lora_rank": 4, "bf16": True},
    "v0-lora_and_modules": {**FACTORS, "lora_target": "q_proj", "additional_target": "lm_head"},
    "v0-lora_goes_on": {**FACTORS, "adapter_name_or_path": "adapter"},
    "v0-lora_on_new_tokens": {**FACTORS, "add_tokens": "<new>,<newer>"},
    "v0-dora": {**FACTORS, "use_dora": True},
    "v0-oft": {**V0, "finetuning_type": "oft", "optim_args": "muon_patterns=oft_R"},
    "v0-reward": {**FULL, "stage": "rm"},
    "v0-ppo": {**FULL, "stage": "ppo", "reward_model": "text", "reward_model_type": "full"},
    "v0-dpo": {**FACTORS, "stage": "dpo", "lora_target": "v_proj"},
    "v0-pretraining": {**FULL, "stage": "pt"},
    "v0-headless": {**FULL, "model_name_or_path": "headless"},
    "v0-classes": {**FULL, "model_name_or_path": "classes"},
    "v0-experts": {**FULL, "model_name_or_path": "experts"},
    "v0-experts_lora": {**FACTORS, "model_name_or_path": "experts"},
    "v0-vision": {**FULL, "model_name_or_path": "vision"},
    "v0-vision_tower": {**FULL, "model_name_or_path": "vision", "freeze_vision_tower": False},
    "v0-vision_freeze": {**FREEZE, "model_name_or_path": "vision", "freeze_trainable_layers": 1},
    "v0-vision_lora": {**FACTORS, "model_name_or_path": "vision"},
    "v0-omni": {**FULL, "model_name_or_path": "omni"},
    "v0-seq2seq": {**FULL, "model_name_or_path": "seq2seq"},
    "v1-full": {**V1, "micro_batch_size": 4, "cutoff_len": 128, "enable_activation_checkpointing": False},
    "v1-lora": {**FACTORS_V1, "peft_config": {"name": "lora"}},
    "v1-lora_and_modules": {**FACTORS_V1, "peft_config": {"name": "lora", "r": 2, "modules_to_save": ["lm_head"]}},
    "v1-freeze": {**V1, "peft_config": {"name": "freeze", "freeze_trainable_layers": 1}},
    "v1-classes": {**V1, "model_class": "cls"},
    "v1-text": {**V1, "optim_config": '{"name": "muon"}', "peft_config": '{"name": "freeze"}'},
    "trl-sft": {**TRL, "command": "sft", "dataset_text_field": "prompt"},
    "trl-sft_in_bf16": {**TRL, "command": "sft", "dtype": "auto", "max_length": 64, "packing": False},
    "trl-sft_lora": {**FACTORS_TRL, "command": "sft", "lora_modules_to_save": ["lm_head"]},
    "trl-sft_pattern": {**FACTORS_TRL, "command": "sft", "lora_target_modules": [".*self_attn.q_proj"]},
    "trl-sft_dora": {**FACTORS_TRL, "command": "sft", "use_dora": True, "lora_target_modules": ["q_proj", "v_proj"]},
    "trl-dpo": {**TRL, "command": "dpo", "precompute_ref_log_probs": True},
    "trl-reward": {**FACTORS_TRL, "command": "reward", "lora_task_type": "SEQ_CLS", "center_rewards_coefficient": 0.1},
    "trl-grpo": {**TRL, "command": "grpo", "num_generations": 4, "reward_funcs": ["think_format_reward"]},
    "script-full": {**SCRIPT, "gradient_checkpointing": True, "per_device_train_batch_size": 2},
    "script-defaults": SCRIPT,
}


EXAMPLES = [
    path
    for path in sorted((Path(__file__).parents[2] / "examples" / "yaml").glob("*.yaml"))
    if "accelerate" not in path.name
]


def of_example(path):
    return {"llamafactory": "v0", "trainer": "script"}.get(path.name.split("_")[0], "trl")


def marks(case):
    program = case.split("-")[0]
    return {"trl": (), "script": pytest.mark.every_stack}.get(program, pytest.mark.llamafactory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a checkpoint of each model, a tokenizer in each, and an adapter."""
    from peft import LoraConfig, get_peft_model

    path, tokenizer = tmp_path_factory.mktemp("models"), build_tokenizer()
    for name, (cls, sizes) in MODELS.items():
        cls = getattr(transformers, cls)
        model = cls(cls.config_class(**sizes, pad_token_id=0, bos_token_id=None)).to(
            sizes.get("dtype") and torch.bfloat16
        )
        model.save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    torch.save({}, path / "omni" / "spk_dict.pt")  # which a run needs, and the command does not
    model = AutoModelForCausalLM.from_pretrained(path / "text")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(path / "adapter")
    return path


@pytest.mark.first_tier(
    "v0-(full|llama_pro|dora|lora|reward|vision|omni)$|v1-(full|lora)$|trl-(sft_lora|reward)|script"
)
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in CASES])
def test_what_the_program_trains(folder, tmp_path, monkeypatch, case):
    monkeypatch.chdir(folder)
    program = case.split("-")[0]
    settings = {"output_dir": str(tmp_path / "run"), **CASES[case]}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in settings.items() if key != "command"}))
    model, parts = reference(program, settings)
    report, plan = report_of("inspect", file), report_of("plan", file, "--layout", "single")

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p["name"]: p["shape"] for p in report["parameters"]} == {n: list(p.shape) for n, p in trained.items()}
    assert report["frozen"]["parameters"] == sum(not p.requires_grad for p in model.parameters())

    def first(*names):
        return next(getattr(part, name) for name in names for part in parts if getattr(part, name, None) is not None)

    if program != "script":
        batch = first("per_device_train_batch_size", "micro_batch_size")
        assert plan["tokens"] == batch * first("cutoff_len", "max_length", "max_completion_length")
    sizes = Counter()
    for param in trained.values():
        sizes[param.dtype] += param.numel()
    assert f"torch.{plan['dtype']}" == str(sizes.most_common(1)[0][0])


@pytest.mark.llamafactory
def test_a_folder_with_a_configuration_alone(folder, tmp_path):
    """Read no weights, no tokenizer, and no file beside them."""
    file = tmp_path / "run.yaml"
    for name in ("text", "vision", "omni"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((folder / name / "config.json").read_bytes())
        reports = []
        for path in (folder, tmp_path):
            file.write_text(yaml.safe_dump({**FULL, "model_name_or_path": str(path / name), "resize_vocab": True}))
            reports.append(report_of("inspect", file))
        assert reports[0] == reports[1]


@pytest.mark.llamafactory
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_numbers_are_those_that_llamafactory_reads(folder, tmp_path, suffix):
    """PyYAML reads 1e-2 as text."""
    file = tmp_path / f"run.{suffix}"
    text = json.dumps({**FACTORS, "model_name_or_path": str(folder / "text"), "lora_dropout": 0.5})
    file.write_text(text.replace("0.5", "1e-2"))
    assert report_of("inspect", file)["muon"]["parameters"] == 28


def test_keys_of_a_script_of_ones_own(folder, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"model_name_or_path": str(folder / "text"), "optim": "muon", "my_key": 3}))
    report = report_of("inspect", file)
    assert report["notes"] == ["what the script makes of my_key is not known: the whole model is shown"]
    assert report["frozen"]["parameters"] == 0


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name, marks=marks(of_example(path))) for path in EXAMPLES])
def test_examples(folder, tmp_path, path):
    """Say of each example that its run would train all of its hidden matrices, or those that the file names."""
    if of_example(path) == "trl":
        pytest.importorskip("trl", minversion="1")  # an older one does not start with transformers 5
    settings = yaml.safe_load(path.read_text())
    key = "model" if "model" in settings else "model_name_or_path"
    file = tmp_path / path.name
    file.write_text(yaml.safe_dump({**settings, key: str(folder / "text")}))
    report = report_of("inspect", file)
    assert report["muon"]["parameters"] == {"freeze": 14, "lora": 28}.get(settings.get("finetuning_type"), 14)
    assert (report["frozen"]["parameters"] > 0) == (settings.get("finetuning_type") in ("freeze", "lora"))


@pytest.mark.llamafactory
@pytest.mark.extended
@pytest.mark.parametrize(
    ("file", "layout", "ranks"), [("8b_sft", "single", 1), ("zero3", "zero3", 8), ("fsdp2", "fsdp", 8)], ids=str
)
def test_peaks_on_the_page_of_llamafactory(file, layout, ranks):
    page = (EXAMPLES[0].parents[2] / "docs" / "recipes" / "llamafactory.md").read_text(encoding="utf-8")
    file = f"llamafactory_qwen3_{file}.yaml"
    path = EXAMPLES[0].parents[2] / "examples" / "yaml" / file
    peak = report_of("plan", path, "--layout", layout, "--ranks", ranks)["peak"]
    assert re.search(rf"^\|[^|]+\| \[?`{file}`[^|]*\| ([\d.]+) GB \|$", page, re.MULTILINE)[1] == f"{peak / 1e9:.1f}"
