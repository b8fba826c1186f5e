"""Read the model, without its weights, and the options of a run, from the argument of a command."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_muon.cli import programs
from hf_muon.cli.console import status
from hf_muon.config import MuonConfig
from hf_muon.integrations.names import NAME, OWN_NAME, is_set
from hf_muon.integrations.transformers.training_file import (
    asks_for_muon,
    deepspeed_config,
    optimizer_of,
    options_of,
    read_training_file,
    refusals,
)
from hf_muon.optim_args import parse_optim_args

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.routing.route import Route

# Tried in this order for a configuration that does not name a class.
_AUTO = (
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForTextToWaveform",
    "AutoModelForCausalLM",
    "AutoModel",
)


@dataclass(frozen=True)
class Source:
    """The model and the options of a run.

    Attributes:
        title: name of the file or configuration.
        model: without weights, on the meta device.
        config: options of Muon.
        notes: further lines for the user.
        complaints: why the run would be refused whatever its model is.
        settings: the settings of the training file; empty without one.
        program: the program of the training file.
        arguments: that program's own dataclasses.
    """

    title: str
    model: nn.Module
    config: MuonConfig
    notes: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)
    program: str = ""
    arguments: Sequence[Any] = ()

    def argument(self, *names: str) -> Any:
        """Return the first of these arguments of the program that has a value; None if none has."""
        values = (getattr(part, name, None) for name in names for part in self.arguments)
        return next((value for value in values if value is not None), None)

    @functools.cached_property
    def routes(self) -> list[Route]:
        """The routes of the model's parameters."""
        from hf_muon.routing.route import route_parameters

        return route_parameters(self.model, self.config)

    @functools.cached_property
    def refusals(self) -> list[str]:
        """Why the run would be refused before training: `complaints`, and what its optimizer says; empty if not."""
        from hf_muon.build import muon_of
        from hf_muon.integrations.deepspeed.refusals import refuse_momentum

        config = None
        with contextlib.suppress(ValueError):  # a file that is not there is among the complaints
            config = deepspeed_config(self.settings.get("deepspeed"))
        try:
            optimizer = muon_of(self.model, self.routes, self.config)
            if config is not None:
                refuse_momentum(optimizer, config)
        except (ValueError, RuntimeError) as error:
            return [*self.complaints, str(error)]
        return self.complaints


def refuse(title: str, reasons: Sequence[str]) -> None:
    """Raise if there are reasons to refuse a run.

    Raises:
        ValueError: all reasons.
    """
    if reasons:
        raise ValueError(f"{title} would be refused:" + "".join(f"\n  - {reason}" for reason in reasons))


def read_source(text: str, optim_args: str = "", *, trust_remote_code: bool = False) -> Source:
    """Return a model and its options.

    Args:
        text: a model's directory or `config.json`, a training file, the name of a known configuration, or one on the
            hub.
        optim_args: options that override those of a training file, as in TrainingArguments.
        trust_remote_code: run the code that comes with a model which transformers does not know.

    Raises:
        ValueError: `text` is none of these, or its contents are not valid.
    """
    path = Path(text).expanduser()
    if path.is_file() and not _is_config(path):
        with status(f"asking the program of {path} what it trains; its imports take some seconds"):
            return _source_of_run(path, optim_args, trust_remote_code)
    model = model_from(text, trust_remote_code=trust_remote_code)
    return Source(text, model, _replaced(MuonConfig(), optim_args), _notes_on(model))


def _is_config(path: Path) -> bool:
    """Return whether a file is the configuration of a model, and not a training file."""
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ValueError(
            f"{path} is neither YAML nor JSON. Give the training file that it runs with, or a model's directory "
            "[not-a-training-file]"
        )
    with contextlib.suppress(OSError, TypeError, ValueError):  # read_training_file says what is wrong
        return path.name == "config.json" or "model_type" in json.loads(path.read_text(encoding="utf-8"))
    return False


def _source_of_run(path: Path, optim_args: str, trust_remote_code: bool) -> Source:
    """Return the model and the options that a training file describes."""
    settings = read_training_file(path)
    name, optim = str(settings.get("model_name_or_path", settings.get("model"))), optimizer_of(settings)
    try:
        config = options_of(settings)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from error
    complaints = refusals(settings)
    try:
        program, model, arguments, notes = _asked(path, name, settings, trust_remote_code)
    except ValueError:
        refuse(str(path), complaints if asks_for_muon(settings) else [])
        raise
    notes += _notes_on(model)
    if not asks_for_muon(settings):
        asked, ours = f"optim: {optim}" if optim else "no optim", NAME
        if optim == NAME:
            asked, ours = f"{asked}, which is its program's own", OWN_NAME
        notes.append(f"{path} says {asked}: this is what optim: {ours} would do")
        notes += [f"optim: {ours} would be refused: {complaint}" for complaint in complaints]
        complaints = []
    config = _replaced(config, optim_args)
    return Source(str(path), model, config, notes, complaints, settings, program, arguments)


