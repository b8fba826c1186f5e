"""A pretrained chat model, SmolLM2-135M-Instruct cut to four layers, in each program: what people do with real weights.

Of each run: the losses are finite and fall; it is killed, started again, and ends with the bits of the uninterrupted
one; what it saves loads; `hf-muon inspect` and `plan` say before which parameter goes where and what its moments take.
`make real` runs this in both environments.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from tests.e2e.deepspeed_runs import JSON
from tests.e2e.harness import (
    BIN,
    CPU_FSDP,
    CPU_RANKS,
    FINETUNE,
    LLAMAFACTORY_V1,
    ROOT,
    TIMEOUT,
    TRAIN,
    TRAINER,
    TRAINER_FSDP2,
    TRL,
    YAML,
    Saved,
    environment_of,
    free_port,
    is_marked,
    kill,
    mark,
    options,
    read_yaml,
    run,
    weights,
)
from tests.e2e.test_dry_run import inspect, table_in
from tests.support import fixtures_text

INPUT = ROOT / "build" / "finetune" / "input"
LAYERS, STEPS, ROWS = 4, 6, 4
HAS_LLAMAFACTORY = importlib.util.find_spec("llamafactory") is not None
Settings = dict[str, Any]


class Run(NamedTuple):
    """A command, its variables, and what of a run it has.

    Attributes:
        shown: the command that a person would give, where tests need another one to have FSDP2 on a CPU.
        resumes: a second start of the same command goes on from the last checkpoint.
    """

    command: list[Any]
    variables: dict[str, str] = {}
    ranks: int = 1
    shown: bool = True
    resumes: bool = True


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of the first layers of the model, with all of its embeddings."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (INPUT / "manifest.json").is_file():
        pytest.fail(f"{INPUT.relative_to(ROOT)} is missing: `make real` makes it")
    folder = tmp_path_factory.mktemp("smollm2")
    source = INPUT / "model"
    AutoModelForCausalLM.from_pretrained(source, num_hidden_layers=LAYERS, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with the same few questions about Python in the formats of all programs."""
    folder = tmp_path_factory.mktemp("data")
    rows = json.loads((INPUT / "data" / "train.json").read_text(encoding="utf-8"))[: 2 * ROWS]
    pairs = [
        {"question": row["question"], "answer": row["answer"], "other": other["answer"]}
        for row, other in zip(rows[:ROWS], rows[ROWS:], strict=True)
    ]
    rated = [{**row, "good": i % 2 == 0} for i, row in enumerate(pairs)]
    columns = {"prompt": "question", "response": "answer"}
    info = {
        "sft": {"file_name": "pairs.json", "columns": columns},
        "kto": {"file_name": "rated.json", "columns": {**columns, "kto_tag": "good"}},
        "dpo": {
            "file_name": "pairs.json",
            "ranking": True,
            "columns": {"prompt": "question", "chosen": "answer", "rejected": "other"},
        },
    }
    for name, content in (("pairs", pairs), ("rated", rated), ("dataset_info", info)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    v1 = {"sft": {"path": str(folder / "v1.jsonl"), "source": "local", "converter": "alpaca"}}
    (folder / "v1.yaml").write_text(yaml.safe_dump(v1), encoding="utf-8")
    alpaca = [{"instruction": row["question"], "input": "", "output": row["answer"]} for row in pairs]
    fixtures_text.write_jsonl(folder / "v1.jsonl", alpaca)
    says = [[{"role": "user", "content": row["question"]}] for row in pairs]
    answers = {key: [[{"role": "assistant", "content": row[key]}] for row in pairs] for key in ("answer", "other")}
    chats = [{"messages": ask + answer} for ask, answer in zip(says, answers["answer"], strict=True)]
    fixtures_text.write_jsonl(folder / "trl_sft" / "train.jsonl", chats)
    preferred = [
        {"prompt": ask, "chosen": good, "rejected": bad}
        for ask, good, bad in zip(says, answers["answer"], answers["other"], strict=True)
    ]
    fixtures_text.write_jsonl(folder / "trl_dpo" / "train.jsonl", preferred)
    # One example is held out, so that the others are those of each step.
    fixtures_text.write_jsonl(folder / "trainer.jsonl", [*pairs, pairs[0]])
    return folder


# --- the programs


def _common(model: Path, output: Path, ranks: int = 1) -> Settings:
    """Return settings of Trainer: each step sees the same rows, so that its loss has to fall."""
    return {
        "model_name_or_path": str(model),
        "output_dir": str(output),
        "optim": "muon",
        "learning_rate": 3e-4,
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        "logging_steps": 1,
        "per_device_train_batch_size": ROWS // ranks,
        "gradient_accumulation_steps": 1,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "save_strategy": "steps",
        "eval_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
    }


def llamafactory(changes: Settings, ranks: int = 1, **more: Any) -> Callable[..., Run]:
    def build(model: Path, data: Path, output: Path) -> Run:
        settings = read_yaml(YAML / FINETUNE) | _common(model, output, ranks)
        settings |= {"dataset_dir": str(data), "dataset": changes.get("stage", "sft"), "save_total_limit": None}
        settings |= {"eval_on_start": False, "do_eval": False, "eval_dataset": None, **changes}
        if ranks > 1:
            del settings["use_cpu"]
        file = output.with_suffix(".yaml")
        file.write_text(json.dumps(settings), encoding="utf-8")
        launched = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(ranks), "MASTER_PORT": free_port()}
        return Run([BIN / "llamafactory-cli", "train", file], launched if ranks > 1 else {}, ranks, **more)

    return build


