"""Patches of transformers: our names of `optim`, and their handler."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_muon._autoload import Change
from hf_muon.integrations.names import NAME, NAMES, TAKEN, TRANSFORMERS, is_muon, refuse_failed, warn_of_another_muon
from hf_muon.integrations.transformers.handler import config_from_arguments, optimizer_handler
from hf_muon.integrations.transformers.run_refusals import refuse_deepspeed
from hf_muon.versions import NEEDED, OLDEST, refuse_older

if TYPE_CHECKING:
    from transformers import TrainingArguments


def patch_training_args(module: ModuleType) -> Iterator[Change]:
    """Add members to `OptimizerNames`, and check Muon's options as soon as TrainingArguments are made.

    A `muon` of transformers' own stays what it is, and runs with it are not touched.
    """
    names = module.OptimizerNames
    members = names._value2member_map_
    new = [_member(names, name, len(members) + i) for i, name in enumerate(NAMES) if name not in members]
    arguments = module.TrainingArguments
    post_init = arguments.__post_init__

    @functools.wraps(post_init)
    def checked_post_init(self: TrainingArguments, *args: Any, **kwargs: Any) -> None:
        if not is_muon(optim := getattr(self, "optim", None)):
            warn_of_another_muon(optim, TRANSFORMERS)
            post_init(self, *args, **kwargs)
            return
        from hf_muon.optim_args import text_of, without_blanks

        program = type(self).__module__.partition(".")[0]  # TRL has its own arguments
        refuse_older(*NEEDED, *({program} & OLDEST.keys()))
        refuse_failed("optimizer of Trainer", one_is_needed=True)
        refuse_failed("LLaMA-Factory's parser")  # where that is not imported, its hook has not failed
        post_init(self, *args, **kwargs)
        if isinstance(self.optim_args, str):  # a YAML text of several lines
            self.optim_args = without_blanks(self.optim_args)
        # For its errors: before the model is loaded, and not when the optimizer is made.
        config_from_arguments(self)
        if isinstance(self.optim_args, Mapping):
            self.optim_args = text_of(self.optim_args)  # transformers reads text
        # DeepSpeed uses an "optimizer" of its config, and never asks for ours.
        refuse_deepspeed(self)

    for member in new:
        yield names, member.name, member
        yield names._member_map_, member.name, member
        yield members, member.value, member
    yield TAKEN, TRANSFORMERS, NAME in members
    yield names, "_member_names_", [*names._member_names_, *(member.name for member in new)]
    yield arguments, "__post_init__", checked_post_init


def _member(names: Any, name: str, order: int) -> Any:
    """Return a new member of transformers' enum of optimizers, which has no public way to get one."""
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    member.__objclass__ = names
    member._sort_order_ = order
    return member


def patch_trainer_optimizer(module: ModuleType) -> Iterator[Change]:
    """Register the handler that `Trainer.get_optimizer_cls_and_kwargs` calls for our names of `optim`."""
    # Private: `get_optimizer_cls_and_kwargs` reads handlers only from here, and there is no function that adds one.
    for name in filter(is_muon, NAMES):
        yield module._OPTIMIZER_HANDLERS, name, optimizer_handler
