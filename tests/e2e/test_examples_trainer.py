"""The examples of the Trainer, run as they are but for a tiny model, tiny data, few steps and the CPU.

`examples/train.py` is also tested for the settings and data that it refuses.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests import fixtures_text
from tests.e2e.example_files import (
    ACCELERATE,
    ALL_MATRICES,
    ALL_OTHERS,
    CPU_FSDP,
    TRAIN,
    TRAINER,
    TRAINER_FSDP2,
)
from tests.e2e.harness import (
    BIN,
    TINY,
    YAML,
    assert_close,
    assert_resumed,
    assert_routed,
    blocks_of,
    interrupt,
    options,
    plain_loop,
    python,
    read_yaml,
    run,
    weights,
)

ACCELERATE_VERSION = tuple(int(part) for part in importlib.metadata.version("accelerate").split(".")[:2])


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
    # Older releases of transformers 5 divide by all 64 labels, although no token predicts the first.
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
    """Run the Trainer's own FSDP2 on two processes and accelerate's config files on four."""
    fixtures_text.write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in fixtures_text.texts(20)])
    inputs = {"model_name_or_path": tiny_model, "data_path": tmp_path / "data.jsonl"}
    results = {}
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
        assert printed.count("which parameter goes where") == 1, "rank 0 alone logs the routes"
        assert (output / "checkpoint-3" / "optimizer.bin").exists() is (processes > 1), f"{name} was not sharded"
        results[name] = weights(output)
    start = weights(tiny_model)
    for name in results:
        assert_close(results[name], results["one"], start, rounding)


def accelerate_launch(name: str, folder: Path) -> list[object]:
    """Return a launch of four processes of this machine with an accelerate config file."""
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
    sys.modules[spec.name] = module  # dataclasses look up their module
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
    monkeypatch.chdir(tmp_path)  # TrainingArguments may create its output folder
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
