"""Run `llamafactory-cli train` on a YAML file of this repository, and read the files that the run writes."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from prepare import BUILD, ROOT

CONFIGS = {name: ROOT / "examples" / "yaml" / f"llamafactory_qwen3_demo_{name}.yaml" for name in ("adamw", "muon")}
PACKAGES = ("hf-muon", "llamafactory", "torch", "transformers")


def read_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(CONFIGS[name].read_text(encoding="utf-8"))
    return config


def tokens_per_step(config: dict[str, Any]) -> int:
    return int(config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] * config["cutoff_len"])


def train_command(name: str) -> list[str]:
    cli = Path(sys.executable).with_name("llamafactory-cli")
    return [str(cli), "train", str(CONFIGS[name].relative_to(ROOT))]


def train_environment(threads: int) -> dict[str, str]:
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",  # with more devices, a step would have more tokens than in the sweep
        "DISABLE_VERSION_CHECK": "1",
        "HF_HOME": str(BUILD / "cache"),
        "HF_HUB_OFFLINE": "1",
        "LLAMAFACTORY_VERBOSITY": "WARN",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads are several times slower beside other programs
        "PYTHONWARNINGS": "ignore:'pin_memory' argument:UserWarning",
    }


def versions() -> dict[str, str]:
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "missing"
    return installed


def held_out_loss(folder: Path) -> float | None:
    """Return the final evaluation loss of a run; None if the run has not finished."""
    try:
        results: dict[str, float] = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):  # not written yet, or incomplete
        return None
    return results.get("eval_loss")


def log_history(folder: Path) -> list[dict[str, float]]:
    state: dict[str, list[dict[str, float]]] = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return state["log_history"]


def last_log(folder: Path) -> dict[str, Any]:
    """Return the last complete line about training in LLaMA-Factory's trainer_log.jsonl; empty before the first."""
    entry: dict[str, Any] = {}
    try:
        lines = (folder / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return entry
    for line in lines:
        try:
            entry |= json.loads(line)
        except json.JSONDecodeError:  # being written
            break
    return entry


def train_seconds(folder: Path) -> float:
    """Return the wall seconds of the training loop, summed over the parts of an interrupted run."""
    total = last = 0.0
    for line in (folder / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines():
        hours, minutes, seconds = json.loads(line)["elapsed_time"].split(":")
        elapsed = 3600 * int(hours) + 60 * int(minutes) + int(seconds)
        if elapsed < last:
            total += last
        last = elapsed
    return total + last
