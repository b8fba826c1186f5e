"""What a command line is about: a model without its weights, and the options of a run, from whatever describes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hf_muon.cards import CARDS
from hf_muon.config import MuonConfig, parse_optim_args
from hf_muon.integrations.llamafactory import refuse_rivals
from hf_muon.integrations.llamafactory_v1 import ALIASES
from hf_muon.integrations.transformers import NAME, config_from_arguments

if TYPE_CHECKING:
    from torch import nn

# What tells a YAML of LLaMA-Factory v0, which trains LoRA factors unless it says otherwise, from one of another script.
_LLAMAFACTORY = ("stage", "finetuning_type", "template", "cutoff_len", "lora_target", "dataset_dir")
# What a configuration that names no class is taken for, the first that knows it; LLaMA-Factory's order.
_AUTO = (
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCausalLM",
    "AutoModel",
)
# The fields of TrainingArguments that Muon's options start from, with their defaults.
_TRAINING_ARGUMENTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "optim_target_modules": None,
}


@dataclass(frozen=True)
class Source:
    """What a run would train.

    Attributes:
        title: where it comes from.
        model: without weights, on the meta device where that is possible.
        config: the options of Muon.
        notes: what a reader should know besides.
    """

    title: str
    model: nn.Module
    config: MuonConfig
    notes: list[str] = field(default_factory=list)


def read_source(text: str, optim_args: str = "") -> Source:
    """A model and its options.

    Args:
        text: a model's directory or `config.json`, an adapter's directory, a training YAML or JSON file, the name of a
            card, or a name on the hub.
        optim_args: options that win over those of a training file, as in TrainingArguments.

    Raises:
        ValueError: it is none of these, or holds something that is not valid.
    """
    path = Path(text).expanduser()
    run: dict[str, Any] = {}
    if path.is_file() and path.suffix in (".yaml", ".yml", ".json") and not _is_model_config(path):
        run = _training_file(path)
        model, notes = _model_of_run(path, run)
    elif path.is_dir() and not (path / "config.json").exists() and (path / "adapter_config.json").exists():
        model, notes = _adapted(path)
    else:
        model, notes = model_from(text), []
    return Source(text, model, _config_of(text, run, optim_args), notes)


def _config_of(text: str, run: Mapping[str, Any], optim_args: str) -> MuonConfig:
    """The options that a run would start with, replaced by those given on the command line."""
    arguments = SimpleNamespace(
        **{**_TRAINING_ARGUMENTS, **{key: run[key] for key in _TRAINING_ARGUMENTS if key in run}}
    )
    where, config = text, MuonConfig()
    try:
        config = config_from_arguments(arguments, parse_optim_args(str(run.get("optim_args") or "")))  # type: ignore[arg-type]
        section = run.get("optim_config")
        if isinstance(section, Mapping):
            given = {str(key): value for key, value in section.items() if key != "name"}
            config = config.replace({ALIASES.get(key, key): value for key, value in given.items()})
        where = "--optim-args"
        return config.replace(parse_optim_args(optim_args))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


# --- models


def model_from(text: str | Path) -> nn.Module:
    """The model that a directory, a `config.json`, a card or a name on the hub describes, without weights.

    Raises:
        ValueError: there is nothing of that name, or no model can be made of it.
    """
    import transformers

    path = Path(text).expanduser()
    try:
        if path.exists():
            if path.is_dir() and not (path / "config.json").exists():
                raise ValueError(f"{path} holds no config.json. Name a model's directory, or a training YAML")
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        elif str(text).lower() in CARDS:
            config = transformers.AutoConfig.for_model(**CARDS[str(text).lower()])
        elif _is_hub_name(str(text)):
            config = transformers.AutoConfig.from_pretrained(str(text))
        else:
            raise ValueError(f"{text} does not exist. {_valid()}")
    except ValueError as error:
        if str(error).startswith(f"{text} ") or str(error).startswith(f"{path} "):
            raise
        raise _no_model(text, error) from error
    except OSError as error:
        if path.exists():
            raise _no_model(text, error) from error
        raise ValueError(
            f"{text} is not here and cannot be had from the hub: {_first_line(error)}. {_valid()}"
        ) from error
    except Exception as error:  # a configuration can fail anywhere in a model's own code
        raise _no_model(text, error) from error
    return _made(text, config)


def _valid() -> str:
    return (
        "Name a model's directory or config.json, a training YAML, a name on the hub such as Qwen/Qwen3-0.6B, or one "
        f"of the cards {', '.join(CARDS)}"
    )


def _is_hub_name(text: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None and not text.startswith((".", "/"))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _no_model(text: Any, error: BaseException) -> ValueError:
    return ValueError(f"{text}: no model can be made of it: {type(error).__name__}: {_first_line(error)}")


def _made(text: Any, config: Any) -> nn.Module:
    """On the meta device, or with random weights if the model computes something while it is made."""
    import torch
    import transformers

    known: list[Any] = [auto for name in _AUTO if type(config) in (auto := getattr(transformers, name))._model_mapping]
    from_config = (known or [transformers.AutoModelForCausalLM])[0].from_config
    try:
        make = getattr(transformers, next(iter(config.architectures or []), ""), from_config)
        made: nn.Module
        try:
            with torch.device("meta"):
                made = make(config)
        except (NotImplementedError, RuntimeError):
            made = make(config)
    except Exception as error:  # as above
        raise _no_model(text, error) from error
    return made


def _adapted(path: Path) -> tuple[nn.Module, list[str]]:
    """The model of an adapter's directory, with the adapter."""
    import torch

    try:
        from peft import PeftConfig, get_peft_model

        adapter = PeftConfig.from_pretrained(str(path))
        base = model_from(str(adapter.base_model_name_or_path))
        adapter.inference_mode = False
        with torch.device("meta"):
            return get_peft_model(base, adapter), [f"{path} holds an adapter of {adapter.base_model_name_or_path}"]
    except ValueError:
        raise
    except Exception as error:  # an adapter's configuration can fail anywhere in peft
        raise _no_model(path, error) from error