def llamafactory_v1(model: Path, data: Path, output: Path) -> Run:
    settings = read_yaml(YAML / LLAMAFACTORY_V1) | {
        "model": str(model),
        "train_dataset": str(data / "v1.yaml"),
        "cutoff_len": 96,
        "micro_batch_size": ROWS,
        "learning_rate": 3e-4,
        "max_steps": STEPS,
        "save_steps": None,
        "resume_from_checkpoint": None,
        "logging_steps": 1,
        "bf16": False,
        "batching_workers": 0,
        "output_dir": str(output),
    }
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    # Without FSDP2, v1 does not resume models with tied embeddings: docs/recipes/llamafactory.md.
    return Run([BIN / "llamafactory-cli", "sft", file], {"USE_V1": "1"}, resumes=False)


def trl(stage: str) -> Callable[..., Run]:
    def build(model: Path, data: Path, output: Path) -> Run:
        settings = _common(model, output) | {"dataset_name": str(data / f"trl_{stage}"), "max_length": 96}
        last = output / f"checkpoint-{STEPS // 2}"
        if last.is_dir():
            settings["resume_from_checkpoint"] = str(last)
        return Run([BIN / "trl", stage, "--config", YAML / TRL[stage], *options(settings)])

    return build


def trainer(example: str = TRAINER, changes: Settings | None = None, ranks: int = 1, **more: Any) -> Callable[..., Run]:
    def build(model: Path, data: Path, output: Path) -> Run:
        settings = _common(model, output, ranks) | {
            "data_path": str(data / "trainer.jsonl"),
            "prompt_column": "question",
            "text_column": "answer",
            "from_scratch": False,
            "block_size": 96,
            "eval_fraction": 0.1,
            **(changes or {}),
        }
        settings["use_cpu"] = "deepspeed" not in settings
        words = [TRAIN, YAML / example, *options(settings)]
        if ranks > 1:
            torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", ranks]
            return Run(
                [*torchrun, *([CPU_FSDP] if "fsdp" in read_yaml(YAML / example) else []), *words], {}, ranks, **more
            )
        return Run([BIN / "python", *words], **more)

    return build


