"""Every example is run as it stands, but for a tiny model, tiny data, few steps and the CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from hf_muon import MuonConfig
from hf_muon.integrations.llamafactory.v1.handler import config_from
from tests import fixtures_text
from tests.e2e.harness import (
    BIN,
    ROOT,
    TINY,
    YAML,
    assert_close,
    assert_resumed,
    assert_routed,
    blocks_of,
    free_port,
    interrupt,
    llamafactory,
    llamafactory_settings,
    llamafactory_v1,
    needs,
    options,
    plain_loop,
    python,
    read_yaml,
    run,
    v1_has_top_level_keys,
    weights,
)

TRAIN = ROOT / "examples" / "train.py"
LLAMAFACTORY_SFT = {
    "llamafactory_qwen3_full_sft.yaml": {},
    "llamafactory_qwen3_freeze_sft.yaml": {"freeze_trainable_layers": 1},
    "llamafactory_qwen3_lora_sft.yaml": {},
}
LLAMAFACTORY_PRETRAIN = "llamafactory_qwen3_pretrain.yaml"
TRL = "trl_qwen3_sft.yaml"
TRAINER = "trainer_qwen3_pretrain.yaml"
LLAMAFACTORY_FSDP2 = "llamafactory_qwen3_fsdp2.yaml"
TRAINER_FSDP2 = "trainer_qwen3_fsdp2.yaml"
LLAMAFACTORY_V1, LLAMAFACTORY_V1_FSDP2 = "llamafactory_v1_qwen3_sft.yaml", "llamafactory_v1_qwen3_fsdp2.yaml"
LLAMAFACTORY_V1_ULYSSES = ("llamafactory_v1_qwen3_ulysses.yaml", "llamafactory_v1_qwen3_ulysses_top_level.yaml")
ACCELERATE_VERSION = tuple(int(part) for part in importlib.metadata.version("accelerate").split(".")[:2])
ACCELERATE = ("accelerate_qwen3_fsdp2.yaml", "accelerate_qwen3_hsdp.yaml")
DEEPSPEED = {  # run in test_deepspeed.py
    f"{framework}_qwen3_{layout}.yaml"
    for framework in ("llamafactory", "trainer")
    for layout in ("zero2", "zero3", "zero3_offload", "zero3_nvme")
}
ULYSSES = "trainer_qwen3_ulysses.yaml"  # run in tests/deepspeed/test_run_ulysses.py
CPU_FSDP = ROOT / "tests" / "e2e" / "cpu_fsdp.py"  # runs a script with FSDP2 on CPU

ALL_MATRICES = {f"{name}.weight" for name in fixtures_text.qwen3_matrices()}
ALL_OTHERS = {
    *(f"{name}.weight" for name in fixtures_text.qwen3_norms()),
    *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
}
EXPECTED = {
    "llamafactory_qwen3_full_sft.yaml": (ALL_MATRICES, ALL_OTHERS),
    "llamafactory_qwen3_freeze_sft.yaml": (
        {f"{name}.weight" for name in fixtures_text.qwen3_matrices([1])},
        {f"{name}.weight" for name in fixtures_text.qwen3_norms([1])},
    ),
    "llamafactory_qwen3_lora_sft.yaml": (
        {
            f"base_model.model.{name}.lora_{factor}.default.weight"
            for name in fixtures_text.qwen3_matrices()
            for factor in "AB"
        },
        set(),
    ),
}


# --- the files


def test_no_example_is_left_out() -> None:
    here = {*LLAMAFACTORY_SFT, LLAMAFACTORY_PRETRAIN, LLAMAFACTORY_FSDP2, TRL, TRAINER, TRAINER_FSDP2, *ACCELERATE}
    here |= {LLAMAFACTORY_V1, LLAMAFACTORY_V1_FSDP2, *LLAMAFACTORY_V1_ULYSSES}
    here |= DEEPSPEED | {ULYSSES}
    assert here == {path.name for path in YAML.glob("*.yaml") if "_demo_" not in path.name}


@pytest.mark.parametrize("path", sorted(YAML.glob("*.yaml")), ids=lambda path: path.stem)
def test_file_explains_itself(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert path.name in text.split("\n\n")[0], "the comment at the top says how to run it"
    # Lines that are commented out as a suggestion have to be right, too.
    for arguments in re.findall(r'^(?:# )?optim_args: "(.*)"', text, re.MULTILINE):
        MuonConfig.from_mapping(dict(item.split("=") for item in arguments.split(",")))
    if path.name.startswith("llamafactory_v1"):
        config_from(yaml.safe_load(re.sub(r"^  # ", "  ", text, flags=re.MULTILINE))["optim_config"])


def test_trainer_script_does_not_know_muon() -> None:
    assert not re.search(r"^\s*(import|from)\s+hf_muon", TRAIN.read_text(encoding="utf-8"), re.MULTILINE)


# --- LLaMA-Factory


@pytest.mark.extended(but="full")
@pytest.mark.slow
@needs("llamafactory")
@pytest.mark.parametrize("name", LLAMAFACTORY_SFT)
def test_llamafactory_sft(name: str, tiny_model: Path, llamafactory_data: Path, tmp_path: Path) -> None:
    settings = llamafactory_settings(tiny_model, llamafactory_data, tmp_path / "out", "tiny_sft")
    llamafactory(YAML / name, settings | LLAMAFACTORY_SFT[name], cwd=tmp_path)
    muon, adamw = EXPECTED[name]
    saved = assert_routed(tmp_path / "out" / "checkpoint-3", muon=muon, adamw=adamw, steps=3)
    assert {group["initial_lr"] for group in saved.groups} == {read_yaml(YAML / name)["learning_rate"]}


@pytest.mark.extended
@pytest.mark.slow
@needs("llamafactory")
def test_llamafactory_pretrain_equals_a_plain_loop(
    tiny_model: Path, llamafactory_data: Path, rounding: dict[str, float], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    changes = {
        **llamafactory_settings(tiny_model, llamafactory_data, tmp_path / "out", "tiny_pt"),
        "optim_args": "ns_dtype=fp32",
        "disable_shuffling": True,  # the loop goes through the data in order
        "warmup_steps": 1,
        "learning_rate": 0.001,
    }
    llamafactory(YAML / LLAMAFACTORY_PRETRAIN, changes, cwd=tmp_path)
    assert_routed(tmp_path / "out" / "checkpoint-3", muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=3)

    settings = read_yaml(YAML / LLAMAFACTORY_PRETRAIN) | changes
    blocks = blocks_of(fixtures_text.texts(), tiny_model, settings["cutoff_len"] - 1)  # as it does when it packs
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    plain_loop(model, blocks, settings["per_device_train_batch_size"], settings)
    assert_close(weights(tmp_path / "out"), model.state_dict(), weights(tiny_model), rounding)


@pytest.mark.slow
@needs("llamafactory")
def test_llamafactory_fsdp2(
    tiny_model: Path, llamafactory_data: Path, rounding: dict[str, float], tmp_path: Path
) -> None:
    """LLaMA-Factory's own launcher, in two processes with FSDP2 and in one without; what each rank runs is the same."""
    launcher = importlib.util.find_spec("llamafactory")
    assert launcher is not None
    assert launcher.origin is not None
    script = Path(launcher.origin).with_name("launcher.py")
    full = {"optim_args": "ns_dtype=fp32", "learning_rate": 0.001, "warmup_steps": 1, "disable_shuffling": True}
    found = {}
    for name, processes, command in (
        ("one", 1, (BIN / "python", script)),
        ("two", 2, (BIN / "torchrun", "--standalone", "--nproc-per-node", 2, CPU_FSDP, script)),
    ):
        settings = llamafactory_settings(tiny_model, llamafactory_data, tmp_path / name, "tiny_sft") | full
        settings["per_device_train_batch_size"] = 2 // processes
        path = tmp_path / f"{name}.yaml"
        everything = read_yaml(YAML / LLAMAFACTORY_FSDP2) | {
            k: str(v) if isinstance(v, Path) else v for k, v in settings.items()
        }
        if processes == 1:
            del everything["fsdp"], everything["fsdp_config"]
        path.write_text(json.dumps(everything), encoding="utf-8")
        run([*command, path], cwd=tmp_path, FSDP_STATE_DICT_TYPE="FULL_STATE_DICT")
        assert (tmp_path / name / "checkpoint-3" / "optimizer.bin").exists() is (processes == 2)
        found[name] = weights(tmp_path / name)
    assert_close(found["two"], found["one"], weights(tiny_model), rounding)


