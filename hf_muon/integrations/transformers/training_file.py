"""Training files of transformers, TRL and LLaMA-Factory: their options, and why runs are refused.

The functions that refuse a run at its start are called here with the arguments from the file. Conditions that depend
only on the machine, such as GPUs and installed packages, are not checked.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hf_muon.integrations.llamafactory import v1 as llamafactory_v1
from hf_muon.integrations.llamafactory.v0 import MEGATRON, refuse_rivals
from hf_muon.integrations.names import OWN_NAME, is_muon, is_set
from hf_muon.integrations.transformers.handler import config_from_arguments
from hf_muon.integrations.transformers.refusals import refuse_unsupported

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from hf_muon.config import MuonConfig

Settings = Mapping[str, Any]

# Keys by which a YAML of LLaMA-Factory v0 is recognized. Its default is LoRA, that of other scripts is not.
_LLAMAFACTORY = ("stage", "finetuning_type", "template", "cutoff_len", "lora_target", "dataset_dir")
# Keys that only TRL's `sft` has, not its other commands or the scripts of transformers.
_TRL_SFT = ("dataset_text_field", "completion_only_loss", "assistant_only_loss", "packing_strategy", "eos_token")
# Fields of TrainingArguments that mean something else, or nothing, to another optimizer.
_OF_OPTIMIZERS = ("optim_args", "optim_target_modules")
# The fields on which Muon depends. Others, such as bf16 or tf32, may fail on this machine.
_OPTIONS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", *_OF_OPTIMIZERS)
_LAYOUT = ("fsdp", "fsdp_config", "label_smoothing_factor")
# The first three start a process group; the others set in accelerate what a file sets here.
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")


def read_training_file(path: Path) -> dict[str, Any]:
    """Return the keys and values of a file.

    Raises:
        ValueError: a file that cannot be read, holds something else, names no model, or mixes two programs.
    """
    import yaml

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())} [unreadable-yaml]") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ValueError(f"{path} does not hold keys and values [not-a-mapping]")
    if not isinstance(settings.get("model_name_or_path", settings.get("model")), str):
        if "distributed_type" in settings:
            raise ValueError(f"{path} is a config of accelerate. Give the training file that runs with it [no-model]")
        raise ValueError(
            f"{path} names no model: it has neither model_name_or_path nor (LLaMA-Factory v1) model [no-model]"
        )
    if "optim_config" in settings and not is_llamafactory_v1(settings):
        raise ValueError(
            f"{path}: optim_config is for LLaMA-Factory v1, which names its model by model. Beside model_name_or_path "
            "write optim: muon, and options into optim_args [optim-config-in-v0]"
        )
    return settings


def is_llamafactory(settings: Settings) -> bool:
    """Return whether a file is for LLaMA-Factory v0."""
    return "model_name_or_path" in settings and any(key in settings for key in _LLAMAFACTORY)


def is_llamafactory_v1(settings: Settings) -> bool:
    """Return whether a file is for LLaMA-Factory v1, which has other keys for the model and the optimizer."""
    return "model" in settings and "model_name_or_path" not in settings


def is_trl_sft(settings: Settings) -> bool:
    """Return whether a file is for TRL's `sft`."""
    return any(key in settings for key in _TRL_SFT)


def optimizer_of(settings: Settings) -> str | None:
    """Return the name of the optimizer that a file asks for.

    Raises:
        ValueError: `optim_config` is not a mapping.
    """
    section = section_of(settings, "optim_config") if is_llamafactory_v1(settings) else {"name": settings.get("optim")}
    name = section.get("name")
    return None if name is None else str(name)


def options_of(settings: Settings) -> MuonConfig:
    """Return the options of Muon with which a run would start, without those of another optimizer.

    Raises:
        ValueError: an option that is unknown, cannot be read or is out of range.
    """
    if is_llamafactory_v1(settings):
        rate = settings.get("learning_rate")
        options = section_of(settings, "optim_config") if is_muon(optimizer_of(settings)) else {}
        return llamafactory_v1.config_from(options if rate is None else {"lr": rate, **options})
    return config_from_arguments(_training_arguments(settings, _OPTIONS))


def refusals(settings: Settings) -> list[str]:
    """Return why `optim: muon` would be refused when the run starts; an empty list if it would train.

    Args:
        settings: of `read_training_file`; `options_of` has accepted them.
    """
    complaints = []
    of_trainer = (_check_rivals, _check_arguments, _check_deepspeed)
    for check in (_check_v1,) if is_llamafactory_v1(settings) else of_trainer:
        try:
            check(settings)
        except (ValueError, RuntimeError, OSError) as error:
            complaints.append(str(error))
    return complaints


