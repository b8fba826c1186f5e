"""What is patched in LLaMA-Factory v1: its registry of optimizers, its arguments, and FSDP2's checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_muon._autoload import Change
from hf_muon.integrations.llamafactory.v1.handler import FILE_KEY, config_from, create_optimizer
from hf_muon.integrations.llamafactory.v1.refusals import refuse_factors, refuse_unsupported
from hf_muon.integrations.names import (
    NAME,
    OWN_NAME,
    first_with,
    is_muon,
    is_ours,
    mark,
    muons_in,
    refuse_unless,
    warn_that_ours_runs,
)

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.optimizer.muon import Muon

_ARGUMENTS = "LLaMA-Factory v1's arguments"
_REGISTRIES = ("LLaMA-Factory v1's optimizers", "newer v1's optimizers")


def patch_optimizers(module: ModuleType) -> Iterator[Change]:
    """Register our names, `muon` in place of the one that newer sources have.

    Args:
        module: the one that defines `OptimizerPlugin`: `...trainer_plugins.optimizer` in 0.9.5, whose registry has a
            dict of methods for each name; `...trainer_plugins.optimizers.optimizer` in newer sources, whose registry
            has a function.
    """
    registry = module.OptimizerPlugin._registry
    by_method = "method_name" in inspect.signature(module.OptimizerPlugin.register).parameters
    entry = registry.get(NAME)  # in 0.9.5 looking a name up leaves an empty one behind
    theirs = entry.get("__call__") if isinstance(entry, dict) else entry
    replaced = theirs is not None and not is_ours(theirs)

    def hf_muon(model: nn.Module, optim_config: Mapping[str, Any]) -> Muon:
        refuse_unless(_ARGUMENTS)
        return create_optimizer(model, optim_config)

    def muon(model: nn.Module, optim_config: Mapping[str, Any]) -> Muon:
        if replaced:
            warn_that_ours_runs("LLaMA-Factory", "optim_config: {name: muon}")
        return hf_muon(model, optim_config)

    for name, function in ((NAME, mark(muon)), (OWN_NAME, mark(hf_muon))):
        yield registry, name, {"__call__": function} if by_method else function


def patch_parser(module: ModuleType) -> Iterator[Change]:
    """Check arguments of several kinds together, before a model is loaded.

    Args:
        module: `llamafactory.v1.config.arg_parser`, before others import the function from it.
    """
    get_args = module.get_args

    @functools.wraps(get_args)
    def checked_get_args(*args: Any, **kwargs: Any) -> Any:
        parsed = get_args(*args, **kwargs)
        if isinstance(parsed, (tuple, list)):
            training, model = first_with(parsed, "optim_config"), first_with(parsed, "peft_config")
            options = getattr(training, "optim_config", None)
            if isinstance(options, Mapping) and is_muon(options.get("name")):
                refuse_factors(getattr(model, "peft_config", None), options)
        return parsed

    yield module, "get_args", checked_get_args


def patch_training_arguments(module: ModuleType) -> Iterator[Change]:
    """Check `optim_config` and `dist_config` as soon as TrainingArguments are made, and complete `optim_config`.

    It receives the learning rate, which 0.9.5 does not hand to optimizers, and a file in `output_dir` for diagnostics.
    """
    post_init = module.TrainingArguments.__post_init__
    fields = {field.name for field in dataclasses.fields(module.TrainingArguments)}
    if missing := {"learning_rate", "dist_config", "optim_config"} - fields:
        raise TypeError(f"TrainingArguments has no field {' and no field '.join(sorted(missing))}")

    @functools.wraps(post_init)
    def checked_post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        post_init(self, *args, **kwargs)
        options = getattr(self, "optim_config", None)
        if not isinstance(options, Mapping) or not is_muon(options.get("name")):
            return
        refuse_unless(*_REGISTRIES)  # otherwise a muon of LLaMA-Factory's own would run
        from hf_muon.diagnostics.metrics import FILE

        self.optim_config.setdefault("lr", self.learning_rate)
        if getattr(self, "output_dir", None):
            self.optim_config.setdefault(FILE_KEY, os.path.join(self.output_dir, FILE))
        config_from(self.optim_config)
        refuse_unsupported(self)

    yield module.TrainingArguments, "__post_init__", checked_post_init


def patch_checkpoints(module: ModuleType) -> Iterator[Change]:
    """Patch `load_checkpoint` to convert sharded checkpoints, as far as a `Muon` converts whole states.

    Args:
        module: `...trainer_plugins.distributed.fsdp2`.
    """
    load = module.load_checkpoint
    signature = inspect.signature(load)
    if "ckpt_dir" not in signature.parameters:
        raise TypeError("load_checkpoint has no argument ckpt_dir")

    @functools.wraps(load)
    def load_converted(*args: Any, **kwargs: Any) -> Any:
        muons = muons_in((*args, *kwargs.values()))
        if not muons:
            return load(*args, **kwargs)
        from hf_muon.optimizer.sharded_checkpoints import loading_from

        shards = os.path.join(signature.bind(*args, **kwargs).arguments["ckpt_dir"], "optimizer")
        with loading_from(muons[0], shards):
            return load(*args, **kwargs)

    yield module, "load_checkpoint", load_converted
