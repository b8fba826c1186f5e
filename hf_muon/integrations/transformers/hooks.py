"""What is patched in transformers itself: our names and their handler, loading of checkpoints, and the console."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_muon._autoload import Change
from hf_muon.integrations.names import NAME, NAMES, is_muon, is_ours, mark, refuse_failed
from hf_muon.integrations.other_muons import warn_that_ours_runs
from hf_muon.integrations.transformers.checkpoint_files import explain_damage
from hf_muon.integrations.transformers.handler import config_from_arguments, optimizer_handler
from hf_muon.integrations.transformers.refusals import refuse_deepspeed
from hf_muon.versions import NEEDED, OLDEST, refuse_older

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Hooks without which no run is what its arguments ask for; a hook of a module that is not imported has not failed.
_ALWAYS = ("optimizer of Trainer", "LLaMA-Factory's parser")


def patch_training_args(module: ModuleType) -> Iterator[Change]:
    """Add members to `OptimizerNames`, and check Muon's options as soon as TrainingArguments are made.

    A member that transformers itself has stays, and means this package's Muon.
    """
    names = module.OptimizerNames
    known = names._value2member_map_
    is_theirs = NAME in known and not is_ours(known[NAME])
    new = [_member(names, name, len(known) + i) for i, name in enumerate(NAMES) if name not in known]
    arguments = module.TrainingArguments
    post_init = arguments.__post_init__

    @functools.wraps(post_init)
    def checked_post_init(self: TrainingArguments, *args: Any, **kwargs: Any) -> None:
        if not is_muon(getattr(self, "optim", None)):
            post_init(self, *args, **kwargs)
            return
        from hf_muon.optim_args import text_of

        program = type(self).__module__.partition(".")[0]  # TRL has arguments of its own
        refuse_older(*NEEDED, *({program} & OLDEST.keys()))
        importlib.import_module("transformers.trainer_optimizer")  # and with it, its hook
        refuse_failed(*_ALWAYS)
        if is_theirs and self.optim == NAME:
            warn_that_ours_runs("transformers", "optim: muon")
        post_init(self, *args, **kwargs)
        config_from_arguments(self)
        if isinstance(self.optim_args, Mapping):
            self.optim_args = text_of(self.optim_args)  # transformers reads text
        # DeepSpeed uses an "optimizer" of its config, and never asks for ours.
        refuse_deepspeed(self)

    for member in new:
        yield names, member.name, member
        yield names._member_map_, member.name, member
        yield known, member.value, member
    yield names, "_member_names_", [*names._member_names_, *(member.name for member in new)]
    yield arguments, "__post_init__", checked_post_init


def _member(names: Any, name: str, order: int) -> Any:
    """Return a member for transformers' enum of optimizers, as if it had been declared there."""
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    member.__objclass__ = names
    member._sort_order_ = order
    return mark(member)


def patch_trainer_optimizer(module: ModuleType) -> Iterator[Change]:
    """Register the handler that `Trainer.get_optimizer_cls_and_kwargs` calls for our names of `optim`."""
    handlers = getattr(module, "_OPTIMIZER_HANDLERS", None)
    if handlers is None:
        raise AttributeError(
            f"this transformers has no registry of optimizers; take {OLDEST['transformers']}, or a newer one that "
            "hf_muon was tested with"
        )
    for name in NAMES:
        yield handlers, name, mark(optimizer_handler)


def patch_loading(module: ModuleType) -> Iterator[Change]:
    """Patch Trainer to name the damaged files of a checkpoint of Muon that cannot be loaded."""
    load = module.Trainer._load_optimizer_and_scheduler

    @functools.wraps(load)
    def load_or_explain(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(self, *args, **kwargs)
        except Exception as error:
            checkpoint = next(iter((*args, *kwargs.values())), None)
            if is_muon(self.args.optim) and isinstance(checkpoint, (str, Path)):
                explain_damage(Path(checkpoint), error)
            raise

    yield module.Trainer, load.__name__, load_or_explain


def patch_console(module: ModuleType) -> Iterator[Change]:
    """Have the callbacks that print logs print a few of Muon's metrics; others receive all of them."""

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

    for callback in (module.PrinterCallback, module.ProgressCallback):
        yield callback, "on_log", in_short(callback.on_log)
