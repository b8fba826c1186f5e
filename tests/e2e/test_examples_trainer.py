"""The examples of Trainer, a plain loop and TRL, run as they are but for a tiny model, tiny data and few steps."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.harness import (
    ALL_MATRICES,
    ALL_OTHERS,
    CPU_FSDP,
    PLAIN_LOOP,
    TINY,
    TRAIN,
    TRAINER,
    TRAINER_FSDP2,
    TRL,
    YAML,
    assert_close,
    assert_resumed,
    assert_routed,
    blocks_of,
    interrupt,
    options,
    plain_loop,
    plain_loop_options,
    read_yaml,
    server,
    weights,
)
from tests.support import fixtures_text

pytestmark = pytest.mark.slow

ACCELERATE_VERSION = tuple(int(part) for part in importlib.metadata.version("accelerate").split(".")[:2])


@pytest.mark.extended
def test_trainer_equals_a_plain_loop_and_resumes(tiny_model, rounding, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    texts = fixtures_text.texts(20)
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text(texts[0], encoding="utf-8")
    fixtures_text.write_jsonl(data / "b.jsonl", [{"text": text} for text in texts[1:9]])
    (data / "c.json").write_text(json.dumps([{"text": text} for text in texts[9:]]), encoding="utf-8")
    changes = TINY | {"model_name_or_path": tiny_model, "data_path": data, "max_steps": 4, "save_steps": 2}
    changes |= {"eval_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

    def train(name):
        words = options(changes | {"output_dir": tmp_path / name})
        server.run([TRAIN, YAML / TRAINER, *words], cwd=tmp_path)
        return tmp_path / name / "checkpoint-4"

    straight = train("out")
    assert_routed(straight, muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=4)

    settings = read_yaml(YAML / TRAINER) | changes
    blocks = blocks_of(texts, tiny_model, settings["block_size"])
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

    checkpoint = interrupt(tmp_path / "out", after=2, destination=tmp_path / "resumed")
    killed_while_saving = shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-3"))
    (killed_while_saving / "trainer_state.json").write_text('{"epoch": 1.')  # Trainer writes it last
    assert_resumed(train("resumed"), straight)


@pytest.mark.extended
@pytest.mark.skipif(ACCELERATE_VERSION < (1, 13), reason="transformers takes no state_dict_type from fsdp_config")
def test_two_processes_with_fsdp2_equal_one(tiny_model, rounding, tmp_path):
    """Run Trainer's own FSDP2; `test_trainer_layouts.py` has its settings, test_typed.py `accelerate launch`."""
    fixtures_text.write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in fixtures_text.texts(20)])
    common = TINY | {"model_name_or_path": tiny_model, "data_path": tmp_path / "data.jsonl", "from_scratch": False}
    common |= {"weight_decay": 0.1, "gradient_checkpointing": False, "adam_beta2": 0.95, "lr_scheduler_type": "cosine"}
    runs = (("one", 1, [TRAIN, YAML / TRAINER]), ("fsdp2", 2, [CPU_FSDP, TRAIN, YAML / TRAINER_FSDP2]))
    for name, ranks, script in runs:
        changes = common | {"output_dir": tmp_path / name, "per_device_train_batch_size": 4 // ranks}
        printed = server.run([*script, *options(changes)], cwd=tmp_path, ranks=ranks)
        assert printed.count("which parameter goes where") == 1, "rank 0 alone logs the routes"
        sharded = (tmp_path / name / "checkpoint-3" / "optimizer.bin").exists()
        assert sharded is (ranks > 1), f"{name} was not sharded"
    assert_close(weights(tmp_path / "fsdp2"), weights(tmp_path / "one"), weights(tiny_model), rounding)


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
LAUNCHES = {"one": (1, {}), "ddp": (2, {}), "fsdp2": (2, FSDP2)}


@pytest.mark.extended
def test_the_plain_loop_equals_one_process_and_resumes(tiny_model, rounding, tmp_path):
    for name, (ranks, variables) in LAUNCHES.items():
        if name == "fsdp2" and ACCELERATE_VERSION < (1, 13):
            continue
        for folder, *more in (
            ("straight", "--steps", 3),
            ("half", "--steps", 2),
            ("resumed", "--steps", 3, "--resume", tmp_path / name / "half" / ("" if name == "ddp" else "checkpoint")),
        ):
            words = plain_loop_options(tiny_model, tmp_path, "--output", tmp_path / name / folder, *more)
            script = [CPU_FSDP, PLAIN_LOOP] if name == "fsdp2" else [PLAIN_LOOP]
            printed = server.run([*script, *words], cwd=tmp_path, ranks=ranks, ACCELERATE_USE_CPU="true", **variables)
            assert printed.count("which parameter goes where") == 1
            assert printed.count("step 2 loss") == (folder != "resumed")
            assert printed.count("step 3 loss") == (folder != "half")
        straight, resumed, one = (
            weights(tmp_path / f) for f in (f"{name}/straight", f"{name}/resumed", "one/straight")
        )
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
        assert_close(straight, one, weights(tiny_model), rounding)


DIES_IN_ITS_SECOND_SAVE = """
import os, runpy, signal, sys
from accelerate import Accelerator

save_state, folders = Accelerator.save_state, []

def save_and_die(self, folder):
    save_state(self, folder)
    folders.append(folder)
    if len(folders) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

Accelerator.save_state = save_and_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.extended
def test_the_plain_loop_resumes_exactly_after_a_kill_during_a_save(tiny_model, tmp_path):
    """With dropout, whose random numbers must continue, too."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.3}), encoding="utf-8")
    words = [PLAIN_LOOP, *plain_loop_options(model, tmp_path, "--steps", 4), "--output"]
    common = {"cwd": tmp_path, "ACCELERATE_USE_CPU": "true"}
    server.run([*words, tmp_path / "straight"], **common)
    killed = [*words, tmp_path / "killed", "--save-every"]
    assert "step 2 loss" in server.run_code(DIES_IN_ITS_SECOND_SAVE, *killed, 1, **common, fails=True)
    printed = server.run([*killed, 2, "--resume", tmp_path / "killed"], **common)
    assert [f"step {step} loss" in printed for step in (1, 2, 3, 4)] == [False, True, True, True]
    torch.testing.assert_close(weights(tmp_path / "killed"), weights(tmp_path / "straight"), rtol=0, atol=0)
    # Killed between the two renames: the checkpoint before it is still there under its other name.
    (tmp_path / "killed" / "checkpoint").rename(tmp_path / "killed" / "checkpoint.old")
    assert "step" not in server.run([*killed, 2, "--resume", tmp_path / "killed"], **common).partition("adamw:")[2]
    assert "has no complete checkpoint" in server.run([*words, "x", "--resume", tmp_path], **common, fails=True)


# Version 1 is the first that imports under transformers 5; `make test-versions` has older ones, too.
is_older = int(importlib.metadata.version("trl").partition(".")[0]) < 1 if importlib.util.find_spec("trl") else True


@pytest.mark.skipif(is_older, reason="trl >= 1 is not installed")
@pytest.mark.promise("trl")
def test_trl(tiny_model, tmp_path):
    """Train with SFT; test_typed.py runs the other stages."""
    settings = {
        "model_name_or_path": tiny_model,
        "dataset_name": fixtures_text.write_messages(tmp_path / "data"),
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "gradient_accumulation_steps": 1,
        "bf16": False,
        "use_cpu": True,
    }
    package = importlib.util.find_spec("trl").origin
    script = Path(package).parent / "scripts" / "sft.py"
    server.run([script, "--config", YAML / TRL["sft"], *options(settings)], cwd=tmp_path)
    saved = assert_routed(tmp_path / "out" / "checkpoint-2", muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=2)
    assert {group["initial_lr"] for group in saved.groups} == {read_yaml(YAML / TRL["sft"])["learning_rate"]}
