"""Read the model, without its weights, and the options of a run, from the argument of a command."""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_muon.config import MuonConfig
from hf_muon.integrations.names import is_muon
from hf_muon.integrations.transformers.training_file import (
    is_llamafactory,
    optimizer_of,
    options_of,
    read_training_file,
    refusals,
    section_of,
)
from hf_muon.optim_args import parse_optim_args

if TYPE_CHECKING:
    from torch import nn

# Tried in this order, like LLaMA-Factory, for a configuration that does not name a class.
_AUTO = (
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCausalLM",
    "AutoModel",
)
_KINDS = ("full", "freeze", "lora")  # what a run trains, by LLaMA-Factory's names


@dataclass(frozen=True)
class Source:
    """The model and the options of a run.

    Attributes:
        title: name of the file or configuration.
        model: without weights, on the meta device.
        config: options of Muon.
        notes: further lines for the user.
        refusals: why the run would be refused before training; empty if it would train.
        settings: of the training file; empty without one.
    """

    title: str
    model: nn.Module
    config: MuonConfig
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_source(text: str, optim_args: str = "", *, trust_remote_code: bool = False) -> Source:
    """Return a model and its options.

    Args:
        text: a model's directory or `config.json`, a training YAML, the name of a known configuration, or
            one on the hub.
        optim_args: options that override those of a training file, as in TrainingArguments.
        trust_remote_code: run the code that comes with a model which transformers does not know.

    Raises:
        ValueError: `text` is none of these, or its contents are not valid.
    """
    path = Path(text).expanduser()
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        return _source_of_run(path, optim_args, trust_remote_code)
    model = model_from(text, trust_remote_code=trust_remote_code)
    return Source(text, model, _replaced(MuonConfig(), optim_args), _notes_on(model))