LORA = {"finetuning_type": "lora", "optim_args": "lora=muon", "lora_target": "all", "lora_rank": 8}
FSDP = json.dumps(
    read_yaml(YAML / TRAINER_FSDP2)["fsdp_config"] | {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
)
RUNS = {
    "llamafactory sft": llamafactory({}),
    "llamafactory dpo": llamafactory({"stage": "dpo", "pref_beta": 0.1}),
    "llamafactory kto": llamafactory({"stage": "kto"}),
    "llamafactory freeze": llamafactory({"finetuning_type": "freeze", "freeze_trainable_layers": 2}),
    "llamafactory lora": llamafactory(LORA | {"learning_rate": 3e-3}),
    "llamafactory zero2": llamafactory({"deepspeed": str(JSON / "zero2.json")}, 2),
    "llamafactory zero3": llamafactory({"deepspeed": str(JSON / "zero3.json")}, 2),
    "llamafactory v1": llamafactory_v1,
    "trl sft": trl("sft"),
    "trl dpo": trl("dpo"),
    "trainer": trainer(),
    "trainer fsdp2": trainer(TRAINER_FSDP2, {"fsdp_config": FSDP}, 2, shown=False),
    "trainer zero2": trainer(changes={"deepspeed": str(JSON / "zero2.json")}, ranks=2),
    "trainer zero3": trainer(changes={"deepspeed": str(JSON / "zero3.json")}, ranks=2),
}
PLANNED = {"llamafactory freeze", "llamafactory lora", "trl sft"}
HERE = [name for name in RUNS if name.startswith("llamafactory") is HAS_LLAMAFACTORY]


# --- what is shown


def losses_of(output: Path) -> list[float]:
    """Return the training loss of each step, as Trainer has saved it, or as LLaMA-Factory v1 has logged it."""
    state = output / f"checkpoint-{STEPS}" / "trainer_state.json"
    if state.is_file():
        history = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    else:
        lines = (output / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
        history = [json.loads(line) for line in lines]
    return [entry["loss"] for entry in history if "loss" in entry]


def kill_after_a_checkpoint(one: Run, output: Path, cwd: Path) -> None:
    """Start a run, and end all of its processes with SIGKILL when its first checkpoint is complete."""
    checkpoint = output / f"checkpoint-{STEPS // 2}"
    state = checkpoint / "trainer_state.json"  # the last file of rank 0; that of others is the state of its generators
    process = subprocess.Popen(
        [str(word) for word in one.command],
        cwd=cwd,
        env=environment_of(CPU_RANKS, **one.variables),
        stdout=(cwd / "killed.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    deadline = time.monotonic() + TIMEOUT
    try:
        while not (
            len(list(checkpoint.glob("rng_state*"))) == one.ranks
            and state.is_file()
            and state.read_text(encoding="utf-8").rstrip().endswith("}")
        ):
            assert process.poll() is None, (cwd / "killed.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        kill(process)


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_a_pretrained_model_is_fine_tuned(name, model, data, tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    one = RUNS[name](model, data, whole)
    shown = inspect(one.command, tmp_path, **one.variables) if one.shown else None
    plan = None
    if name in PLANNED:
        words = [BIN / "hf-muon", "plan", "--json", "--", *one.command]
        plan = json.loads(run(words, cwd=tmp_path, **one.variables))
    assert not whole.exists(), "a dry run has written files"

    printed = run(one.command, cwd=tmp_path, **one.variables)
    assert shown is None or table_in(shown) == table_in(printed)
    losses = losses_of(whole)
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.99 * losses[0], losses

    if plan:
        saved = Saved.of(whole / f"checkpoint-{STEPS}")
        assert sum(plan["state"]) == sum(value.nbytes for state in saved.state.values() for value in state.values())
    if one.resumes:
        kill_after_a_checkpoint(RUNS[name](model, data, again), again, tmp_path)
        second = RUNS[name](model, data, again)
        mark(again / f"checkpoint-{STEPS // 2}")
        run(second.command, cwd=tmp_path, **second.variables)
        assert losses_of(again) == losses
        assert is_marked(again / f"checkpoint-{STEPS}"), "the run has begun anew"
        torch.testing.assert_close(weights(again), weights(whole), rtol=0, atol=0)
    loads(whole, model)


def loads(output: Path, model: Path) -> None:
    """Check that transformers loads what a run has saved, and that it is neither the start nor noise."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)  # with peft, the adapter on its model
    tokens = AutoTokenizer.from_pretrained(output)("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        before, after = (network(tokens).logits.log_softmax(-1) for network in (start, trained))
    assert torch.isfinite(after).all()
    assert 0 < (after.exp() - before.exp()).abs().sum(-1).mean() < 1
