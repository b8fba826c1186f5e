"""What is patched in transformers: our names and their handler, and Trainer's loading, logging and loss."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_muon.diagnostics.log import logger
from hf_muon.integrations.accelerate import patch_sharded_loading
from hf_muon.integrations.names import NAME, NAMES, OWN_NAME, TRAINER_LOG, is_muon, is_ours, mark
from hf_muon.integrations.transformers import changed_layouts, context_parallel
from hf_muon.integrations.transformers.checkpoint_files import explain_damage, muon_inside, warn_of_fresh_moments
from hf_muon.integrations.transformers.handler import config_from_arguments, optimizer_handler
from hf_muon.integrations.transformers.refusals import OLDEST, refuse_deepspeed, refuse_old_versions
from hf_muon.integrations.transformers.schedules import patch_schedules
from hf_muon.integrations.transformers.sharded_models import patch_checkpoints
from hf_muon.integrations.ulysses import hooks as ulysses

if TYPE_CHECKING:
    from transformers import TrainingArguments


def patch_training_args(module: ModuleType) -> Callable[[], None] | str | None:
    """Add members to `OptimizerNames`, and check Muon's options as soon as TrainingArguments are made."""
    names = module.OptimizerNames
    known = names._value2member_map_
    if any(is_ours(known.get(name)) for name in NAMES):
        return None
    ours = [name for name in NAMES if name not in known]
    if NAME not in ours:
        logger().info("transformers has its own optim: muon; hf_muon steps aside, and is optim: %s", OWN_NAME)
    if not ours:
        return f"stepped aside: transformers has its own optim: {' and '.join(NAMES)}"
    for name in ours:
        _add_member(names, name)

    arguments = module.TrainingArguments
    post_init = arguments.__post_init__

    @functools.wraps(post_init)
    def checked_post_init(self: TrainingArguments, *args: Any, **kwargs: Any) -> None:
        if any(self.optim == name for name in ours):
            from hf_muon.optim_args import text_of

            refuse_old_versions()
        post_init(self, *args, **kwargs)
        if is_muon(self.optim):
            config_from_arguments(self)
            if isinstance(self.optim_args, Mapping):
                self.optim_args = text_of(self.optim_args)  # transformers reads text
            # DeepSpeed uses an "optimizer" of its config, and never asks for ours.
            refuse_deepspeed(self)

    arguments.__post_init__ = checked_post_init

    def undo() -> None:
        arguments.__post_init__ = post_init
        for name in ours:
            _remove_member(names, name)

    return undo


def _add_member(names: Any, name: str) -> None:
    """Add a member to transformers' enum of optimizers, as if it had been declared there."""
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    member.__objclass__ = names
    mark(member)
    member._sort_order_ = len(names._member_names_)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[name] = member
    type.__setattr__(names, member._name_, member)


def _remove_member(names: Any, name: str) -> None:
    type.__delattr__(names, name.upper())
    names._member_names_.remove(name.upper())
    del names._member_map_[name.upper()], names._value2member_map_[name]


def patch_trainer_optimizer(module: ModuleType) -> Callable[[], None] | str | None:
    """Register the handler that `Trainer.get_optimizer_cls_and_kwargs` calls for our names of `optim`."""
    handlers = getattr(module, "_OPTIMIZER_HANDLERS", None)
    if handlers is None:
        return f"failed: this transformers has no registry of optimizers; take {OLDEST['transformers']} or newer"
    if any(handlers.get(name) is optimizer_handler for name in NAMES):
        return None
    ours = [name for name in NAMES if name not in handlers]
    if not ours:
        return f"stepped aside: transformers has its own optim: {' and '.join(NAMES)}"
    handlers.update(dict.fromkeys(ours, optimizer_handler))

    def undo() -> None:
        for name in ours:
            handlers.pop(name, None)

    return undo