# --- LLaMA-Factory v1


def _check_v1(settings: Settings) -> None:
    arguments = {**_identifiers(settings), "dist_config": section_of(settings, "dist_config")}
    llamafactory_v1.refuse_unsupported(SimpleNamespace(**arguments))


def section_of(settings: Settings, key: str) -> Mapping[str, Any]:
    """Return the mapping under a key; empty if there is none."""
    section = settings.get(key)
    if section is not None and not isinstance(section, Mapping):
        raise ValueError(f"{key}: {section} is no mapping. Write {key}: {{name: {section}}} [not-a-mapping]")
    return section or {}


# --- Trainer: transformers, TRL, LLaMA-Factory v0


def _check_rivals(settings: Settings) -> None:
    arguments = _identifiers(settings)
    if is_llamafactory(settings):  # its parser sets these from the environment
        for option, (variable, _) in MEGATRON.items():
            arguments[option] = is_set("llamafactory", variable)
    refuse_rivals(SimpleNamespace(**arguments))


def _check_arguments(settings: Settings) -> None:
    args = _training_arguments(settings, _LAYOUT)
    args.deepspeed = settings.get("deepspeed")
    with contextlib.suppress(ValueError):  # which _check_deepspeed raises
        args.deepspeed_plugin = SimpleNamespace(deepspeed_config=_deepspeed_config(args.deepspeed))
    refuse_unsupported(args)


def _check_deepspeed(settings: Settings) -> None:
    from hf_muon.integrations.deepspeed.refusals import refuse_momentum
    from hf_muon.rules import registry

    options = options_of(settings)
    names = (*registry.option_names(), "momentum_dtype", "momentum_offload", "adamw_state_dtype")
    own = {name: options.value_of(name) for name in names}
    rates = {True: options.muon_lr, False: options.adamw_lr}
    groups = [
        {**own, "use_muon": use_muon, "lr": options.value_of("lr") if lr is None else lr}
        for use_muon, lr in rates.items()
    ]
    config = _deepspeed_config(settings.get("deepspeed"))
    if config is not None:
        refuse_momentum(SimpleNamespace(param_groups=groups), config)  # type: ignore[arg-type]


def _training_arguments(settings: Settings, fields: Sequence[str]) -> TrainingArguments:
    """Return transformers' own arguments, with some fields of a file.

    Raises:
        ValueError: fields that TrainingArguments refuse, and options of Muon that are not valid.
    """
    from transformers import TrainingArguments

    values = {key: copy.deepcopy(settings[key]) for key in fields if settings.get(key) is not None}
    optim = optimizer_of(settings)
    if not (optim is None or is_muon(optim)):
        values = {key: value for key, value in values.items() if key not in _OF_OPTIMIZERS}
    with _own_environment():
        try:
            args = TrainingArguments(output_dir="unused", optim=OWN_NAME, use_cpu=True, report_to=[], **values)
        except (AttributeError, OSError, TypeError) as error:
            raise ValueError(
                f"{error}, in what TrainingArguments take: {', '.join(values)} [training-arguments]"
            ) from error
    parallelism = settings.get("parallelism_config")
    if isinstance(parallelism, Mapping):
        args.parallelism_config = SimpleNamespace(**_identifiers(parallelism))
    return args


def _deepspeed_config(value: Any) -> Mapping[str, Any] | None:
    """Return the DeepSpeed config that `deepspeed:` names or holds, as accelerate reads it.

    Raises:
        ValueError: a config that cannot be read.
    """
    if not value:
        return None
    from accelerate.utils.deepspeed import HfDeepSpeedConfig  # type: ignore[import-untyped]

    try:
        if not isinstance(value, (str, Mapping)):  # open() would take a number for a file descriptor
            raise TypeError("neither the path of a JSON file nor a mapping")
        config = HfDeepSpeedConfig(copy.deepcopy(value)).config
        if not isinstance(config, Mapping):
            raise TypeError("no object")
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"deepspeed: {value}, seen from {Path.cwd()}, cannot be read as a DeepSpeed config: {error} "
            "[unreadable-deepspeed-config]"
        ) from error
    return config


def _identifiers(settings: Settings) -> dict[str, Any]:
    return {str(key): value for key, value in settings.items() if str(key).isidentifier()}


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Hide a launcher's variables from TrainingArguments and accelerate, and undo their changes of the process."""
    from accelerate.state import PartialState  # type: ignore[import-untyped]

    variables = dict(os.environ)
    fresh = not PartialState._shared_state
    for name in _VARIABLES:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        if fresh:
            PartialState._reset_state()
