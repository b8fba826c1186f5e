"""Training files of transformers, TRL and LLaMA-Factory: their options, and why runs are refused.

The functions that refuse a run at its start are called here with the arguments from the file. Conditions that depend
only on the machine, such as GPUs and installed packages, are not checked.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hf_muon.integrations.llamafactory import v1 as llamafactory_v1
from hf_muon.integrations.llamafactory.v0 import MEGATRON, refuse_rivals
from hf_muon.integrations.names import OWN_NAME, TRANSFORMERS, V1, is_muon, is_set
from hf_muon.integrations.transformers.handler import config_from_arguments
from hf_muon.integrations.transformers.run_refusals import refuse_parts_of_sequences, refuse_unsupported

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from hf_muon.config import MuonConfig

Settings = Mapping[str, Any]

# Keys by which a file of LLaMA-Factory v0 is recognized also where it is not installed. Its default is LoRA.
_LLAMAFACTORY = ("stage", "finetuning_type", "template", "cutoff_len", "lora_target", "dataset_dir")
_FOREIGN = {
    "distributed_type": "a config of accelerate",
    "base_model": "a file of axolotl, which hf_muon does not read",
    "zero_optimization": "a DeepSpeed config",
    "train_micro_batch_size_per_gpu": "a DeepSpeed config",
}
"""What another file is, by a key."""
# Fields of TrainingArguments that mean something else, or nothing, to another optimizer.
_OF_OPTIMIZERS = {"optim_args", "optim_target_modules"}
_OF_MACHINE = {"tf32", "use_cpu", "output_dir", "report_to"}
ELSEWHERE = frozenset({"fsdp", "fsdp_config", "optim", "optim_config", *_OF_OPTIMIZERS}).union(
    {"deepspeed", "parallelism_config", "dist_config", "cp_size", "cp_mode", "trust_remote_code", *_OF_MACHINE}
)
"""Keys that do not choose the model or a batch: of the optimizer, the layout and the machine."""
# The first three start a process group, the next two set in accelerate what a file sets here, others choose Megatron.
_VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"]
_VARIABLES += [variable for variable, _ in MEGATRON.values()]


def read_training_file(path: Path) -> dict[str, Any]:
    """Return the keys and values of a file.

    Raises:
        ValueError: a file that cannot be read, holds something else, names no model, or mixes two programs.
    """
    import yaml

    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("YAML", yaml.safe_load)
    try:
        settings = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as {kind}: {' '.join(str(error).split())} [unreadable-file]") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ValueError(f"{path} does not hold keys and values [not-a-mapping]")
    if not isinstance(settings.get("model_name_or_path", settings.get("model")), str):
        if programs := [text for key, text in _FOREIGN.items() if key in settings]:
            raise ValueError(f"{path} is {programs[0]}. Give the training file that runs with it [no-model]")
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


def optimizer_of(settings: Settings) -> str | None:
    """Return the name of the optimizer that a file asks for.

    Raises:
        ValueError: `optim_config` is not a mapping.
    """
    section = section_of(settings, "optim_config") if is_llamafactory_v1(settings) else {"name": settings.get("optim")}
    name = section.get("name")
    return None if name is None else str(name)


def asks_for_muon(settings: Settings) -> bool:
    """Return whether the program of a file would make this package's optimizer, and not another or its own `muon`."""
    return is_muon(optimizer_of(settings), V1 if is_llamafactory_v1(settings) else TRANSFORMERS)


def options_of(settings: Settings) -> MuonConfig:
    """Return the options of Muon with which a run would start, without those of another optimizer.

    Raises:
        ValueError: an option that is unknown, cannot be read or is out of range.
    """
    if is_llamafactory_v1(settings):
        rate = settings.get("learning_rate")
        options = section_of(settings, "optim_config") if asks_for_muon(settings) else {}
        return llamafactory_v1.config_from(options if rate is None else {"lr": rate, **options})
    return config_from_arguments(training_arguments(settings))


def refusals(settings: Settings) -> list[str]:
    """Return why `optim: muon` would be refused when the run starts, whatever its model is; an empty list if not.

    Args:
        settings: the keys and values of a file, whose options `options_of` has accepted.
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
    if isinstance(section, str) and section.startswith("{"):  # v1 also takes JSON in a text
        with contextlib.suppress(ValueError):
            section = json.loads(section)
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
    args = training_arguments(settings)
    refuse_parts_of_sequences(args, config_from_arguments(args).qk_clip)
    args.deepspeed = settings.get("deepspeed")
    with contextlib.suppress(ValueError):  # `_check_deepspeed` raises it
        args.deepspeed_plugin = SimpleNamespace(deepspeed_config=deepspeed_config(args.deepspeed))
    refuse_unsupported(args)


def _check_deepspeed(settings: Settings) -> None:
    deepspeed_config(settings.get("deepspeed"))


def training_arguments(settings: Settings) -> TrainingArguments:
    """Return transformers' own arguments, with the fields of a file but for DeepSpeed's and the machine's.

    Raises:
        ValueError: fields that TrainingArguments refuse, and options of Muon that are not valid.
    """
    from transformers import TrainingArguments
    from transformers.training_args import OptimizerNames

    optim = optimizer_of(settings)
    names_of_optimizers = [member.value for member in OptimizerNames]
    if optim is not None and optim not in names_of_optimizers:
        matches = difflib.get_close_matches(optim, names_of_optimizers, 1)
        raise ValueError(
            f"optim: {optim} is not an optimizer of transformers{f'; did you mean {matches[0]}?' if matches else ''} "
            "[unknown-optimizer]"
        )
    exceptions = {"fsdp", "fsdp_config"} | (_OF_OPTIMIZERS if optim is None or is_muon(optim) else set())
    names = {field.name for field in dataclasses.fields(TrainingArguments)} - (ELSEWHERE - exceptions)
    values = {key: copy.deepcopy(value) for key, value in settings.items() if key in names and value is not None}
    with own_environment():
        # Values are copies, because transformers rewrites keys of `fsdp_config`; a file is read without a GPU, too.
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


def deepspeed_config(value: Any) -> Mapping[str, Any] | None:
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
def own_environment() -> Iterator[None]:
    """Hide a launcher's variables from other programs, show no warnings, and undo their changes of the process."""
    from accelerate.state import PartialState  # type: ignore[import-untyped]

    variables = dict(os.environ)
    # Private, here and below: asking a PartialState makes one, and no public function takes it back.
    had_state = bool(PartialState._shared_state)
    for name in _VARIABLES:
        os.environ.pop(name, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        if not had_state:
            PartialState._reset_state()
