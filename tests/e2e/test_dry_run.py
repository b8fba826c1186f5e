"""`hf-muon inspect -- COMMAND` shows the table of the command's real run, and trains and writes nothing."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.e2e.deepspeed_runs import JSON
from tests.e2e.harness import (
    BIN,
    LLAMAFACTORY_SFT,
    LLAMAFACTORY_V1,
    PLAIN_LOOP,
    TINY,
    TRAIN,
    TRAINER,
    TRL,
    YAML,
    llamafactory_server,
    llamafactory_settings,
    needs,
    options,
    plain_loop_options,
    read_yaml,
    run,
    server,
)
from tests.support import fixtures_text

pytestmark = [pytest.mark.slow]

TORCHRUN = (BIN / "torchrun", "--standalone", "--nproc-per-node", 2)
LORA = {"finetuning_type": "lora", "optim_args": "lora=muon", "lora_target": "all", "lora_rank": 4}
LLAMAFACTORY: dict[str, dict[str, Any]] = {
    "full": {"finetuning_type": "full"},
    "freeze": {"finetuning_type": "freeze", "freeze_trainable_layers": 1},
    "lora": LORA,
    "dora": {**LORA, "use_dora": True},
    "pissa": {**LORA, "pissa_init": True},
    "new tokens": {**LORA, "add_tokens": "<a>,<b>", "resize_vocab": True, "additional_target": "embed_tokens"},
    "dpo": {"finetuning_type": "full", "stage": "dpo", "dataset": "tiny_dpo"},
    "dpo lora": {**LORA, "stage": "dpo", "dataset": "tiny_dpo"},
    "kto": {"finetuning_type": "full", "stage": "kto", "dataset": "tiny_kto"},
    "rm": {"finetuning_type": "full", "stage": "rm", "dataset": "tiny_dpo"},
    "pt": {"finetuning_type": "full", "stage": "pt", "dataset": "tiny_pt"},
    "zero2": {"finetuning_type": "full", "deepspeed": str(JSON / "zero2.json")},
    "zero3": {"finetuning_type": "full", "deepspeed": str(JSON / "zero3.json")},
    "dpo zero3": {
        "finetuning_type": "full",
        "stage": "dpo",
        "dataset": "tiny_dpo",
        "deepspeed": str(JSON / "zero3.json"),
    },
}


class Case(NamedTuple):
    """A command, what runs in its place on ranks of a server that has its imports; without a server, the command."""

    command: list[Any]
    script: list[Any]
    server: Any
    ranks: int = 1
    variables: dict[str, str] = {}


def table_in(text):
    """Return the table of routes, which must be there once."""
    (table,) = re.findall(r"^parameter +shape .*?^adamw: [^\n]*$", text, re.MULTILINE | re.DOTALL)
    return table


def inspect(command, cwd, *words, fails=False, **variables):
    return run([BIN / "hf-muon", "inspect", *words, "--", *command], cwd=cwd, fails=fails, **variables)


def files_in(folder):
    return sorted(str(path) for path in Path(folder).rglob("*"))


def same_table(case: Case, cwd: Path) -> str:
    """Check a dry run against the real one, which begins in the same folder; return what the dry run shows."""
    before = files_in(cwd)
    shown = inspect(case.command, cwd, **case.variables)
    assert files_in(cwd) == before, "the dry run has written files"
    if case.server is None:
        real = run(case.script, cwd=cwd, **case.variables)
    else:
        real = case.server.run(case.script, cwd=cwd, ranks=case.ranks, **case.variables)
    assert table_in(shown) == table_in(real)
    assert "hf_muon would not refuse this run." in shown
    return shown


# --- LLaMA-Factory


@pytest.fixture(scope="module")
def preferences(tmp_path_factory, llamafactory_data):
    folder = tmp_path_factory.mktemp("preferences")
    pairs = [{"instruction": f"What is {n}?", "chosen": t[:80], "rejected": n} for n, t in fixtures_text.documents()]
    rated = [{"instruction": row["instruction"], "output": row["chosen"], "good": True} for row in pairs]
    fixtures_text.write_jsonl(folder / "tiny_dpo.jsonl", pairs)
    fixtures_text.write_jsonl(folder / "tiny_kto.jsonl", rated + [row | {"good": False} for row in rated])
    for file in llamafactory_data.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    info = json.loads((folder / "dataset_info.json").read_text())
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    info["tiny_dpo"] = {"file_name": "tiny_dpo.jsonl", "ranking": True, "columns": columns}
    columns = {"prompt": "instruction", "response": "output", "kto_tag": "good"}
    info["tiny_kto"] = {"file_name": "tiny_kto.jsonl", "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


@pytest.mark.llamafactory
@pytest.mark.promise("inspect")
@pytest.mark.first_tier("^freeze$|^dpo$")
@pytest.mark.second_tier("^(freeze|dpo|full|lora|new tokens|rm|zero3)$")
@pytest.mark.parametrize("kind", LLAMAFACTORY)
def test_llamafactory(kind, tiny_model, preferences, tmp_path):
    settings = llamafactory_settings(tiny_model, preferences, tmp_path / "out", "tiny_sft")
    settings = read_yaml(YAML / next(iter(LLAMAFACTORY_SFT))) | settings
    settings |= {
        "max_steps": 1,
        "max_samples": 8,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": 0,
    }
    settings |= {"overwrite_cache": False, **LLAMAFACTORY[kind]}
    ranks = 2 if "deepspeed" in settings else 1
    if ranks == 2:
        del settings["use_cpu"]
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings, default=str))
    command = [BIN / "llamafactory-cli", "train", file]
    launched = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"} if ranks == 2 else {}
    # DeepSpeed compiles its collectives in the processes of a server.
    of_real_run = None if ranks == 2 else llamafactory_server
    shown = same_table(Case(command, command, of_real_run, variables=launched), tmp_path)
    assert ("also in memory: Qwen3ForCausalLM" in shown) == (kind in ("dpo", "dpo zero3", "kto"))


V1: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {
        "optim_config": {"name": "muon", "lora": "muon"},
        "peft_config": {"name": "lora", "r": 4, "target_modules": "all"},
    },
    "fsdp2": {"dist_config": {"name": "fsdp2"}, "global_batch_size": 2},
    "fsdp2 on meta": {
        "dist_config": {"name": "fsdp2"},
        "global_batch_size": 2,
        "init_config": {"name": "init_on_meta"},
    },
}


@pytest.mark.llamafactory
@pytest.mark.extended
@pytest.mark.second_tier("^full$|^fsdp2$")
@pytest.mark.parametrize("kind", V1)
def test_llamafactory_v1(kind, tiny_model, llamafactory_data, tmp_path):
    settings = read_yaml(YAML / LLAMAFACTORY_V1) | {
        "model": str(tiny_model),
        "train_dataset": str(fixtures_text.write_v1_data(tmp_path, llamafactory_data)),
        "cutoff_len": 64,
        "micro_batch_size": 1,
        "max_steps": 1,
        "bf16": False,
        "batching_workers": 0,
        "output_dir": str(tmp_path / "out"),
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings | V1[kind]))
    command = [BIN / "llamafactory-cli", "sft", file]
    launched = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"} if "dist_config" in V1[kind] else {}
    variables = {"USE_V1": "1", **launched}
    same_table(Case(command, command, None if launched else llamafactory_server, variables=variables), tmp_path)


# --- transformers, TRL, accelerate


def trainer_words(model, folder, *more):
    texts = fixtures_text.write_jsonl(folder / "data.jsonl", [{"text": text} for text in fixtures_text.texts(20)])
    tiny = TINY | {"model_name_or_path": model, "data_path": texts, "output_dir": folder / "out", "max_steps": 1}
    return [TRAIN, YAML / TRAINER, *options(tiny), *more]


@pytest.mark.promise("inspect")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_script_of_trainer(ranks, tiny_model, tmp_path):
    words = trainer_words(tiny_model, tmp_path)
    command = [*(TORCHRUN if ranks == 2 else [BIN / "python"]), *words]
    same_table(Case(command, words, server, ranks), tmp_path)


@needs("deepspeed")
@pytest.mark.extended
def test_a_script_of_trainer_under_zero3(tiny_model, tmp_path):
    words = [*TORCHRUN, *trainer_words(tiny_model, tmp_path, "--deepspeed", JSON / "zero3.json", "--use_cpu", "false")]
    shown = same_table(Case(words, words, None), tmp_path)
    assert "memory of each rank (zero3, 2)" in shown


@pytest.mark.extended
def test_a_plain_loop(tiny_model, tmp_path):
    words = [PLAIN_LOOP, *plain_loop_options(tiny_model, tmp_path, "--steps", 1, "--output", tmp_path / "out")]
    same_table(Case([BIN / "python", *words], words, server), tmp_path)


STAGES: dict[str, dict[str, Any]] = {
    "sft": {"max_length": 64},
    "dpo": {"max_length": 64},
    "reward": {"max_length": 64, "optim": "muon"},
    "grpo": {
        "reward_funcs": "think_format_reward",
        "num_generations": 2,
        "max_completion_length": 4,
        "per_device_train_batch_size": 2,
    },
}


@needs("trl")
@pytest.mark.extended
@pytest.mark.second_tier("^sft$|^reward$")
@pytest.mark.parametrize("stage", STAGES)
def test_trl(stage, tiny_model, tmp_path):
    write = fixtures_text.write_messages if stage == "sft" else fixtures_text.write_preferences
    settings = {
        "model_name_or_path": tiny_model,
        "dataset_name": write(tmp_path / "data"),
        "output_dir": tmp_path / "out",
        "max_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "per_device_train_batch_size": 1,
        **STAGES[stage],
    }
    script = Path(importlib.util.find_spec("trl").origin).parent / "scripts" / f"{stage}.py"
    file = ["--config", YAML / TRL[stage]] if stage in TRL else []
    words = [script, *file, *options(settings)]
    same_table(Case([BIN / "python", *words], words, server), tmp_path)