def patch_trainer(module: ModuleType) -> Callable[[], None] | str | None:
    """Patch Trainer to name damaged checkpoints, to convert sharded ones, and to log metrics.

    Models that were sharded while loading get checkpoints.
    """
    trainer = module.Trainer
    load = getattr(trainer, "_load_optimizer_and_scheduler", None)
    if load is None:
        return "failed: this transformers loads optimizers elsewhere; errors of damaged checkpoints do not name files"
    if is_ours(load):
        return None

    undo_sharded = patch_checkpoints(trainer)
    undo_loading = patch_sharded_loading(module)
    load = trainer._load_optimizer_and_scheduler

    @functools.wraps(load)
    def load_or_explain(self: Any, checkpoint: Any) -> None:
        try:
            load(self, checkpoint)
        except BaseException as error:  # the CheckpointException of torch.distributed.checkpoint is no Exception
            ours = checkpoint is not None and is_muon(self.args.optim)
            if ours and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                explain_damage(Path(checkpoint), error)
            raise
        if checkpoint is not None and is_muon(self.args.optim):
            warn_of_fresh_moments(self.optimizer, checkpoint)

    trainer._load_optimizer_and_scheduler = mark(load_or_explain)
    log = trainer.log

    @functools.wraps(log)
    def log_with_metrics(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if is_muon(self.args.optim):
            add_metrics(self, logs)
        append_to_trainer_log(self, logs)
        log(self, logs, *args, **kwargs)

    trainer.log = log_with_metrics

    undo_schedules = patch_schedules(trainer)
    undo_console = _patch_console(module)
    undo_ulysses = ulysses.patch_trainer(module)
    undo_context_parallel = context_parallel.patch_trainer(module)
    undo_layouts = changed_layouts.patch_trainer(module)

    def undo() -> None:
        if callable(undo_layouts):
            undo_layouts()
        trainer._load_optimizer_and_scheduler = load
        trainer.log = log
        undo_console()
        undo_schedules()
        undo_context_parallel()
        if undo_ulysses:
            undo_ulysses()
        undo_loading()
        undo_sharded()

    return undo


def _patch_console(module: ModuleType) -> Callable[[], None]:
    """Have the callbacks that print logs print a few of Muon's metrics; others receive all of them."""
    originals = {
        callback: callback.on_log
        for name in ("PrinterCallback", "ProgressCallback")
        if (callback := getattr(module, name, None)) is not None
    }

    def in_short(on_log: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(on_log)
        def print_in_short(
            self: Any, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
        ) -> None:
            # The callback itself may take keys out of the logs, which those after it then do not see either.
            if logs and is_muon(args.optim) and any(key.startswith("muon/") for key in logs):
                from hf_muon.diagnostics.metrics import for_console

                logs = for_console(logs)
            on_log(self, args, state, control, logs=logs, **kwargs)

        return print_in_short

    for callback, on_log in originals.items():
        callback.on_log = in_short(on_log)

    def undo() -> None:
        for callback, on_log in originals.items():
            callback.on_log = on_log

    return undo


def append_to_trainer_log(trainer: Any, logs: Mapping[str, Any]) -> None:
    """Append the numbers that a Trainer logs, with their step, to the file that `HF_MUON_TRAINER_LOG` names.

    Works with every optimizer. Does nothing without the variable, and on other ranks than the first.
    """
    file = os.environ.get(TRAINER_LOG)
    if file and trainer.is_world_process_zero():
        numbers = {key: value for key, value in logs.items() if isinstance(value, (int, float))}
        with Path(file).open("a", encoding="utf-8") as out:
            out.write(json.dumps({"step": trainer.state.global_step, **numbers}) + "\n")


def add_metrics(trainer: Any, logs: dict[str, float]) -> None:
    """Add the summary of Muon's metrics to logs that hold a loss, and write the logs into the metrics' file.

    Callbacks (TensorBoard, W&B, MLflow) and trainer_state.json receive the same logs. Does nothing where metrics are
    off.
    """
    metrics = getattr(muon_inside(trainer.optimizer), "metrics", None)
    if metrics is None:
        return
    summary = metrics.pop_summary() if "loss" in logs else {}
    tokens = _tokens(trainer) if "loss" in logs else None
    metrics.record_log(trainer.state.global_step, logs if tokens is None else {**logs, "tokens": tokens})
    logs.update(summary)


def _tokens(trainer: Any) -> int | None:
    """Return the tokens, padding among them, that all ranks have trained on; None where Trainer does not count them.

    Trainer keeps the FLOPs of all batches, a multiple of their tokens.
    """
    import torch

    name = getattr(trainer.model, "main_input_name", "input_ids")
    try:
        per_token = trainer.floating_point_ops({name: torch.empty(1, 1, device="meta")})
    # A subclass may read more of a batch than its tokens.
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError):
        return None
    return round(trainer.state.total_flos / per_token) if per_token else None
