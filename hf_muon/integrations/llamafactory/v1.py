"""LLaMA-Factory v1 (`USE_V1=1`): `optim_config: {name: muon, ...}`, through its own registry of optimizers."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.config import MuonConfig
    from hf_muon.optimizer.muon import Muon

NAME = "muon"
OURS = "_from_hf_muon"
# What LLaMA-Factory's own muon calls an option that has another name here.
ALIASES = {"wd": "weight_decay"}
INTERFACE = "llamafactory.v1.accelerator.interface"


def patch_optimizers(module: ModuleType) -> Callable[[], None] | None:
    """Register `muon`, in place of the one that newer sources have.

    Args:
        module: the one that defines `OptimizerPlugin`: `...trainer_plugins.optimizer` in 0.9.5,
            `...trainer_plugins.optimizers.optimizer` in newer sources.
    """
    plugin = module.OptimizerPlugin
    registry: dict[str, Any] = plugin._registry
    before = registry.get(NAME)
    if getattr(_function_of(before), OURS, False):
        return None
    # In 0.9.5 looking a name up leaves an empty entry behind; and registering over an entry logs a warning.
    theirs = registry.pop(NAME, None)
    replaced = _function_of(theirs) is not None

    def muon(model: nn.Module, optim_config: Mapping[str, Any]) -> Muon:
        if replaced:
            _tell_of_replacement()
        return create_optimizer(model, optim_config)

    setattr(muon, OURS, True)
    plugin(NAME).register()(muon)

    def undo() -> None:
        registry.pop(NAME, None)
        if theirs is not None:
            registry[NAME] = theirs

    return undo


def _function_of(entry: Any) -> Any:
    """What an entry of the registry calls: 0.9.5 keeps a dict of methods, newer sources the function itself."""
    return entry.get("__call__") if isinstance(entry, dict) else entry


def _tell_of_replacement() -> None:
    from hf_muon.config import MuonConfig
    from hf_muon.diagnostics import log as diagnostics

    if diagnostics.is_rank_zero():
        betas = "|".join(map(str, MuonConfig.adamw_betas))
        diagnostics.logger().info(
            "hf_muon's muon runs instead of LLaMA-Factory's own; what optim_config leaves out has hf_muon's defaults "
            "(weight_decay %s, adamw_betas %s). HF_MUON_AUTOLOAD=0 gives you theirs",
            MuonConfig.weight_decay,
            betas,
        )


def patch_training_arguments(module: ModuleType) -> Callable[[], None] | None:
    """Check `optim_config` and `dist_config` when TrainingArguments are made, and hand muon the others that it needs.

    These are the learning rate, which only newer sources than 0.9.5 hand to an optimizer, and `output_dir`, where
    diagnostics go.
    """
    arguments = module.TrainingArguments
    post_init = arguments.__post_init__
    if getattr(post_init, OURS, False):
        return None

    @functools.wraps(post_init)
    def checked_post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        from hf_muon.diagnostics.metrics import FILE

        post_init(self, *args, **kwargs)
        if self.optim_config is not None and self.optim_config.get("name") == NAME:
            self.optim_config.setdefault("lr", self.learning_rate)
            if self.optim_config.get("diagnostics_file") is None and getattr(self, "output_dir", None):
                self.optim_config["diagnostics_file"] = os.path.join(self.output_dir, FILE)
            config_from(self.optim_config)
            refuse_unsupported(self)

    setattr(checked_post_init, OURS, True)
    arguments.__post_init__ = checked_post_init

    def undo() -> None:
        arguments.__post_init__ = post_init

    return undo


def config_from(optim_config: Mapping[str, Any]) -> MuonConfig:
    """The options in an `optim_config`: hf_muon's names, and `wd`.

    Raises:
        ValueError: a key that is no option, with those that are; an option given under two names; or a value that
            cannot be read or is out of range.
    """
    from hf_muon.config import MuonConfig, unknown_option

    options: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in optim_config.items():
        if key == "name":
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


def refuse_unsupported(args: Any) -> None:
    """Raise where a run of LLaMA-Factory v1 would train something that is not Muon.

    Args:
        args: v1's TrainingArguments, of 0.9.5 (context parallel keys in `dist_config`) or newer (at the top level).

    Raises:
        ValueError: context parallelism without FSDP2, or over something that is no number of ranks.
        RuntimeError: a `dist_config` that this version has not been shown to step.
    """
    dist_config = args.dist_config or {}
    name = dist_config.get("name")
    sizes = [keys("cp_size", 1) or 1 for keys in (dist_config.get, functools.partial(_get, args))]
    for size in sizes:
        if not str(size).isdigit():
            raise ValueError(f"cp_size: {size} is no number of ranks")
    ranks = max(map(int, sizes))
    if ranks > 1 and name != "fsdp2":
        raise _partial_gradients(ranks)
    if name not in (None, "fsdp2"):
        raise RuntimeError(
            f"optim_config: muon does not run under dist_config: {name} in this version of hf_muon. Leave dist_config "
            "out for one process or DDP, or write dist_config: {name: fsdp2}. DeepSpeed works in v0: "
            "llamafactory-cli train without USE_V1, with optim: muon"
        )
    if dist_config.get("offload_params"):
        raise RuntimeError(
            "optim_config: muon does not run with offload_params: true, FSDP2 with its parameters on the CPU, in this "
            "version of hf_muon. Leave offload_params out, or choose another optimizer"
        )


def _get(args: Any, name: str, default: Any) -> Any:
    return getattr(args, name, default)


def _partial_gradients(ranks: int) -> ValueError:
    return ValueError(
        f"cp_size: {ranks} needs dist_config: {{name: fsdp2}}. Without it nothing sums the gradients of the {ranks} "
        "parts of a sequence: every rank would train a model of its own on its part, with a loss that looks normal. "
        "Write name: fsdp2 in dist_config, or remove cp_size"
    )


def create_optimizer(model: nn.Module, optim_config: Mapping[str, Any]) -> Muon:
    """What LLaMA-Factory v1 calls for `optim_config: {name: muon}`, after it has wrapped or sharded the model.

    Args:
        model: plain in one process, wrapped in DDP, or with DTensor parameters.
        optim_config: options, with the rate as `lr`.

    Raises:
        ValueError: an option that is not valid, no rate, or context parallelism without FSDP2.
        RuntimeError: several processes whose copies of the model nothing keeps together.
    """
    from hf_muon.build import build_optimizer

    if "lr" not in optim_config:
        raise ValueError(
            "optim_config has no lr, and this LLaMA-Factory hands its learning_rate to no optimizer. Write lr into "
            "optim_config; hf-muon doctor tells why learning_rate was not put there"
        )
    config = config_from(optim_config)
    _refuse_partial_gradients(model)
    return build_optimizer(model, config)


def _refuse_partial_gradients(model: nn.Module) -> None:
    """Whatever the arguments were: plain parameters on several ranks need somebody who reduces their gradients."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from hf_muon.diagnostics.log import has_process_group
    from hf_muon.storage.tensors import is_dtensor

    if not (has_process_group() and dist.get_world_size() > 1):
        return
    if any(is_dtensor(param) for param in model.parameters()):
        return
    interface = sys.modules.get(INTERFACE)
    if interface is not None:
        ranks = interface.DistributedInterface().get_world_size(interface.Dim.CP)
        if ranks > 1:
            raise _partial_gradients(ranks)
    if not isinstance(model, DistributedDataParallel):
        raise RuntimeError(
            f"{dist.get_world_size()} processes train a {type(model).__name__} that is neither wrapped in DDP nor "
            "sharded: nothing would reduce its gradients, and each would train a model of its own. Leave dist_config "
            "out for DDP, or write dist_config: {name: fsdp2}"
        )
