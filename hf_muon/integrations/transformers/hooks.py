"""`optim: muon` in transformers' TrainingArguments and Trainer."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_muon.diagnostics import log as diagnostics
from hf_muon.integrations.transformers.layouts import (
    refuse_deepspeed,
    refuse_plain_shards,
    refuse_unsupported,
    replicate_group,
    warn_of_fsdp,
)
from hf_muon.integrations.ulysses import hooks as ulysses

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments
    from transformers.trainer_optimizer import OptimizerContext

    from hf_muon.config import MuonConfig
    from hf_muon.optimizer.muon import Muon

# The rest of the package is imported where it is used: processes that never say `optim: muon` do not load it.

NAME = "muon"
MEMBER = "MUON"
OURS = "_from_hf_muon"
# What `optim: muon` needs, as pyproject.toml declares it. pip does not hold everybody to that.
OLDEST = {"transformers": "5.5.4", "accelerate": "1.11"}


def patch_training_args(module: ModuleType) -> Callable[[], None] | str | None:
    """Add the member `OptimizerNames.MUON`, and check muon's options when TrainingArguments are made."""
    names = module.OptimizerNames
    if getattr(names._value2member_map_.get(NAME), OURS, False):
        return None
    if NAME in names._value2member_map_:
        diagnostics.logger().info("transformers has its own optim: muon; hf_muon steps aside")
        return "stepped aside: transformers has its own optim: muon"
    member = str.__new__(names, NAME)
    member._name_, member._value_ = MEMBER, NAME
    member.__objclass__ = names
    setattr(member, OURS, True)
    member._sort_order_ = len(names._member_names_)
    names._member_names_.append(MEMBER)
    names._member_map_[MEMBER] = member
    names._value2member_map_[NAME] = member
    type.__setattr__(names, MEMBER, member)

    arguments = module.TrainingArguments
    post_init = arguments.__post_init__

    @functools.wraps(post_init)
    def checked_post_init(self: TrainingArguments, *args: Any, **kwargs: Any) -> None:
        if self.optim == NAME:
            from hf_muon.optim_args import text_of

            refuse_old_versions()
        post_init(self, *args, **kwargs)
        if self.optim is member:
            config_from_arguments(self)
            if isinstance(self.optim_args, Mapping):
                self.optim_args = text_of(self.optim_args)  # which is what transformers reads
            # An "optimizer" in a DeepSpeed config is used without asking for ours.
            refuse_deepspeed(self)

    arguments.__post_init__ = checked_post_init

    def undo() -> None:
        arguments.__post_init__ = post_init
        type.__delattr__(names, MEMBER)
        names._member_names_.remove(MEMBER)
        del names._member_map_[MEMBER], names._value2member_map_[NAME]

    return undo


def refuse_old_versions() -> None:
    """Raise where a package is older than what `optim: muon` needs; its first use would fail somewhere else.

    Raises:
        RuntimeError: the package, its version, and the oldest one that works.
    """
    for package, oldest in OLDEST.items():
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _numbers(installed) < _numbers(oldest):
            raise RuntimeError(
                f"optim: muon needs {package} {oldest} or newer, and {installed} is installed. "
                f'Run: pip install "{package}>={oldest}"'
            )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0])))


def patch_trainer_optimizer(module: ModuleType) -> Callable[[], None] | str | None:
    """Register the handler that `Trainer.get_optimizer_cls_and_kwargs` calls for `optim: muon`."""
    handlers = getattr(module, "_OPTIMIZER_HANDLERS", None)
    if handlers is None:
        return f"failed: this transformers has no registry of optimizers; take {OLDEST['transformers']} or newer"
    if handlers.get(NAME) is optimizer_handler:
        return None
    if NAME in handlers:
        return "stepped aside: transformers has its own optim: muon"
    handlers[NAME] = optimizer_handler

    def undo() -> None:
        handlers.pop(NAME, None)

    return undo