# --- training files


def _is_model_config(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return path.name == "config.json"
    return isinstance(found, dict) and not {"model_name_or_path", "model"} & found.keys()


def _training_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"{path} does not hold keys and values")
    if not isinstance(found.get("model_name_or_path", found.get("model")), str):
        raise ValueError(f"{path} names no model: it has neither model_name_or_path nor (LLaMA-Factory v1) model")
    return found


def _model_of_run(path: Path, run: Mapping[str, Any]) -> tuple[nn.Module, list[str]]:
    name = str(run.get("model_name_or_path", run.get("model")))
    try:
        model = model_from(name)
    except ValueError as error:
        raise ValueError(f"{path}, its model: {error}") from error
    notes = []
    optim = _optimizer_of(run)
    if optim != NAME:
        notes.append(f"{path} says {f'optim: {optim}' if optim else 'no optim'}: this is what optim: muon would do")
    else:
        refuse_rivals(SimpleNamespace(**{key: value for key, value in run.items() if key.isidentifier()}))
    if run.get("stage") in ("rm", "ppo"):
        notes.append(f"stage {run['stage']} adds a value head, which goes to AdamW and is not in this table")
    return _tuned(path, model, run, notes), notes


def _optimizer_of(run: Mapping[str, Any]) -> str | None:
    section = run.get("optim_config")
    name = section.get("name") if isinstance(section, Mapping) else run.get("optim")
    return None if name is None else str(name)


def _tuned(path: Path, model: nn.Module, run: Mapping[str, Any], notes: list[str]) -> nn.Module:
    """The model with what is frozen frozen, and with the adapters that a run would add."""
    section = run.get("peft_config")
    v1 = section if isinstance(section, Mapping) else {}
    llamafactory = "model_name_or_path" in run and any(key in run for key in _LLAMAFACTORY)
    kind = run.get("finetuning_type", "lora" if llamafactory else v1.get("name", "full"))
    if kind == "lora" or run.get("use_peft"):
        target = run.get(
            "lora_target", run.get("lora_target_modules", v1.get("target_modules", "all" if llamafactory else None))
        )
        rank = run.get("lora_rank", run.get("lora_r", v1.get("r", 8)))
        return _with_lora(path, model, target, rank, run.get("additional_target"))
    if kind == "freeze":
        _freeze(model, run)
        notes.append("finetuning_type freeze: frozen parameters are in no table")
    elif kind != "full":
        notes.append(f"finetuning_type {kind} is not known here: all parameters are taken to be trained")
    return model


def _with_lora(path: Path, model: nn.Module, target: Any, rank: Any, extra: Any) -> nn.Module:
    import torch

    try:
        from peft import LoraConfig, get_peft_model

        targets = _names(target)
        config = LoraConfig(
            r=int(rank),
            target_modules="all-linear" if targets in (["all"], ["all-linear"]) else targets or None,
            modules_to_save=_names(extra) or None,
            task_type="CAUSAL_LM",
        )
        with torch.device("meta"):
            return get_peft_model(model, config)
    except Exception as error:  # peft raises of every kind where targets do not fit the model
        raise ValueError(f"{path}: LoRA cannot be added to the model: {_first_line(error)}") from error


def _names(value: Any) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value or []
    return [str(part).strip() for part in parts if str(part).strip()]


def _freeze(model: nn.Module, run: Mapping[str, Any]) -> None:
    """Train some layers at the end (or, with a negative number, at the beginning) and freeze the rest."""
    layers = int(getattr(model.config, "num_hidden_layers", 0))
    count = int(run.get("freeze_trainable_layers", 2))
    chosen = range(max(0, layers - count), layers) if count > 0 else range(min(-count, layers))
    modules = _names(run.get("freeze_trainable_modules", "all"))
    trained = [f".{i}." if module == "all" else f".{i}.{module}" for i in chosen for module in modules]
    trained += _names(run.get("freeze_extra_modules"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
