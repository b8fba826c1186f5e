"""From LLaMA-Factory v1's `optim_config` to a `Muon`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_muon.integrations.llamafactory.v1.refusals import refuse_partial_gradients

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.config import MuonConfig
    from hf_muon.optimizer.muon import Muon

# Where TrainingArguments put the file of metrics, which lies in their output_dir.
FILE_KEY = "diagnostics_file"
# LLaMA-Factory's own muon has another name for this option.
ALIASES = {"wd": "weight_decay"}


def config_from(optim_config: Mapping[str, Any]) -> MuonConfig:
    """Return the options of an `optim_config`, whose keys are hf_muon's names and `wd`.

    Raises:
        ValueError: a key that is no option, with those that are; an option given under two names; or a value that
            cannot be read or is out of range.
    """
    from hf_muon.config import MuonConfig, unknown_option

    options: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in optim_config.items():
        if key in ("name", FILE_KEY):
            continue
        name = ALIASES.get(key, key)
        if name not in MuonConfig.names():
            raise unknown_option(key, ("name", *MuonConfig.names(), *ALIASES))
        if name in options:
            raise ValueError(
                f"optim_config: {keys[name]}: {options[name]} and {key}: {value} are two names of one option. "
                "Keep one of them"
            )
        options[name], keys[name] = value, key
    return MuonConfig.from_mapping(options)


def create_optimizer(model: nn.Module, optim_config: Mapping[str, Any]) -> Muon:
    """Build the optimizer of `optim_config: {name: muon}`, after v1 has wrapped or sharded the model.

    Args:
        model: plain in one process, wrapped in DDP, or with DTensor parameters.
        optim_config: options, with the rate as `lr`.

    Raises:
        ValueError: an option that is not valid, no rate, or context parallelism without FSDP2.
        RuntimeError: several processes whose copies of the model nothing synchronizes.
    """
    from hf_muon.build import build_optimizer

    if "lr" not in optim_config:
        raise ValueError(
            "optim_config has no lr, and this LLaMA-Factory hands its learning_rate to no optimizer. Write lr into "
            "optim_config; hf-muon doctor tells why learning_rate was not put there"
        )
    config = config_from(optim_config)
    refuse_partial_gradients(model)
    return build_optimizer(model, config, diagnostics_file=optim_config.get(FILE_KEY))