def _source_of_run(path: Path, optim_args: str, trust_remote_code: bool) -> Source:
    """Return the model and the options that a training file describes."""
    settings = read_training_file(path)
    name, optim = str(settings.get("model_name_or_path", settings.get("model"))), optimizer_of(settings)
    try:
        config = options_of(settings)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        model = model_from(name, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ValueError(f"{path}, its model: {error}") from error
    model = _tuned(path, model, settings)
    notes = _notes_on(model)
    complaints = refusals(settings)
    if not is_muon(optim):
        notes.append(f"{path} says {f'optim: {optim}' if optim else 'no optim'}: this is what optim: muon would do")
        notes += [f"optim: muon would be refused: {complaint}" for complaint in complaints]
        complaints = []
    return Source(str(path), model, _replaced(config, optim_args), notes, complaints, settings)


def _replaced(config: MuonConfig, optim_args: str) -> MuonConfig:
    """Return the options with those of the command line replaced."""
    try:
        return config.replace(parse_optim_args(optim_args))
    except ValueError as error:
        raise ValueError(f"--optim-args: {error}") from None


# --- models


@functools.lru_cache(maxsize=1)
def known_configs() -> dict[str, dict[str, Any]]:
    """Return configurations of published models, by names in lower case."""
    import yaml

    text = importlib.resources.files("hf_muon.cli").joinpath("known_configs.yaml").read_text(encoding="utf-8")
    configs: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return configs


def model_from(text: str | Path, *, trust_remote_code: bool = False) -> nn.Module:
    """Return a model without weights.

    Args:
        text: a directory, a `config.json`, the name of a known configuration, or a name on the hub. Nothing is
            fetched for known ones such as `Qwen/Qwen3-8B`.
        trust_remote_code: run the code that comes with a model which transformers does not know.

    Raises:
        ValueError: there is no such model, or it cannot be built.
    """
    import transformers

    path = Path(text).expanduser()
    is_here, known = path.exists(), _known(str(text))
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"{path} holds no config.json. Name a model's directory, or a training YAML [no-config-json]")
    if not (is_here or known or _is_hub_name(str(text))):
        raise ValueError(f"{text} does not exist. {_valid()} [no-such-source]")
    try:
        if known and not is_here:
            config = transformers.AutoConfig.for_model(**known)
        else:
            config = transformers.AutoConfig.from_pretrained(
                path if is_here else str(text), local_files_only=is_here, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # a configuration can fail anywhere in a model's own code
        if isinstance(error, OSError) and not is_here:
            raise ValueError(
                f"{text} does not exist here and cannot be fetched from the hub: {_first_line(error)}. "
                f"{_valid()} [not-on-hub]"
            ) from error
        raise _no_model(text, error) from error
    return _model_of(text, config, trust_remote_code)


def _known(text: str) -> dict[str, Any] | None:
    """Return the configuration of a known name, or of one on the hub whose checkpoint is not quantized."""
    owner, _, name = text.rpartition("/")
    return known_configs().get(name.lower()) if owner in ("", "Qwen", "meta-llama") else None


def _valid() -> str:
    return (
        "Name a model's directory or config.json, a training YAML, a name on the hub such as Qwen/Qwen3-0.6B, or one "
        f"of {', '.join(known_configs())}"
    )


def _is_hub_name(text: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None and not text.startswith((".", "/"))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _no_model(text: Any, error: BaseException) -> ValueError:
    reason = f"{type(error).__name__}: {_first_line(error)}"
    if "trust_remote_code" in str(error):
        reason = (
            "it comes with code of its own. Read that code, and if you trust it say --trust-remote-code, which runs it"
        )
    return ValueError(f"{text}: no model can be made of it: {reason} [unbuildable-model]")


def _model_of(text: Any, config: Any, trust_remote_code: bool) -> nn.Module:
    """Return a model on the meta device."""
    import torch
    import transformers

    own = getattr(config, "auto_map", None) or {} if trust_remote_code else {}
    known: list[Any] = [
        auto for name in _AUTO if type(config) in (auto := getattr(transformers, name))._model_mapping or name in own
    ]
    auto = (known or [transformers.AutoModelForCausalLM])[0]
    from_config = functools.partial(auto.from_config, trust_remote_code=trust_remote_code)
    try:
        make = getattr(transformers, next(iter(config.architectures or []), ""), from_config)
        with torch.device("meta"):
            model: nn.Module = make(config)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{text}: its constructor computes with weights, which are not allocated here ({_first_line(error)}). "
            "Build the model in Python and pass it to hf_muon.route_parameters or hf_muon.convert.convert_state_dict "
            "[constructor-computes]"
        ) from error
    except Exception as error:  # as above
        raise _no_model(text, error) from error
    return model


# --- training files


def _notes_on(model: nn.Module) -> list[str]:
    """Return notes on a quantized checkpoint, whose weights are shown as before quantization."""
    if getattr(model.config, "quantization_config", None) is None or hasattr(model, "peft_config"):
        return []
    return [
        "the checkpoint is quantized, and this table is of a run that dequantizes it, as LLaMA-Factory does with FP8 "
        "and MXFP4. Other runs can train LoRA factors over it, or a checkpoint that is not quantized"
    ]


def _tuned(path: Path, model: nn.Module, run: Mapping[str, Any]) -> nn.Module:
    """Freeze parameters and add adapters as a run does, and return the model."""
    kind = _kind_of(run)
    if kind not in _KINDS:
        raise ValueError(
            f"{path}: what finetuning_type {kind} trains is not known here. Known: {', '.join(_KINDS)} "
            "[unknown-finetuning-type]"
        )
    try:
        if kind == "freeze":
            _freeze(model, run)
        return _with_lora(model, run) if kind == "lora" else model
    except Exception as error:  # peft raises many kinds of errors if targets do not match the model
        raise ValueError(f"{path}: {kind} does not fit the model: {_first_line(error)} [finetuning-misfit]") from error


def _kind_of(run: Mapping[str, Any]) -> str:
    """Return what a training file trains: one of _KINDS, or another value of LLaMA-Factory."""
    if run.get("use_peft"):
        return "lora"
    default = "lora" if is_llamafactory(run) else section_of(run, "peft_config").get("name", "full")
    return str(run.get("finetuning_type", default))


def _with_lora(model: nn.Module, run: Mapping[str, Any]) -> nn.Module:
    import torch
    from peft import LoraConfig, get_peft_model

    v1, default = section_of(run, "peft_config"), "all" if is_llamafactory(run) else None
    targets = _names(run.get("lora_target", run.get("lora_target_modules", v1.get("target_modules", default))))
    config = LoraConfig(
        r=int(run.get("lora_rank", run.get("lora_r", v1.get("r", 8)))),
        target_modules="all-linear" if targets in (["all"], ["all-linear"]) else targets or None,
        modules_to_save=_names(run.get("additional_target")) or None,
        task_type="CAUSAL_LM",
    )
    with torch.device("meta"):
        return get_peft_model(model, config)


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
