"""Read what a command is about: a model without its weights, and the options of a run."""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_muon.cli.quantized import (
    DEQUANTIZED_BY_LLAMAFACTORY,
    freeze_quantized,
    quantization_of_checkpoint,
    quantization_of_run,
)
from hf_muon.config import MuonConfig
from hf_muon.integrations.names import is_muon
from hf_muon.integrations.transformers.training_file import (
    is_llamafactory,
    optimizer_of,
    options_of,
    read_training_file,
    refusals,
    unknown_optimizer,
)
from hf_muon.optim_args import parse_optim_args

if TYPE_CHECKING:
    from torch import nn

# Tried in this order for a configuration that names no class, as LLaMA-Factory does.
_AUTO = (
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCausalLM",
    "AutoModel",
)
_KINDS = ("full", "freeze", "lora")  # what a run trains, in LLaMA-Factory's words


@dataclass(frozen=True)
class Source:
    """What a run would train.

    Attributes:
        title: where the description comes from.
        model: without weights, on the meta device.
        config: options of Muon.
        notes: further lines for the user.
        refusals: why the run would be refused before training; empty if it would train.
        complete: the model holds everything that is trained; False for adapters of an unknown type.
    """

    title: str
    model: nn.Module
    config: MuonConfig
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    complete: bool = True


def read_source(
    text: str, optim_args: str = "", *, trust_remote_code: bool = False, dequantize: bool = False
) -> Source:
    """Return a model and its options.

    Args:
        text: a model's directory or `config.json`, an adapter's directory, a training YAML or JSON file, the name of a
            known configuration, or a name on the hub.
        optim_args: options that override those of a training file, as in TrainingArguments.
        trust_remote_code: run the code that comes with a model which transformers does not know.
        dequantize: treat a quantized checkpoint as if it were loaded with `dequantize=True`.

    Raises:
        ValueError: `text` is none of these, or its contents are not valid.
    """
    path = Path(text).expanduser()
    make = functools.partial(model_from, trust_remote_code=trust_remote_code)
    if path.is_file() and path.suffix in (".yaml", ".yml", ".json") and not _is_model_config(path):
        return _source_of_run(path, optim_args, make, dequantize)
    if path.is_dir() and not (path / "config.json").exists() and (path / "adapter_config.json").exists():
        model, notes = _adapted(path, make)
    else:
        model, notes = make(text), []
    quantization = None if dequantize else quantization_of_checkpoint(model.config)
    refusals = freeze_quantized(text, model, quantization, notes)
    return Source(text, model, _replaced(MuonConfig(), optim_args), notes, refusals)


def _source_of_run(path: Path, optim_args: str, make: Callable[[str], nn.Module], dequantize: bool) -> Source:
    """Return the model and the options that a training file describes."""
    settings = read_training_file(path)
    name, optim = str(settings.get("model_name_or_path", settings.get("model"))), optimizer_of(settings)
    try:
        config = options_of(settings)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        model = make(name)
    except ValueError as error:
        raise ValueError(f"{path}, its model: {error}") from error
    notes = []
    if settings.get("stage") in ("rm", "ppo"):
        notes.append(f"stage {settings['stage']} adds a value head, which goes to AdamW and is not in this table")
    quantization = None if dequantize else quantization_of_checkpoint(model.config)
    if quantization and is_llamafactory(settings) and quantization.method in DEQUANTIZED_BY_LLAMAFACTORY:
        notes.append(f"LLaMA-Factory dequantizes {name} {quantization} when it loads it")
        quantization = None
    model = _tuned(path, model, settings, notes)
    complete = _kind_of(settings) in _KINDS
    complaints = freeze_quantized(name, model, quantization or quantization_of_run(settings), notes, complete)
    complaints += refusals(settings)
    if not is_muon(optim):
        notes.append(f"{path} says {f'optim: {optim}' if optim else 'no optim'}: this is what optim: muon would do")
        notes += [f"optim: muon would be refused: {complaint}" for complaint in complaints]
        complaints = unknown_optimizer(settings)
    return Source(str(path), model, _replaced(config, optim_args), notes, complaints, complete)


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
        text: a directory, a `config.json`, the name of a known configuration, or a name on the hub. Of `Qwen/Qwen3-8B`
            and others that are known nothing is fetched.
        trust_remote_code: run the code that comes with a model which transformers does not know.

    Raises:
        ValueError: nothing has that name, or no model can be built from it.
    """
    import transformers

    path = Path(text).expanduser()
    try:
        if path.exists():
            if path.is_dir() and not (path / "config.json").exists():
                raise ValueError(f"{path} holds no config.json. Name a model's directory, or a training YAML")
            config = transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code
            )
        elif known := _known(str(text)):
            config = transformers.AutoConfig.for_model(**known)
        elif _is_hub_name(str(text)):
            config = transformers.AutoConfig.from_pretrained(str(text), trust_remote_code=trust_remote_code)
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
            f"{text} does not exist here and cannot be fetched from the hub: {_first_line(error)}. {_valid()}"
        ) from error
    except Exception as error:  # a configuration can fail anywhere in a model's own code
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
    return ValueError(f"{text}: no model can be made of it: {reason}")


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
            "Build the model in Python and pass it to hf_muon.route_parameters or hf_muon.convert.convert_state_dict"
        ) from error
    except Exception as error:  # as above
        raise _no_model(text, error) from error
    return model


def _adapted(path: Path, make: Callable[[str], nn.Module]) -> tuple[nn.Module, list[str]]:
    """Return the model of an adapter's directory, with the adapter."""
    import torch

    try:
        from peft import PeftConfig, get_peft_model

        adapter = PeftConfig.from_pretrained(str(path))
        base = make(str(adapter.base_model_name_or_path))
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
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return path.name == "config.json"
    return isinstance(content, dict) and not {"model_name_or_path", "model"} & content.keys()


