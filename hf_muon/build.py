"""From a model and options to an optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_muon.config import MUON_OPTIONS, MuonConfig
from hf_muon.diagnostics import log as diagnostics
from hf_muon.optimizer.muon import Muon
from hf_muon.options.declaration import quoted
from hf_muon.routing.route import Route, frozen, is_lora, route_parameters, table

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def build_optimizer(
    model: nn.Module,
    config: MuonConfig | Mapping[str, Any] | None = None,
    *,
    replicate_group: ProcessGroup | None = None,
    **options: Any,
) -> Muon:
    """A `Muon` over a model's trainable parameters: hidden matrices by Muon, the rest by AdamW.

    Rank 0 logs one table of the decisions, with their reasons.

    Args:
        model: any module, plain, wrapped in DDP, or with DTensor parameters (`fully_shard`, tensor parallel).
        config: a `MuonConfig`, or a mapping of its options as a YAML file gives them.
        replicate_group: the process group over which plain parameters are replicated, whose ranks then share the
            work. A model that is wrapped in DDP says so by itself.
        **options: options that replace those of `config`.

    Raises:
        ValueError: an option that is not valid, a pattern that matches nothing, or no parameter that reaches Muon.
        RuntimeError: a parameter stored in a way that this version cannot step.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"build_optimizer takes a torch.nn.Module, not {quoted(model)}: structure decides what is a hidden matrix. "
            "Parameters alone go to hf_muon.Muon"
        )
    config = _as_config(config).replace(options)
    routes = route_parameters(model, config)
    require_muon(routes, type(model).__name__)
    groups = groups_of(routes, config)
    if replicate_group is None and isinstance(model, nn.parallel.DistributedDataParallel):
        replicate_group = model.process_group
    optimizer = Muon(groups, replicate_group=replicate_group, **muon_options(config))
    log_routes(routes, frozen(model))
    return optimizer


def _as_config(config: MuonConfig | Mapping[str, Any] | None) -> MuonConfig:
    if isinstance(config, MuonConfig):
        return config
    if not isinstance(config, (Mapping, type(None))):
        raise ValueError(f"config is a MuonConfig or a mapping of its options, not {quoted(config)}")
    return MuonConfig.from_mapping(config or {})


def muon_options(config: MuonConfig) -> dict[str, Any]:
    """The arguments of `Muon` that a config holds."""
    return {name: getattr(config, name) for name in MUON_OPTIONS}


def groups_of(routes: Sequence[Route], config: MuonConfig) -> list[dict[str, Any]]:
    """The param groups of an optimizer: Muon, AdamW with decay, AdamW without; those that are not empty."""
    return [
        group_of(part, config)
        for use_muon, decay in ((True, True), (False, True), (False, False))
        if (part := [route for route in routes if (route.use_muon, route.decay) == (use_muon, decay)])
    ]


def group_of(
    routes: Sequence[Route], config: MuonConfig, *, lr: float | None = None, weight_decay: float | None = None
) -> dict[str, Any]:
    """A param group of routes that share a route and a decay.

    Args:
        routes: at least one.
        config: the options.
        lr: a group's own rate; `muon_lr` and `adamw_lr` keep their ratio to `config.lr` on top of it.
        weight_decay: a group's own decay, which `adamw_weight_decay` replaces unless it is zero.
    """
    use_muon = routes[0].use_muon
    half_lr = config.muon_lr if use_muon else config.adamw_lr
    if lr is None:
        lr = config.lr if half_lr is None else half_lr
    elif half_lr is not None and config.lr:
        lr = lr * half_lr / config.lr
    half_decay = config.weight_decay if use_muon or config.adamw_weight_decay is None else config.adamw_weight_decay
    if weight_decay is None:
        weight_decay = half_decay if routes[0].decay else 0.0
    elif weight_decay and not use_muon and config.adamw_weight_decay is not None:
        weight_decay = half_decay
    return {
        "params": [(route.name, route.parameter) for route in routes],
        **({"views": [route.view for route in routes]} if use_muon else {}),
        "use_muon": use_muon,
        "lr": lr,
        "weight_decay": weight_decay,
    }


def require_muon(routes: Sequence[Route], model_name: str) -> None:
    """Raise unless something reaches Muon: a run of AdamW alone is not what was asked for.

    Raises:
        ValueError: with the reasons, counted.
    """
    if any(route.use_muon for route in routes):
        return
    reasons = Counter(route.reason for route in routes)
    counted = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common()) or "nothing is trainable"
    advice = "Name matrices with muon_patterns, or choose another optimizer."
    others = [route for route in routes if not is_lora(route.name)]
    if len(others) < len(routes):
        trained = f"LoRA factors and {len(others)} other parameters" if others else "Only LoRA factors"
        advice = (
            f"{trained} are trained: set lora=muon to give the factors to Muon, in TrainingArguments as optim_args: "
            '"lora=muon", in optim_config of LLaMA-Factory v1 as lora: muon.'
        )
    raise ValueError(f"No parameter of {model_name} reaches Muon: {counted}. {advice}")


def log_routes(routes: Iterable[Route], also: Sequence[str] = ()) -> None:
    """Log the table of routes, and some lines below it, on rank 0."""
    if diagnostics.is_rank_zero():
        diagnostics.logger().info("which parameter goes where:\n%s", "\n".join([table(list(routes)), *also]))