# --- LLaMA-Factory v1


@pytest.mark.extended
@pytest.mark.slow
@needs("llamafactory")
def test_llamafactory_v1_in_one_process_and_with_fsdp2(
    tiny_model: Path, llamafactory_data: Path, rounding: dict[str, float], tmp_path: Path
) -> None:
    found = {}
    for name, path, processes in (("one", LLAMAFACTORY_V1, 1), ("fsdp2", LLAMAFACTORY_V1_FSDP2, 2)):
        settings = {
            "model": tiny_model,
            "train_dataset": fixtures_text.write_v1_data(tmp_path, llamafactory_data),
            "output_dir": tmp_path / name,
            "cutoff_len": 64,
            "micro_batch_size": 4 // processes,
            "max_steps": 3,
            "save_steps": 3,
            "learning_rate": 0.001,
            "bf16": False,
            "batching_workers": 0,
            "optim_config.ns_dtype": "fp32",
        }
        launch = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "MASTER_PORT": free_port()} if processes == 2 else {}
        printed = llamafactory_v1(YAML / path, settings, cwd=tmp_path, **launch)
        assert printed.count("which parameter goes where") == 1
        assert ("2 distributed tasks" in printed) is (processes == 2)
        found[name] = weights(tmp_path / name)
    assert (tmp_path / "fsdp2" / "checkpoint-3" / "optimizer" / ".metadata").exists(), "it was not sharded"
    assert_close(found["fsdp2"], found["one"], weights(tiny_model), rounding)


