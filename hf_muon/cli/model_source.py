"""Read a model without its weights from the argument of a command: a folder, a configuration, a name."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_muon.config import MuonConfig
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
_QUANTIZED = (
    "the checkpoint is quantized, and this table is of a run that dequantizes it, as LLaMA-Factory does with FP8 and "
    "MXFP4. Other runs can train LoRA factors over it, or a checkpoint that is not quantized"
)
_OWNERS = {"qwen3": "Qwen", "llama": "meta-llama"}
"""Owners on the hub of known configurations whose checkpoint is not quantized, by the first word of the name."""


@dataclass(frozen=True)
class Source:
    """A model and the options of a run.

    Attributes:
        title: name of the file or configuration.
        model: without weights, on the meta device.
        config: options of Muon.
        notes: further lines for the user.
    """

    title: str
    model: nn.Module
    config: MuonConfig
    notes: Sequence[str] = ()

    @functools.cached_property
    def routes(self) -> list[Route]:
        """The routes of the model's parameters."""
        from hf_muon.routing.route import route_parameters

        return route_parameters(self.model, self.config)

    @functools.cached_property
    def refusals(self) -> list[str]:
        """Why no Muon can be made of the model and the options; empty if one can."""
        from hf_muon.build import muon_of

        try:
            muon_of(self.model, self.routes, self.config)
        except (ValueError, RuntimeError) as error:
            return [str(error)]
        return []


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
        text: a model's directory or `config.json`, the name of a known configuration, or one on the hub.
        optim_args: options of Muon, as in TrainingArguments.
        trust_remote_code: run the code that comes with a model which transformers does not know.

    Raises:
        ValueError: `text` is none of these, or its contents are not valid.
    """
    path = Path(text).expanduser()
    if path.is_file() and not _is_config(path):
        command = f"python {path}" if path.suffix == ".py" else f"llamafactory-cli train {path}"
        raise ValueError(
            f"{path} is no model's configuration. Of a run, give the command, as in hf-muon inspect -- {command}, or "
            "trl sft --config FILE, or torchrun, with all its words [give-the-command]"
        )
    model = model_from(text, trust_remote_code=trust_remote_code)
    is_quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    notes = [_QUANTIZED] if is_quantized else []
    return Source(text, model, _replaced(MuonConfig(), optim_args), notes)


def _is_config(path: Path) -> bool:
    """Return whether a file is the configuration of a model."""
    with contextlib.suppress(OSError, TypeError, ValueError):
        return path.name == "config.json" or "model_type" in json.loads(path.read_text(encoding="utf-8"))
    return False


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
        raise ValueError(f"{path} holds no config.json. Name a model's directory [no-config-json]")
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
                f"{text} does not exist here and cannot be fetched from the hub: {first_line(error)}. "
                f"{_valid()} [not-on-hub]"
            ) from error
        raise _no_model(text, error) from error


def _known(text: str) -> dict[str, Any] | None:
    """Return the configuration of a known name, or of one on the hub whose checkpoint is not quantized."""
    owner, _, name = text.rpartition("/")
    is_theirs = not owner or owner == _OWNERS.get(name.lower().partition("-")[0])
    return known_configs().get(name.lower()) if is_theirs else None


def _valid() -> str:
    return (
        "Name a model's directory or config.json, a name on the hub such as Qwen/Qwen3-0.6B, or one of "
        f" {', '.join(known_configs())}"
    )


def _is_hub_name(text: str) -> bool:
    is_file = text.endswith((".yaml", ".yml", ".json"))  # mistyped
    return re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", text) is not None and not is_file


def _no_model(text: Any, error: BaseException) -> ValueError:
    reason = f"{type(error).__name__}: {first_line(error)}"
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
        return without_weights(text, make, config)
    except Exception as error:  # a model's own code can fail in any way
        if str(error).endswith("]"):  # it has its code already
            raise
        raise _no_model(text, error) from error


def without_weights(name: Any, make: Callable[..., nn.Module], config: Any) -> nn.Module:
    """Return a model on the meta device, in its configuration's dtype.

    Raises:
        ValueError: its constructor reads weights.
    """
    import torch

    from hf_muon.routing.model_facts import text_config_of

    try:
        with torch.device("meta"):
            return make(config, dtype=config.dtype or text_config_of(config).dtype)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{name}: its constructor computes with weights, which are not allocated here ({first_line(error)}). "
            "Build the model in Python and pass it to hf_muon.route_parameters [constructor-computes]"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
