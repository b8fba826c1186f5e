"""The examples of LLaMA-Factory, v0 and v1, run as they are but for a tiny model, tiny data, few steps and the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import fixtures_text
from tests.e2e.example_files import (
    ALL_MATRICES,
    ALL_OTHERS,
    CPU_FSDP,
    LLAMAFACTORY_FSDP2,
    LLAMAFACTORY_PRETRAIN,
    LLAMAFACTORY_SFT,
    LLAMAFACTORY_V1,
    LLAMAFACTORY_V1_FSDP2,
    LLAMAFACTORY_V1_ULYSSES,
)
from tests.e2e.harness import (
    BIN,
    CPU_V1,
    YAML,
    assert_close,
    assert_routed,
    blocks_of,
    free_port,
    llamafactory,
    llamafactory_launcher,
    llamafactory_server,
    llamafactory_settings,
    llamafactory_v1,
    overrides,
    plain_loop,
    read_yaml,
    run,
    v1_has_top_level_keys,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.llamafactory]

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


def train(path: Path, settings: dict[str, object], folder: Path) -> None:
    """Run what `llamafactory-cli train` runs in one process."""
    words = [BIN / "llamafactory-cli", "train", path, *overrides(settings)]
    llamafactory_server.run(words, cwd=folder)


@pytest.mark.first_tier("full")
@pytest.mark.parametrize("name", LLAMAFACTORY_SFT)
def test_llamafactory_sft(name: str, tiny_model: Path, llamafactory_data: Path, tmp_path: Path) -> None:
    settings = llamafactory_settings(tiny_model, llamafactory_data, tmp_path / "out", "tiny_sft")
    settings |= LLAMAFACTORY_SFT[name]
    if "full" in name:
        llamafactory(YAML / name, settings, cwd=tmp_path)  # the command itself
    else:
        train(YAML / name, settings, tmp_path)
    muon, adamw = EXPECTED[name]
    saved = assert_routed(tmp_path / "out" / "checkpoint-3", muon=muon, adamw=adamw, steps=3)
    assert {group["initial_lr"] for group in saved.groups} == {read_yaml(YAML / name)["learning_rate"]}


@pytest.mark.extended
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
    train(YAML / LLAMAFACTORY_PRETRAIN, changes, tmp_path)
    assert_routed(tmp_path / "out" / "checkpoint-3", muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=3)

    settings = read_yaml(YAML / LLAMAFACTORY_PRETRAIN) | changes
    blocks = blocks_of(fixtures_text.texts(), tiny_model, settings["cutoff_len"] - 1)  # as LLaMA-Factory packs texts
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    plain_loop(model, blocks, settings["per_device_train_batch_size"], settings)
    assert_close(weights(tmp_path / "out"), model.state_dict(), weights(tiny_model), rounding)


@pytest.mark.promise("fsdp2")
def test_llamafactory_fsdp2(
    tiny_model: Path, llamafactory_data: Path, rounding: dict[str, float], tmp_path: Path
) -> None:
    """Run the script of LLaMA-Factory's launcher in two processes with FSDP2, and in one without."""
    full = {"optim_args": "ns_dtype=fp32", "learning_rate": 0.001, "warmup_steps": 1, "disable_shuffling": True}
    results = {}
    for name, processes, words in (
        ("one", 1, [llamafactory_launcher()]),
        ("two", 2, [CPU_FSDP, llamafactory_launcher()]),
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
        variables = {"cwd": tmp_path, "ranks": processes, "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
        llamafactory_server.run([*words, path], **variables)
        assert (tmp_path / name / "checkpoint-3" / "optimizer.bin").exists() is (processes == 2)
        results[name] = weights(tmp_path / name)
    assert_close(results["two"], results["one"], weights(tiny_model), rounding)


# --- LLaMA-Factory v1


@pytest.mark.extended
def test_llamafactory_v1_in_one_process_and_with_fsdp2(
    tiny_model: Path, llamafactory_data: Path, rounding: dict[str, float], tmp_path: Path
) -> None:
    results = {}
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
        if processes == 1:
            printed = llamafactory_v1(YAML / path, settings, cwd=tmp_path)
        else:  # the command itself, which starts torchrun
            launch = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "MASTER_PORT": free_port(), "USE_V1": "1"}
            command = [BIN / "llamafactory-cli", "sft", YAML / path, *overrides(settings)]
            printed = run(command, cwd=tmp_path, path=CPU_V1, **launch)
        assert printed.count("which parameter goes where") == 1
        assert ("2 distributed tasks" in printed) is (processes == 2)
        results[name] = weights(tmp_path / name)
    assert (tmp_path / "fsdp2" / "checkpoint-3" / "optimizer" / ".metadata").exists(), "the run was not sharded"
    assert_close(results["fsdp2"], results["one"], weights(tiny_model), rounding)


@pytest.mark.extended
def test_llamafactory_v1_ulysses_files_differ_in_the_place_of_their_keys_alone(tmp_path: Path) -> None:
    inside, top_level = (read_yaml(YAML / name) for name in LLAMAFACTORY_V1_ULYSSES)
    moved = {key: inside["dist_config"].pop(key) for key in ("cp_mode", "cp_size")}
    assert inside | moved == top_level
    assert moved == {"cp_mode": "ulysses", "cp_size": 2}
    code = "from llamafactory.v1.config import get_args; print('read', get_args()[2].dist_config)"
    inside, top_level = (YAML / name for name in LLAMAFACTORY_V1_ULYSSES)
    read = llamafactory_server.run_code
    if v1_has_top_level_keys():
        assert "read {'name': 'fsdp2'}" in read(code, top_level, cwd=tmp_path)
        return
    assert "read {'name': 'fsdp2', 'cp_mode': 'ulysses', 'cp_size': 2}" in read(code, inside, cwd=tmp_path)
    assert "cp_mode" in read(code, top_level, cwd=tmp_path, fails=True)