def _asked(
    path: Path, name: str, settings: Mapping[str, Any], trust_remote_code: bool
) -> tuple[str, nn.Module, Sequence[Any], list[str]]:
    """Return a file's program, and what it says."""
    program = programs.program_of(settings)
    try:
        if is_set("llamafactory", "USE_MODELSCOPE_HUB") and not (Path(name).exists() or _known(name)):
            raise ValueError(
                f"{name} is a name on ModelScope (USE_MODELSCOPE_HUB), from which nothing is fetched. Name the folder "
                "of its config.json [not-on-hub]"
            )
        config = config_from(name, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ValueError(f"{path}, its model: {error}") from error
    is_known = program == programs.TRL or importlib.util.find_spec("llamafactory")
    if program == programs.SCRIPT or not is_known:
        return program, *programs.ask_nobody(program, settings, _model_of(name, config, trust_remote_code))
    with tempfile.TemporaryDirectory() as folder:
        if not Path(name).expanduser().exists() and _known(name):
            config.save_pretrained(folder)
            name = folder
        return program, *programs.ask(program, settings, os.path.expanduser(name), trust_remote_code=trust_remote_code)


def _notes_on(model: nn.Module) -> list[str]:
    """Return notes on a quantized checkpoint, whose weights are shown as before quantization."""
    if getattr(getattr(model, "config", None), "quantization_config", None) is None or hasattr(model, "peft_config"):
        return []
    return [
        "the checkpoint is quantized, and this table is of a run that dequantizes it, as LLaMA-Factory does with FP8 "
        "and MXFP4. Other runs can train LoRA factors over it, or a checkpoint that is not quantized"
    ]


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
    return _model_of(text, config_from(text, trust_remote_code=trust_remote_code), trust_remote_code)


def config_from(text: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a model that is named as for `model_from`.

    Raises:
        ValueError: there is no such model, or its configuration cannot be read.
    """
    import transformers

    path = Path(text).expanduser()
    is_here, known_config = path.exists(), _known(str(text))
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"{path} holds no config.json. Name a model's directory, or a training file [no-config-json]")
    if not (is_here or known_config or _is_hub_name(str(text))):
        raise ValueError(f"{text} does not exist. {_valid()} [no-such-source]")
    try:
        if known_config and not is_here:
            config = transformers.AutoConfig.for_model(**known_config)
            # A configuration from the hub names its class. Private: transformers has no public map to classes.
            causal: Any = transformers.AutoModelForCausalLM._model_mapping
            config.architectures = [causal[type(config)].__name__]
            return config
        return transformers.AutoConfig.from_pretrained(
            path if is_here else str(text), local_files_only=is_here, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a model's own code can fail in any way
        if isinstance(error, OSError) and not is_here:
            raise ValueError(
                f"{text} does not exist here and cannot be fetched from the hub: {programs.first_line(error)}. "
                f"{_valid()} [not-on-hub]"
            ) from error
        raise _no_model(text, error) from error


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
    is_file = text.endswith((".yaml", ".yml", ".json"))  # mistyped
    return re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", text) is not None and not is_file


def _no_model(text: Any, error: BaseException) -> ValueError:
    reason = f"{type(error).__name__}: {programs.first_line(error)}"
    if "trust_remote_code" in str(error):
        reason = (
            "it comes with code of its own. Read that code, and if you trust it say --trust-remote-code, which runs it"
        )
    return ValueError(f"{text}: no model can be made of it: {reason} [unbuildable-model]")


def _model_of(text: Any, config: Any, trust_remote_code: bool) -> nn.Module:
    """Return a model on the meta device: of the class that its configuration names, else of the first auto class."""
    import transformers

    custom = getattr(config, "auto_map", None) or {} if trust_remote_code else {}
    autos: list[Any] = [
        auto for name in _AUTO if type(config) in (auto := getattr(transformers, name))._model_mapping or name in custom
    ]
    auto = (autos or [transformers.AutoModelForCausalLM])[0]
    make: Any = functools.partial(auto.from_config, trust_remote_code=trust_remote_code)
    named = getattr(transformers, next(iter(config.architectures or []), ""), None)
    if not custom and isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        make = named._from_config
    try:
        return programs.without_weights(text, make, config)
    except Exception as error:  # a model's own code can fail in any way
        if str(error).endswith("]"):  # it has its code already
            raise
        raise _no_model(text, error) from error