def test_llamafactory_v1_ulysses_files_differ_in_the_place_of_their_keys_alone() -> None:
    inside, top_level = (read_yaml(YAML / name) for name in LLAMAFACTORY_V1_ULYSSES)
    moved = {key: inside["dist_config"].pop(key) for key in ("cp_mode", "cp_size")}
    assert inside | moved == top_level
    assert moved == {"cp_mode": "ulysses", "cp_size": 2}


@pytest.mark.extended
@pytest.mark.slow
@needs("llamafactory")
def test_llamafactory_v1_reads_the_ulysses_file_of_its_layout(tmp_path: Path) -> None:
    code = "from llamafactory.v1.config import get_args; print('read', get_args()[2].dist_config)"
    inside, top_level = (YAML / name for name in LLAMAFACTORY_V1_ULYSSES)
    if v1_has_top_level_keys():
        assert "read {'name': 'fsdp2'}" in python("-c", code, top_level, cwd=tmp_path)
        return
    assert "read {'name': 'fsdp2', 'cp_mode': 'ulysses', 'cp_size': 2}" in python("-c", code, inside, cwd=tmp_path)
    assert "cp_mode" in python("-c", code, top_level, cwd=tmp_path, fails=True)


# --- TRL


def trl_has_a_command_line() -> bool:
    """Before version 1, its imports fail under transformers 5."""
    try:
        return int(importlib.metadata.version("trl").split(".")[0]) >= 1
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not trl_has_a_command_line(), reason="trl >= 1 is not installed")
def test_trl_sft(tiny_model: Path, tmp_path: Path) -> None:
    settings = {
        "model_name_or_path": tiny_model,
        "dataset_name": fixtures_text.write_messages(tmp_path / "data"),
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "gradient_accumulation_steps": 1,
        "bf16": False,
        "use_cpu": True,
    }
    run([BIN / "trl", "sft", "--config", YAML / TRL, *options(settings)], cwd=tmp_path)
    saved = assert_routed(tmp_path / "out" / "checkpoint-2", muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=2)
    assert {group["initial_lr"] for group in saved.groups} == {read_yaml(YAML / TRL)["learning_rate"]}


# --- examples/train.py