def _tuned(path: Path, model: nn.Module, run: Mapping[str, Any], notes: list[str]) -> nn.Module:
    """Freeze what a run freezes and add the adapters that it adds; return the model."""
    v1, llamafactory, kind = _adapter_section(run), is_llamafactory(run), _kind_of(run)
    if kind == "lora":
        target = run.get(
            "lora_target", run.get("lora_target_modules", v1.get("target_modules", "all" if llamafactory else None))
        )
        rank = run.get("lora_rank", run.get("lora_r", v1.get("r", 8)))
        return _with_lora(path, model, target, rank, run.get("additional_target"))
    if kind == "freeze":
        _freeze(model, run)
        notes.append("finetuning_type freeze: frozen parameters are in no table")
    elif kind not in _KINDS:
        notes.append(
            f"finetuning_type {kind} is not known here: what it adds is in no table, and may need muon_patterns to "
            "reach Muon; weights that are not quantized are taken to be trained"
        )
    return model


def _kind_of(run: Mapping[str, Any]) -> str:
    """Return what a training file trains: one of _KINDS, or another word of LLaMA-Factory."""
    if run.get("use_peft"):
        return "lora"
    default = "lora" if is_llamafactory(run) else _adapter_section(run).get("name", "full")
    return str(run.get("finetuning_type", default))


def _adapter_section(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return LLaMA-Factory v1's section on adapters; empty if there is none."""
    section = run.get("peft_config")
    return section if isinstance(section, Mapping) else {}


def _with_lora(path: Path, model: nn.Module, target: Any, rank: Any, extra: Any) -> nn.Module:
    import torch

    try:
        from peft import LoraConfig, get_peft_model

        targets = _names(target)
        config = LoraConfig(
            r=_integer("the rank of LoRA", rank),
            target_modules="all-linear" if targets in (["all"], ["all-linear"]) else targets or None,
            modules_to_save=_names(extra) or None,
            task_type="CAUSAL_LM",
        )
        with torch.device("meta"):
            return get_peft_model(model, config)
    except Exception as error:  # peft raises many kinds if targets do not fit the model
        raise ValueError(f"{path}: LoRA cannot be added to the model: {_first_line(error)}") from error


def _names(value: Any) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value or []
    return [str(part).strip() for part in parts if str(part).strip()]


def _integer(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {value!r}, and no integer") from None


def _freeze(model: nn.Module, run: Mapping[str, Any]) -> None:
    """Train some layers at the end (or, with a negative number, at the beginning) and freeze the rest."""
    layers = int(getattr(model.config, "num_hidden_layers", 0))
    count = _integer("freeze_trainable_layers", run.get("freeze_trainable_layers", 2))
    chosen = range(max(0, layers - count), layers) if count > 0 else range(min(-count, layers))
    modules = _names(run.get("freeze_trainable_modules", "all"))
    trained = [f".{i}." if module == "all" else f".{i}.{module}" for i in chosen for module in modules]
    trained += _names(run.get("freeze_extra_modules"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
