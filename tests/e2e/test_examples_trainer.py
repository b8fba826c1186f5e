"""The examples of the Trainer and of a plain loop, run as they are but for a tiny model, tiny data and few steps.

`examples/train.py` is also tested for the settings and data that it refuses.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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
    PLAIN_LOOP,
    TINY,
    YAML,
    accelerate_variables,
    assert_close,
    assert_resumed,
    assert_routed,
    blocks_of,
    interrupt,
    options,
    plain_loop,
    plain_loop_options,
    read_yaml,
    run,
    server,
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
    server.run([TRAIN, YAML / TRAINER, *options(changes)], cwd=tmp_path)
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
    changes["output_dir"] = tmp_path / "resumed"
    server.run([TRAIN, YAML / TRAINER, *options(changes)], cwd=tmp_path)
    assert_resumed(tmp_path / "resumed" / "checkpoint-4", straight)


@pytest.mark.newest
@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.skipif(
    ACCELERATE_VERSION < (1, 13), reason="no HSDP here, and transformers takes no state_dict_type from fsdp_config"
)
def test_fsdp2_and_hsdp_equal_one_process(tiny_model: Path, rounding: dict[str, float], tmp_path: Path) -> None:
    """Run the Trainer's own FSDP2 on two processes, and on four what accelerate's config files set; one is launched."""
    fixtures_text.write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in fixtures_text.texts(20)])
    inputs = {"model_name_or_path": tiny_model, "data_path": tmp_path / "data.jsonl"}
    results = {}
    for name, ranks, path in (
        ("one", 1, TRAINER),
        ("fsdp2", 2, TRAINER_FSDP2),
        ("launched", 2, TRAINER),
        *((name, 4, TRAINER) for name in ACCELERATE),
    ):
        output = tmp_path / name
        changes = TINY | inputs | {"output_dir": output, "per_device_train_batch_size": 4 // ranks}
        changes |= {"from_scratch": False, "weight_decay": 0.1, "gradient_checkpointing": False}
        changes |= {"adam_beta2": 0.95, "lr_scheduler_type": "cosine"}
        words = [CPU_FSDP, TRAIN, YAML / path, *options(changes)]
        if name == "launched":
            file = tmp_path / "config.json"
            file.write_text(json.dumps(accelerate_config(ACCELERATE[0], 2)), encoding="utf-8")
            launcher = [BIN / "accelerate", "launch", "--config_file", file, "--main_process_port", 0]
            printed = run([*launcher, *words], cwd=tmp_path)
        else:
            variables = accelerate_variables(accelerate_config(name, 4), tmp_path) if name in ACCELERATE else {}
            printed = server.run(words[name == "one" :], cwd=tmp_path, ranks=ranks, **variables)
        assert printed.count("which parameter goes where") == 1, "rank 0 alone logs the routes"
        assert (output / "checkpoint-3" / "optimizer.bin").exists() is (ranks > 1), f"{name} was not sharded"
        results[name] = weights(output)
    start = weights(tiny_model)
    for name in results:
        assert_close(results[name], results["one"], start, rounding)


def accelerate_config(name: str, processes: int) -> dict[str, Any]:
    """Return an accelerate config file for processes of this machine."""
    config = read_yaml(YAML / name) | {"num_machines": 1, "num_processes": processes, "mixed_precision": "no"}
    if sizes := config.get("parallelism_config"):
        assert sizes["parallelism_config_dp_replicate_size"] == 2
        sizes["parallelism_config_dp_shard_size"] = 2
    return config


# --- the plain loop, and a sweep

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
LAUNCHES = {"one": (1, {}), "ddp": (2, {}), "fsdp2": (2, FSDP2)}


@pytest.mark.extended
@pytest.mark.slow
def test_the_plain_loop_equals_one_process_and_resumes(
    tiny_model: Path, rounding: dict[str, float], tmp_path: Path
) -> None:
    results = {}
    for name, (ranks, variables) in LAUNCHES.items():
        if name == "fsdp2" and ACCELERATE_VERSION < (1, 13):
            continue
        for folder, *more in (
            ("straight", "--steps", 3),
            ("half", "--steps", 2),
            ("resumed", "--steps", 3, "--resume", tmp_path / name / "half" / "checkpoint"),
        ):
            words = plain_loop_options(tiny_model, tmp_path, "--output", tmp_path / name / folder, *more)
            script = [CPU_FSDP, PLAIN_LOOP] if name == "fsdp2" else [PLAIN_LOOP]
            printed = server.run([*script, *words], cwd=tmp_path, ranks=ranks, ACCELERATE_USE_CPU="true", **variables)
            assert printed.count("which parameter goes where") == 1
            assert printed.count("step 2 loss") == (folder != "resumed")
            assert printed.count("step 3 loss") == (folder != "half")
        results[name], resumed = (weights(tmp_path / name / folder) for folder in ("straight", "resumed"))
        assert all(torch.equal(value, resumed[key]) for key, value in results[name].items())
    for result in results.values():
        assert_close(result, results["one"], weights(tiny_model), rounding)


@pytest.mark.newest
@pytest.mark.slow
@pytest.mark.extended
def test_a_sweep_of_the_trainer_script(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("\n".join(fixtures_text.texts()[:9]), encoding="utf-8")
    settings = (
        read_yaml(YAML / TRAINER)
        | TINY
        | {
            "model_name_or_path": str(tiny_model),
            "data_path": str(tmp_path / "data"),
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 2,
            "max_steps": 500,
        }
    )
    (tmp_path / "run.json").write_text(json.dumps(settings))
    command = [BIN / "hf-muon", "sweep", "run.json", "--steps", "10", "--rates", "1e-4,3e-3"]
    output = run([*command, "--", sys.executable, TRAIN, "{file}"], cwd=tmp_path)
    assert "Lowest evaluation loss: " in output
    assert " at learning_rate 0.003" in output

    # The same by hand, with a checkpoint, whose state holds the losses.
    by_hand = settings | {
        "learning_rate": 3e-3,
        "max_steps": 10,
        "save_steps": 10,
        "logging_steps": 1,
        "eval_steps": 10,
        "output_dir": str(tmp_path / "hand"),
    }
    (tmp_path / "hand.yaml").write_text(json.dumps(by_hand))
    server.run([TRAIN, "hand.yaml"], cwd=tmp_path)
    state = json.loads((tmp_path / "hand" / "checkpoint-10" / "trainer_state.json").read_text())
    trial = json.loads((tmp_path / "run_sweep" / "0.003" / "result.json").read_text())
    assert trial["losses"] == {str(line["step"]): line["loss"] for line in state["log_history"] if "loss" in line}
    assert trial["eval_loss"] == statistics.fmean(
        line["eval_loss"] for line in state["log_history"] if "eval_loss" in line
    )
    assert not list((tmp_path / "run_sweep").rglob("*.safetensors"))


# --- what the script refuses


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
    ("content", "message", "words"),
    [
        (None, "settings.yaml is not a file", []),
        ("just text", "does not hold keys and values", []),
        ("data_path: x", "model_name_or_path is missing", []),
        ("model_name_or_path: x", "data_path is missing", []),
        ("optimm: muon\noptim: muon", "unknown keys optimm", []),
        ("{model_name_or_path: x, data_path: x, eval_fraction: 1}", "eval_fraction between 0 and 1", []),
        ("{model_name_or_path: x, data_path: x}", "block_size must be at least 2", ["--block_size", "1"]),
    ],
)
def test_trainer_script_refuses_settings(
    content: str | None,
    message: str,
    words: list[str],
    train_script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # TrainingArguments may create its output folder
    if content is not None:
        (tmp_path / "settings.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match=message):
        train_script.parse_arguments([str(tmp_path / "settings.yaml"), *words])
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