@pytest.mark.slow
def test_trainer_equals_a_plain_loop_and_resumes(tiny_model: Path, rounding: dict[str, float], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text(fixtures_text.texts()[0], encoding="utf-8")
    fixtures_text.write_jsonl(data / "b.jsonl", [{"text": text} for text in fixtures_text.texts()[1:9]])
    (data / "c.json").write_text(json.dumps([{"text": t} for t in fixtures_text.texts()[9:20]]), encoding="utf-8")
    changes = {
        "model_name_or_path": tiny_model,
        "data_path": data,
        "output_dir": tmp_path / "out",
        "block_size": 64,
        "eval_fraction": 0.1,
        "max_steps": 4,
        "save_steps": 2,
        "eval_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "warmup_steps": 1,
        "learning_rate": 0.001,
        "optim_args": "ns_dtype=fp32",
        "train_sampling_strategy": "sequential",  # the loop goes through the data in order
        "bf16": False,
        "use_cpu": True,
    }
    python(TRAIN, YAML / TRAINER, *options(changes), cwd=tmp_path)
    straight = tmp_path / "out" / "checkpoint-4"
    assert_routed(straight, muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=4)

    settings = read_yaml(YAML / TRAINER) | changes
    blocks = blocks_of(fixtures_text.texts(20), tiny_model, settings["block_size"])
    held_out = round(len(blocks) * 0.1)
    torch.manual_seed(settings["seed"])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plain_loop(model, blocks[:-held_out], 4, settings)
    assert_close(weights(tmp_path / "out"), model.state_dict(), start, rounding)
    metrics = json.loads((tmp_path / "out" / "eval_results.json").read_text(encoding="utf-8"))
    loss = model(input_ids=blocks[-held_out:], labels=blocks[-held_out:]).loss.item()
    # Older releases of transformers 5 divide by all 64 labels, the first of which nothing predicts.
    assert any(metrics["eval_loss"] == pytest.approx(value, rel=1e-5) for value in (loss, loss * 63 / 64))
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))

    interrupt(tmp_path / "out", after=2, destination=tmp_path / "resumed")
    python(TRAIN, YAML / TRAINER, *options(changes | {"output_dir": tmp_path / "resumed"}), cwd=tmp_path)
    assert_resumed(tmp_path / "resumed" / "checkpoint-4", straight)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.skipif(
    ACCELERATE_VERSION < (1, 13), reason="no HSDP here, and transformers takes no state_dict_type from fsdp_config"
)
def test_fsdp2_and_hsdp_equal_one_process(tiny_model: Path, rounding: dict[str, float], tmp_path: Path) -> None:
    """The Trainer's own FSDP2 on two processes and accelerate's config files on four, against one process."""
    fixtures_text.write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in fixtures_text.texts(20)])
    inputs = {"model_name_or_path": tiny_model, "data_path": tmp_path / "data.jsonl"}
    found = {}
    for name, processes, launcher, path in (
        ("one", 1, (BIN / "python",), TRAINER),
        ("fsdp2", 2, (BIN / "torchrun", "--standalone", "--nproc-per-node", 2, CPU_FSDP), TRAINER_FSDP2),
        *((name, 4, (*accelerate_launch(name, tmp_path), CPU_FSDP), TRAINER) for name in ACCELERATE),
    ):
        output = tmp_path / name
        changes = TINY | inputs | {"output_dir": output, "per_device_train_batch_size": 4 // processes}
        changes |= {"from_scratch": False, "weight_decay": 0.1, "gradient_checkpointing": False}
        changes |= {"adam_beta2": 0.95, "lr_scheduler_type": "cosine"}
        printed = run([*launcher, TRAIN, YAML / path, *options(changes)], cwd=tmp_path)
        assert printed.count("which parameter goes where") == 1, "rank 0 alone tells the routes"
        assert (output / "checkpoint-3" / "optimizer.bin").exists() is (processes > 1), f"{name} was not sharded"
        found[name] = weights(output)
    start = weights(tiny_model)
    for name in found:
        assert_close(found[name], found["one"], start, rounding)


def accelerate_launch(name: str, folder: Path) -> list[object]:
    """An accelerate config file, on four processes of this machine."""
    config = read_yaml(YAML / name) | {"num_machines": 1, "num_processes": 4, "mixed_precision": "no"}
    if sizes := config.get("parallelism_config"):
        assert sizes["parallelism_config_dp_replicate_size"] == 2
        sizes["parallelism_config_dp_shard_size"] = 2
    (folder / f"config_{name}").write_text(json.dumps(config), encoding="utf-8")
    return [BIN / "accelerate", "launch", "--config_file", folder / f"config_{name}", "--main_process_port", 0]


@pytest.fixture(scope="module")
def train_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_train", TRAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "settings.yaml is not a file"),
        ("just text", [], "does not hold keys and values"),
        ("data_path: x", [], "model_name_or_path is missing"),
        ("model_name_or_path: x", [], "data_path is missing"),
        ("optimm: muon\noptim: muon", [], "unknown keys optimm"),
        ("{model_name_or_path: x, data_path: x, eval_fraction: 1}", [], "eval_fraction between 0 and 1"),
        ("{model_name_or_path: x, data_path: x}", ["--block_size", "1"], "block_size must be at least 2"),
    ],
)
def test_trainer_script_refuses_settings(
    content: str | None,
    arguments: list[str],
    message: str,
    train_script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # TrainingArguments may make its output folder
    if content is not None:
        (tmp_path / "settings.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match=message):
        train_script.parse_arguments([str(tmp_path / "settings.yaml"), *arguments])


def test_trainer_script_wants_a_settings_file(train_script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="usage"):
        train_script.parse_arguments(["--optim", "muon"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "does not exist"),
        ({}, "0 texts with 0 tokens"),
        ({"a.txt": " \n"}, "0 texts with 0 tokens"),
        ({"a.txt": "short"}, "1 texts with . tokens; two examples"),
        ({"a.jsonl": '{"content": "x"}\n'}, "a.jsonl has no 'text'; see text_column"),
        ({"a.json": '{"text": "x"}'}, "a.json has no 'text'"),
    ],
)
def test_trainer_script_refuses_data(
    files: dict[str, str] | None, message: str, train_script: ModuleType, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    if files is not None:
        data.mkdir()
        for name, content in files.items():
            (data / name).write_text(content, encoding="utf-8")
    script = train_script.ScriptArguments(data_path=str(data), block_size=64)
    with pytest.raises(SystemExit, match=message):
        train_script.make_examples(script, fixtures_text.build_tokenizer())
