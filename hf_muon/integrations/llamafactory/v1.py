"""LLaMA-Factory v1 (`USE_V1=1`): `optim_config: {name: muon, ...}`, through its own registry of optimizers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_muon._autoload import Change
from hf_muon.diagnostics.log import FILE
from hf_muon.integrations.names import (
    NAME,
    NAMES,
    OWN_NAME,
    TAKEN,
    V1,
    is_muon,
    refuse_failed,
    warn_of_another_muon,
    warn_of_lost_moments,
)

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.config import MuonConfig
    from hf_muon.optimizer.muon import Muon

# Where TrainingArguments store the path of the metrics file in their output_dir.
_FILE_KEY = "diagnostics_file"


def config_from(optim_config: Mapping[str, Any]) -> MuonConfig:
    """Return the options of an `optim_config`.

    Raises:
        ValueError: an unknown option, or a value that cannot be read or is out of range.
    """
    from hf_muon.config import MuonConfig

    options = {key: value for key, value in optim_config.items() if key not in ("name", _FILE_KEY)}
    if "wd" in options and "weight_decay" not in options:  # the name that LLaMA-Factory's own muon has for it
        options["weight_decay"] = options.pop("wd")
    return MuonConfig.from_mapping(options)


def refuse_unsupported(args: Any) -> None:
    """Raise if a run of LLaMA-Factory v1 would train something other than Muon.

    Args:
        args: v1's TrainingArguments, of 0.9.5 (`cp_size` in `dist_config`) or newer (at the top level).

    Raises:
        ValueError: context parallelism without FSDP2.
        RuntimeError: a `dist_config` in which this version is not tested.
    """
    dist_config = args.dist_config or {}
    name = dist_config.get("name")
    sizes = dist_config.get("cp_size"), getattr(args, "cp_size", None)
    if wrong := [size for size in sizes if not isinstance(size, (int, type(None)))]:
        raise ValueError(f"cp_size: {wrong[0]} is not valid. Valid: a number of ranks [invalid-value]")
    ranks = max(size or 1 for size in sizes)
    if ranks > 1 and name != "fsdp2":
        raise ValueError(
            f"cp_size: {ranks} needs dist_config: {{name: fsdp2}}. Without it nothing sums the gradients of the "
            f"{ranks} parts of a sequence: every rank would train a model of its own on its part, with a loss that "
            "looks normal. Write name: fsdp2 in dist_config, or remove cp_size [cp-without-fsdp2]"
        )
    if name not in (None, "fsdp2"):
        raise RuntimeError(
            f"optim_config: muon does not run under dist_config: {name} in this version of hf_muon. Leave dist_config "
            "out for one process or DDP, or write dist_config: {name: fsdp2}. DeepSpeed works in v0: "
            "llamafactory-cli train without USE_V1, with optim: muon [unsupported-layout]"
        )


def patch_training_arguments(module: ModuleType) -> Iterator[Change]:
    """Check `optim_config` and `dist_config` as soon as TrainingArguments are made, and complete `optim_config`.

    Add the learning rate, which 0.9.5 does not pass to optimizers, and the path of a metrics file in `output_dir`.
    """
    post_init = module.TrainingArguments.__post_init__
    # An error marks the hook as failed, and runs of Muon are refused.
    fields = {field.name for field in dataclasses.fields(module.TrainingArguments)}
    if missing := {"learning_rate", "dist_config", "optim_config"} - fields:
        raise TypeError(f"TrainingArguments has no field {' and no field '.join(sorted(missing))}")

    @functools.wraps(post_init)
    def checked_post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        post_init(self, *args, **kwargs)
        options = getattr(self, "optim_config", None)
        name = options.get("name") if isinstance(options, Mapping) else None
        if not is_muon(name, V1):
            warn_of_another_muon(name, V1)
            return
        refuse_failed("LLaMA-Factory v1's optimizers", "newer v1's optimizers", one_is_needed=True)
        # Of all arguments, only this mapping reaches the function that makes the optimizer.
        self.optim_config.setdefault("lr", self.learning_rate)
        if getattr(self, "output_dir", None):
            self.optim_config.setdefault(_FILE_KEY, os.path.join(self.output_dir, FILE))
        config_from(self.optim_config)  # for its errors, before the model is loaded
        refuse_unsupported(self)

    # Until the registry of optimizers is found, which may have moved, we have registered nothing there.
    yield TAKEN, V1, TAKEN.get(V1, True)
    yield module.TrainingArguments, "__post_init__", checked_post_init


def patch_optimizers(module: ModuleType) -> Iterator[Change]:
    """Register our names; `muon` only where LLaMA-Factory has none, as newer sources do.

    Args:
        module: the one that defines `OptimizerPlugin`: `...trainer_plugins.optimizer` in 0.9.5, whose registry has a
            dict of methods for each name; `...trainer_plugins.optimizers.optimizer` in newer sources, whose registry
            has a function.
    """
    # Private: the public decorator neither tells whether a `muon` is there nor can be undone.
    registry = module.OptimizerPlugin._registry
    by_method = "method_name" in inspect.signature(module.OptimizerPlugin.register).parameters
    entry = registry.get(NAME)  # in 0.9.5 looking a name up leaves an empty one behind
    function = entry.get("__call__") if entry and by_method else entry
    is_theirs = function is not None and function.__module__ != __name__  # ours stays in a registry after a reload

    def create_optimizer(model: nn.Module, optim_config: Mapping[str, Any]) -> Muon:
        from hf_muon.build import build_optimizer

        # Without that hook `optim_config` lacks the learning rate, and nothing has been checked.
        refuse_failed("LLaMA-Factory v1's arguments", one_is_needed=True)
        return build_optimizer(model, config_from(optim_config), diagnostics_file=optim_config.get(_FILE_KEY))

    yield TAKEN, V1, is_theirs
    for name in (OWN_NAME,) if is_theirs else NAMES:
        yield registry, name, {"__call__": create_optimizer} if by_method else create_optimizer


def patch_resuming(module: ModuleType) -> Iterator[Change]:
    """Patch the resuming of a run: v1 says nothing if a checkpoint has no optimizer state.

    Args:
        module: `llamafactory.v1.core.utils.checkpoint`.
    """
    coordinator = module.TrainingCheckpointCoordinator
    resume = coordinator.resume

    @functools.wraps(resume)
    def resume_and_check(self: Any, *args: Any, **kwargs: Any) -> None:
        resume(self, *args, **kwargs)
        run = getattr(self, "_t", None)  # private; nothing else in the call leads to the optimizer
        optimizer, steps = getattr(run, "optimizer", None), getattr(run, "global_step", 0)
        warn_of_lost_moments(optimizer, steps, "LLaMA-Factory", "optimizer/state_dict.pt")

    yield coordinator, "resume", resume_and_check
