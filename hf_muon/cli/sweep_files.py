"""Training files of a sweep's trials: copies of the user's file with another rate and optimizer, and few steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_muon.integrations.names import is_muon
from hf_muon.integrations.transformers.training_file import (
    is_llamafactory,
    is_llamafactory_v1,
    is_trl_sft,
    optimizer_of,
    options_of,
    refusals,
)

Settings = Mapping[str, Any]

FILE = "{file}"
"""What stands for the training file in a command."""
MUON, ADAMW = "muon", "adamw"

_OF_REWARDS = ("grpo", "rloo", "ppo")
_SAVING = ("save_steps", "save_total_limit", "save_only_model", "logging_dir", "metric_for_best_model")
_RESUMES_ITSELF = (None, False, True, "", "auto", "false", "true")


def default_command(path: Path, settings: Settings) -> list[str]:
    """Return the command that trains by a file of this kind.

    Raises:
        ValueError: the file may be of several programs.
    """
    if is_llamafactory_v1(settings):
        return ["env", "USE_V1=1", "llamafactory-cli", "sft", FILE]
    if is_llamafactory(settings):
        return ["llamafactory-cli", "train", FILE]
    if is_trl_sft(settings):
        return ["trl", "sft", "--config", FILE]
    raise ValueError(
        f"{path} does not tell which program reads it. Name the command after --, with {FILE} in place of the file: "
        f"hf-muon sweep {path} -- {Path(sys.executable).name} train.py {FILE}, or -- trl sft --config {FILE}"
    )


def trial_settings(settings: Settings, optimizer: str, rate: float, steps: int, output: Path) -> dict[str, Any]:
    """Return the settings of a trial.

    Args:
        settings: of the user's file, which are copied.
        optimizer: `muon` or `adamw`.
        rate: the learning rate.
        steps: the number of optimizer steps.
        output: the trial's own output directory.
    """
    trial = {
        **settings,
        "learning_rate": rate,
        "max_steps": steps,
        "output_dir": str(output),
        "logging_steps": 1,
    }
    trial.pop("resume_from_checkpoint", None)
    if is_llamafactory_v1(settings):
        return _v1_settings(trial, optimizer, rate, settings)
    for key in _SAVING:
        trial.pop(key, None)
    trial |= {
        "logging_strategy": "steps",
        "logging_nan_inf_filter": False,  # else Trainer logs the mean of earlier losses in place of NaN
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "report_to": "none",
    }
    if trial.get("push_to_hub"):
        trial["push_to_hub"] = False
    if str(trial.get("eval_strategy", "no")).lower() not in ("no", "false"):
        trial |= {"eval_strategy": "steps", "eval_steps": steps}
    ours = is_muon(optimizer_of(settings))
    if optimizer == ADAMW or not ours:
        trial["optim"] = "muon" if optimizer == MUON else "adamw_torch"
        trial.pop("optim_args", None)
    return trial


def _v1_settings(trial: dict[str, Any], optimizer: str, rate: float, settings: Settings) -> dict[str, Any]:
    """Return the settings of a trial by LLaMA-Factory v1, whose default optimizer is torch's AdamW."""
    section = trial.pop("optim_config", None)
    if isinstance(section, str):
        section = json.loads(section)
    for key in ("save_steps", "save_epochs", "save_total_limit"):
        trial.pop(key, None)
    if optimizer == MUON:
        section = section if section and is_muon(optimizer_of(settings)) else {"name": "muon"}
        trial["optim_config"] = {**section, "lr": rate}
    return trial


def refuse_sweep(path: Path, settings: Settings, command: Sequence[str], steps: int) -> list[str]:
    """Check that trials of a file can be compared; return notes for the user.

    Args:
        path: the user's file.
        settings: its settings.
        command: the words of the command.
        steps: the number of optimizer steps of a trial.

    Raises:
        ValueError: a setting that makes trials useless, or that Muon refuses.
    """
    method = next((word for word in (*command, str(settings.get("stage"))) if word in _OF_REWARDS), None)
    if method:
        raise ValueError(
            f"{method} maximizes a reward, and its loss says nothing about a learning rate: compare the rewards of a "
            "few short runs"
        )
    if settings.get("resume_from_checkpoint") not in _RESUMES_ITSELF:
        raise ValueError(
            f"{path}: resume_from_checkpoint: {settings['resume_from_checkpoint']} brings the rate and the moments of "
            "another run. A sweep starts from the model: remove that line"
        )
    warmup = _number(settings.get("warmup_steps"))
    if warmup >= steps:
        raise ValueError(
            f"{path}: warmup_steps: {warmup:g} leaves no step at the full rate in trials of {steps} steps. Take more "
            "(--steps), or a share of all steps, as in warmup_steps: 0.03 (warmup_ratio: 0.03 before transformers 5)"
        )
    muon = trial_settings(settings, MUON, 1e-5, steps, Path("unused"))
    try:
        config = options_of(muon)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if config.muon_lr is not None:
        raise ValueError(
            f"{path}: muon_lr={config.muon_lr:g} is the rate of the Muon groups whatever learning_rate is, so that all "
            "trials would be alike. Remove it from the options of Muon"
        )
    if complaints := refusals(muon):
        raise ValueError(f"{path}: optim: muon would be refused: {complaints[0]}")
    notes = []
    if config.adamw_lr is not None:
        notes.append(f"adamw_lr={config.adamw_lr:g} stays as it is in trials of Muon: learning_rate moves Muon's half")
    if warmup > steps / 2:
        notes.append(f"warmup_steps: {warmup:g} is more than half of the {steps} steps of a trial")
    return notes


def file_rate(settings: Settings) -> float | None:
    """Return the learning rate of a file; None if it has none."""
    section = settings.get("optim_config")
    own = section.get("lr") if isinstance(section, Mapping) else None
    rate = _number(settings.get("learning_rate") if own is None else own)
    return rate if rate > 0 else None


def _number(value: Any) -> float:
    try:
        return float(value)  # YAML reads 1e-5, without a point, as text
    except (TypeError, ValueError):
        return 0.0


def write_settings(path: Path, settings: Settings) -> None:
    """Write a training file, as JSON or YAML by its suffix."""
    import yaml

    text = json.dumps(settings, indent=2) if path.suffix == ".json" else yaml.safe_dump(dict(settings), sort_keys=False)
    path.write_text(text, encoding="utf-8")