def patch_trainer(module: ModuleType) -> Callable[[], None] | str | None:
    """Have checkpoints named that are damaged or lack moments, metrics logged, and sequence parallel be right."""
    trainer = module.Trainer
    load = getattr(trainer, "_load_optimizer_and_scheduler", None)
    if load is None:
        return "failed: this transformers loads optimizers elsewhere; errors of damaged checkpoints do not name files"
    if getattr(load, OURS, False):
        return None

    @functools.wraps(load)
    def load_or_explain(self: Any, checkpoint: Any) -> None:
        try:
            load(self, checkpoint)
        except BaseException as error:  # the CheckpointException of torch.distributed.checkpoint is no Exception
            ours = checkpoint is not None and self.args.optim == NAME
            if ours and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                _explain_damage(Path(checkpoint), error)
            raise
        if checkpoint is not None and self.args.optim == NAME:
            warn_of_fresh_moments(self.optimizer, checkpoint)

    setattr(load_or_explain, OURS, True)
    trainer._load_optimizer_and_scheduler = load_or_explain
    log = trainer.log

    @functools.wraps(log)
    def log_with_metrics(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.args.optim == NAME:
            add_metrics(self, logs)
        log(self, logs, *args, **kwargs)

    trainer.log = log_with_metrics

    undo_ulysses = ulysses.patch_trainer(module)

    def undo() -> None:
        trainer._load_optimizer_and_scheduler = load
        trainer.log = log
        if undo_ulysses:
            undo_ulysses()

    return undo


def add_metrics(trainer: Any, logs: dict[str, float]) -> None:
    """Put what was measured since the last time beside a loss that is about to be logged, and the loss into its file.

    Callbacks (TensorBoard, W&B, MLflow) and trainer_state.json then have it. Nothing happens where metrics are off.
    """
    optimizer = trainer.optimizer
    while optimizer is not None and not hasattr(optimizer, "metrics"):  # accelerate's wrapper, ZeRO's
        optimizer = getattr(optimizer, "optimizer", None)
    metrics = getattr(optimizer, "metrics", None)
    if metrics is None:
        return
    news = metrics.news() if "loss" in logs else {}
    metrics.heard(trainer.state.global_step, logs)
    logs.update(news)


def warn_of_fresh_moments(optimizer: Any, checkpoint: Any) -> None:
    """Log on rank 0 that a run was resumed without its moments, which Trainer does not say."""
    from hf_muon.diagnostics import log as diagnostics
    from hf_muon.optimizer.muon import Muon

    while optimizer is not None and not isinstance(optimizer, Muon):  # accelerate's wrapper, ZeRO's
        optimizer = getattr(optimizer, "optimizer", None)
    if optimizer is None or any(group["step"] for group in optimizer.param_groups) or not diagnostics.is_rank_zero():
        return
    diagnostics.logger().warning(
        "the moments start from zero: Trainer has loaded no optimizer state from %s (it needs optimizer.pt, or "
        "FSDP's optimizer.bin or optimizer_0, and scheduler.pt). The run differs from one that went on",
        checkpoint,
    )


def _explain_damage(checkpoint: Path, error: BaseException) -> None:
    """Raise another error if files of the checkpoint are damaged.

    Raises:
        RuntimeError: which ones, and which checkpoint there is besides.
    """
    from hf_muon.integrations.checkpoint_files import damaged_files, earlier_checkpoint

    if damaged := damaged_files(checkpoint):
        before = earlier_checkpoint(checkpoint)
        raise RuntimeError(
            f"This checkpoint is damaged: {'; '.join(damaged)}. Resume from "
            f"{f'the one before it, {before}' if before else 'another one'}, and remove this one."
        ) from error


def optimizer_handler(context: OptimizerContext) -> tuple[Any, dict[str, Any]]:
    """What transformers calls for `optim: muon`.

    With a model, a factory that transformers calls as ``factory()(model, **kwargs)``; without one, a class for
    ready-made param groups.
    """
    from hf_muon.diagnostics.metrics import FILE

    config = config_from_arguments(context.args, context.optim_args)
    if config.diagnostics_file is None:
        file = os.path.join(context.args.output_dir or "", FILE)
        config = config.replace({"diagnostics_file": file})
    refuse_unsupported(context.args)
    refuse_plain_shards(context.model)
    warn_of_fsdp(context.args)
    options = {"config": config, "replicate_group": replicate_group(context.model)}
    if context.model is None:
        from hf_muon.integrations.ready_groups import MuonOfGroups

        return MuonOfGroups, options

    return lambda: _build, options


def _build(model: nn.Module, **options: Any) -> Muon:
    from hf_muon.build import build_optimizer

    optimizer = build_optimizer(model, **options)
    ulysses.CORRECTED.add(optimizer)
    return optimizer


def config_from_arguments(args: TrainingArguments, optim_args: Mapping[str, str] | None = None) -> MuonConfig:
    """The options of a run: TrainingArguments' own fields, replaced by what `optim_args` says.

    Raises:
        ValueError: an option in `optim_args` that is unknown, cannot be read or is out of range.
    """
    from hf_muon.config import MuonConfig
    from hf_muon.optim_args import parse_optim_args

    config = MuonConfig.from_mapping(
        {
            # PyYAML reads 1e-5 as text, and transformers passes that on.
            "lr": args.learning_rate,
            "weight_decay": args.weight_decay,
            "adamw_betas": (float(args.adam_beta1), float(args.adam_beta2)),
            "adamw_eps": args.adam_epsilon,
            "optim_target_modules": args.optim_target_modules or None,
        }
    )
    return config.replace(parse_optim_args(args.optim_args) if optim_args is None else optim_args)
