"""`optim: muon` in transformers' TrainingArguments and Trainer."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from transformers.trainer_optimizer import OptimizerContext

    from hf_muon.config import MuonConfig

# The rest of the package is imported where it is used: processes that never say `optim: muon` do not load it.

NAME = "muon"
MEMBER = "MUON"
OURS = "_from_hf_muon"


def patch_training_args(module: ModuleType) -> Callable[[], None] | str | None:
    """Add the member `OptimizerNames.MUON`, and check muon's options when TrainingArguments are made."""
    names = module.OptimizerNames
    if getattr(names._value2member_map_.get(NAME), OURS, False):
        return None
    if NAME in names._value2member_map_:
        from hf_muon import diagnostics

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
        post_init(self, *args, **kwargs)
        if self.optim is member:
            config_from_arguments(self)
            # An "optimizer" in a DeepSpeed config is used without asking for ours.
            refuse_deepspeed(self)

    arguments.__post_init__ = checked_post_init

    def undo() -> None:
        arguments.__post_init__ = post_init
        type.__delattr__(names, MEMBER)
        names._member_names_.remove(MEMBER)
        del names._member_map_[MEMBER], names._value2member_map_[NAME]

    return undo


def patch_trainer_optimizer(module: ModuleType) -> Callable[[], None] | str | None:
    """Register the handler that `Trainer.get_optimizer_cls_and_kwargs` calls for `optim: muon`."""
    handlers = getattr(module, "_OPTIMIZER_HANDLERS", None)
    if handlers is None:
        return "failed: this transformers has no registry of optimizers; hf_muon needs transformers 5.2 or newer"
    if handlers.get(NAME) is handle:
        return None
    if NAME in handlers:
        return "stepped aside: transformers has its own optim: muon"
    handlers[NAME] = handle

    def undo() -> None:
        handlers.pop(NAME, None)

    return undo


def handle(context: OptimizerContext) -> tuple[Any, dict[str, Any]]:
    """What transformers calls for `optim: muon`.

    With a model, a factory that transformers calls as ``factory()(model, **kwargs)``; without one, a class for
    ready-made param groups.
    """
    config = config_from_arguments(context.args, context.optim_args)
    refuse_unsupported(context.args)
    if context.model is None:
        from hf_muon.ready_groups import MuonOfGroups

        return MuonOfGroups, {"config": config}

    from hf_muon.build import build_optimizer

    return lambda: build_optimizer, {"config": config}


def config_from_arguments(args: TrainingArguments, optim_args: Mapping[str, str] | None = None) -> MuonConfig:
    """The options of a run: TrainingArguments' own fields, replaced by what `optim_args` says.

    Raises:
        ValueError: an option in `optim_args` that is unknown, cannot be read or is out of range.
    """
    from hf_muon.config import MuonConfig, parse_optim_args

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


def refuse_unsupported(args: TrainingArguments) -> None:
    """Raise where this version would train something that is not Muon.

    Raises:
        RuntimeError: what was asked for, and what to do instead.
    """
    parallelism = getattr(args, "parallelism_config", None)
    sharded = [
        axis for axis in ("tp", "cp", "sp", "dp_shard") if getattr(parallelism, f"{axis}_size", 1) not in (None, 1)
    ]
    asked = None
    if getattr(args, "deepspeed", None) or _truthy("ACCELERATE_USE_DEEPSPEED"):
        refuse_deepspeed(args)
    elif getattr(args, "fsdp", None) or _truthy("ACCELERATE_USE_FSDP"):
        asked = "FSDP"
    elif sharded:
        asked = f"ParallelismConfig({', '.join(f'{axis}_size' for axis in sharded)})"
    if asked:
        raise RuntimeError(
            f"optim: muon does not run under {asked} in this version of hf_muon: it cuts matrices into pieces. "
            "Train on one process or with DDP, or choose another optimizer."
        )


def refuse_deepspeed(args: TrainingArguments) -> None:
    """Raise where a DeepSpeed config, if there is one, holds something that Muon does not go with.

    Raises:
        RuntimeError: every complaint.
    """
    if getattr(args, "deepspeed_plugin", None) is not None:
        from hf_muon.integrations.deepspeed import refuse_arguments

        refuse_arguments(args)


def _truthy(variable: str) -> bool:
    return os.environ.get(variable, "false").strip().lower() in ("1", "true", "yes", "on")
