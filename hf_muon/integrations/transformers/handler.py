"""Make a `Muon` from TrainingArguments; transformers calls this for `optim: muon`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_muon.diagnostics.log import FILE
from hf_muon.integrations.names import warn_once
from hf_muon.integrations.transformers.run_refusals import (
    refuse_failed_hooks,
    refuse_parts_of_sequences,
    refuse_plain_shards,
    refuse_unsupported,
    warn_of_shards,
)
from hf_muon.versions import refuse_older

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments
    from transformers.trainer_optimizer import OptimizerContext

    from hf_muon.config import MuonConfig
    from hf_muon.optimizer.muon import Muon

# Keys under which callers pass param groups, as transformers does for GaLore.
_GROUPS = ("optimizer_dict", "params")

# The rest of the package is imported where it is used: processes without `optim: muon` do not load it.


class MuonFactory:
    """The optimizer class that transformers gets for `optim: muon`; callers pass it a model or param groups.

    ``MuonFactory()(model, **kwargs)`` routes the model, as Trainer calls it; with `optimizer_dict` or `params` among
    the arguments, as sentence-transformers has them, the parameters of these groups. ``MuonFactory(groups, **kwargs)``
    routes ready-made groups, as LLaMA-Factory, ms-swift, axolotl, Unsloth and copies of `create_optimizer` call it.
    """

    def __new__(cls, params: Any = None, **options: Any) -> Any:
        if params is None and not options:
            return super().__new__(cls)
        from hf_muon.ready_groups import MuonOfGroups

        return MuonOfGroups(params, model=options.pop("routing_model", None), **options)

    def __call__(self, model: nn.Module, /, **options: Any) -> Muon:
        from hf_muon.build import build_optimizer

        routing_model = options.pop("routing_model", None)
        for key in _GROUPS:
            if key in options:
                groups, whole_model = options.pop(key), model if routing_model is None else routing_model
                return MuonFactory(groups, routing_model=whole_model, **options)  # type: ignore[no-any-return]
        return build_optimizer(model, **options)


def optimizer_handler(context: OptimizerContext) -> tuple[type[MuonFactory], dict[str, Any]]:
    """Return the factory with which transformers makes the optimizer, and its keyword arguments.

    Callers may read and replace `lr` and `weight_decay` among these arguments, or leave them out.
    """
    config = config_from_arguments(context.args, context.optim_args)
    refuse_failed_hooks(context.args)
    refuse_unsupported(context.args)
    refuse_parts_of_sequences(context.args, config.qk_clip)
    refuse_plain_shards(context.model)
    if hasattr(context.model, "peft_config"):
        refuse_older("peft")
    warn_of_shards()
    return MuonFactory, {
        # Twice, also in `config`: callers that make param groups of their own look for these keys.
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "config": config,
        "diagnostics_file": os.path.join(context.args.output_dir or "", FILE),
        # Callers that pass param groups pass no model, whose structure decides the routes.
        "routing_model": context.model,
    }


def config_from_arguments(args: TrainingArguments, optim_args: Mapping[str, str] | None = None) -> MuonConfig:
    """Return the options of a run, from the fields of TrainingArguments and `optim_args`, which wins.

    Raises:
        ValueError: an option in `optim_args` that is unknown, cannot be read or is out of range, or
            `optim_target_modules`.
    """
    from hf_muon.config import MuonConfig
    from hf_muon.optim_args import parse_optim_args

    if args.optim_target_modules:
        raise ValueError(
            f"optim_target_modules={args.optim_target_modules!r} is for optimizers such as GaLore; optim: muon takes "
            "all hidden matrices. Remove it, or name in optim_args, as adamw_patterns, what shall go to AdamW "
            "[target-modules]"
        )
    config = MuonConfig.from_mapping(
        {
            # PyYAML reads 1e-5 as text, and transformers passes that on.
            "lr": args.learning_rate,
            "weight_decay": args.weight_decay,
            "adamw_betas": (float(args.adam_beta1), float(args.adam_beta2)),
            "adamw_eps": args.adam_epsilon,
        }
    )
    options = parse_optim_args(args.optim_args) if optim_args is None else optim_args
    # A rate that is the default may be nobody's choice: it loses without a warning.
    stated = config.lr != type(args).learning_rate
    config, of_field = config.replace(options), config.lr
    if stated and config.lr != of_field:
        warn_once(
            f"optim_args: lr={config.lr:g} wins over learning_rate={of_field:g}. Remove one; muon_lr and adamw_lr set "
            "the rate of one kind of group [two-learning-rates]"
        )
    return config
