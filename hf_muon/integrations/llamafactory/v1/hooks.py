"""What is patched in LLaMA-Factory v1: its registry of optimizers, its TrainingArguments, and FSDP2's checkpoints."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_muon.integrations.llamafactory.v1.handler import config_from, create_optimizer
from hf_muon.integrations.llamafactory.v1.refusals import refuse_unsupported
from hf_muon.integrations.names import NAME, OWN_NAME, is_muon, is_ours, mark

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.optimizer.muon import Muon


def patch_optimizers(module: ModuleType) -> Callable[[], None] | None:
    """Register our names, `muon` in place of the one that newer sources have.

    Args:
        module: the one that defines `OptimizerPlugin`: `...trainer_plugins.optimizer` in 0.9.5,
            `...trainer_plugins.optimizers.optimizer` in newer sources.
    """
    plugin = module.OptimizerPlugin
    registry: dict[str, Any] = plugin._registry
    if is_ours(_function_of(registry.get(NAME))):
        return None
    # In 0.9.5 looking a name up leaves an empty entry behind, and registering over an entry logs a warning.
    theirs = registry.pop(NAME, None)
    replaced = _function_of(theirs) is not None

    def muon(model: nn.Module, optim_config: Mapping[str, Any]) -> Muon:
        if replaced:
            _log_replacement()
        return create_optimizer(model, optim_config)

    def hf_muon(model: nn.Module, optim_config: Mapping[str, Any]) -> Muon:
        return create_optimizer(model, optim_config)

    plugin(NAME).register()(mark(muon))
    plugin(OWN_NAME).register()(mark(hf_muon))

    def undo() -> None:
        registry.pop(NAME, None)
        registry.pop(OWN_NAME, None)
        if theirs is not None:
            registry[NAME] = theirs

    return undo


def _function_of(entry: Any) -> Any:
    """Return the function of a registry's entry: 0.9.5 keeps a dict of methods, newer sources the function itself."""
    return entry.get("__call__") if isinstance(entry, dict) else entry


def _log_replacement() -> None:
    from hf_muon.config import MuonConfig
    from hf_muon.diagnostics.log import is_rank_zero, logger

    if is_rank_zero():
        betas = "|".join(map(str, MuonConfig.adamw_betas))
        logger().info(
            "hf_muon's muon runs instead of LLaMA-Factory's own; what optim_config leaves out has hf_muon's defaults "
            "(weight_decay %s, adamw_betas %s). HF_MUON_AUTOLOAD=0 gives you theirs",
            MuonConfig.weight_decay,
            betas,
        )


def patch_training_arguments(module: ModuleType) -> Callable[[], None] | None:
    """Check `optim_config` and `dist_config` as soon as TrainingArguments are made, and complete `optim_config`.

    It receives the learning rate, which 0.9.5 does not hand to optimizers, and a file in `output_dir` for diagnostics.
    """
    arguments = module.TrainingArguments
    post_init = arguments.__post_init__
    if is_ours(post_init):
        return None

    @functools.wraps(post_init)
    def checked_post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        from hf_muon.diagnostics.metrics import FILE

        post_init(self, *args, **kwargs)
        if self.optim_config is not None and is_muon(self.optim_config.get("name")):
            self.optim_config.setdefault("lr", self.learning_rate)
            if self.optim_config.get("diagnostics_file") is None and getattr(self, "output_dir", None):
                self.optim_config["diagnostics_file"] = os.path.join(self.output_dir, FILE)
            steps = getattr(self, "max_steps", None)
            if self.optim_config.get("momentum_cooldown") and isinstance(steps, int) and steps > 0:
                self.optim_config.setdefault("training_steps", steps)
            config_from(self.optim_config)
            refuse_unsupported(self)

    arguments.__post_init__ = mark(checked_post_init)

    def undo() -> None:
        arguments.__post_init__ = post_init

    return undo


def patch_checkpoints(module: ModuleType) -> Callable[[], None] | str | None:
    """Patch `load_checkpoint` to convert sharded checkpoints, as far as a `Muon` converts whole states.

    Args:
        module: `...trainer_plugins.distributed.fsdp2`.
    """
    load = getattr(module, "load_checkpoint", None)
    if load is None:
        return "failed: this LLaMA-Factory loads checkpoints elsewhere; rules cannot be switched on when resuming"
    if is_ours(load):
        return None

    @functools.wraps(load)
    def load_converted(model: Any, optimizer: Any, ckpt_dir: str, **kwargs: Any) -> Any:
        from hf_muon.optimizer.muon import Muon
        from hf_muon.optimizer.sharded_checkpoints import loading_from

        shards = os.path.join(ckpt_dir, "optimizer")
        with loading_from(optimizer, shards) if isinstance(optimizer, Muon) else contextlib.nullcontext():
            return load(model, optimizer, ckpt_dir, **kwargs)

    module.load_checkpoint = mark(load_converted)  # type: ignore[attr-defined]

    def undo() -> None:
        module.load_checkpoint = load  # type: ignore[attr-defined]

    return undo
