"""Build an optimizer from a model and options: routes, param groups, `Muon`, and the table of routes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_muon.config import MUON_OPTIONS, MuonConfig
from hf_muon.diagnostics import log as diagnostics
from hf_muon.optimizer.muon import Muon
from hf_muon.routing.route import Route, frozen, route_parameters, table
from hf_muon.routing.router import is_lora
from hf_muon.storage.tensors import quoted, storage_complaint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def build_optimizer(
    model: nn.Module,
    config: MuonConfig | Mapping[str, Any] | None = None,
    *,
    replicate_group: ProcessGroup | None = None,
    diagnostics_file: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Muon:
    """Return a `Muon` that steps a model's hidden matrices with Muon and its other trainable parameters with AdamW.

    Rank 0 logs one table that shows where each parameter goes, and why.

    Args:
        model: any module: plain, wrapped in DDP, or with DTensor parameters (`fully_shard`, tensor parallel).
        config: a `MuonConfig`, or a mapping of its options as a YAML file holds them.
        replicate_group: as in :class:`Muon`.
        diagnostics_file: as in :class:`Muon`.
        **options: options that replace those of `config`; :class:`MuonConfig` lists them.

    Raises:
        ValueError: an option is not valid, a pattern matches nothing, or no parameter goes to Muon.
        RuntimeError: this version cannot step a parameter as it is stored.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"build_optimizer takes a torch.nn.Module, not {quoted(model)}: its structure tells hidden "
            "matrices from other parameters. Pass parameters alone to hf_muon.MuonOfGroups [not-a-module]"
        )
    config = as_config(config, options)
    routes = route_parameters(model, config)
    optimizer = muon_of(model, routes, config, replicate_group=replicate_group, diagnostics_file=diagnostics_file)
    log_routes(routes, frozen(model))
    return optimizer


def muon_of(model: nn.Module, routes: Sequence[Route], config: MuonConfig, **arguments: Any) -> Muon:
    """Return the `Muon` of a model whose parameters are routed; `arguments` are those that a config does not hold.

    Raises:
        ValueError: as `build_optimizer`.
        RuntimeError: as `build_optimizer`.
    """
    require_muon(routes, type(model).__name__)
    optimizer = Muon(groups_of(routes, config), **arguments, **muon_options(config))
    optimizer.head_rules.attach(optimizer.param_groups, lambda: model)
    return optimizer


def as_config(config: MuonConfig | Mapping[str, Any] | None, options: Mapping[str, Any]) -> MuonConfig:
    """Return `config` as a `MuonConfig`, with the values in `options` replaced.

    Raises:
        ValueError: `config` is neither a `MuonConfig`, a mapping nor None, or an option is not valid.
    """
    if not isinstance(config, (MuonConfig, Mapping, type(None))):
        raise ValueError(f"config is a MuonConfig or a mapping of its options, not {quoted(config)} [not-a-mapping]")
    return (config if isinstance(config, MuonConfig) else MuonConfig.from_mapping(config or {})).replace(options)


def muon_options(config: MuonConfig) -> dict[str, Any]:
    """Return the arguments of `Muon` that a config holds."""
    options = {name: config.value_of(name) for name in MUON_OPTIONS}
    if config.muon_lr is not None and config.adamw_lr is not None:
        options["lr"] = config.muon_lr  # a floor of transformers' schedules is relative to it, so a group must have it
    return options


def groups_of(
    routes: Iterable[Route], config: MuonConfig, *, lr: Any = None, weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """Return the param groups that are not empty: Muon, AdamW with weight decay, AdamW without.

    Args:
        routes: the routes of the parameters.
        config: the options.
        lr: the learning rate of a ready-made group. `muon_lr` or `adamw_lr` of `config` replaces it; if `config` has
            `lr`, too, the group keeps its proportion to that.
        weight_decay: the weight decay of a ready-made group, norms and biases included. `adamw_weight_decay` replaces
            it unless it is 0.
    """
    routes_by_side: dict[tuple[bool, bool], list[Route]] = {}
    for route in routes:
        routes_by_side.setdefault((route.use_muon, weight_decay is not None or route.decay), []).append(route)
    groups = []
    # In one order, whatever that of the model: positions of groups are in checkpoints.
    for (use_muon, decays), members in sorted(routes_by_side.items(), key=lambda item: item[0], reverse=True):
        own_lr = config.muon_lr if use_muon else config.adamw_lr
        own_decay = None if use_muon else config.adamw_weight_decay
        decay = config.weight_decay if weight_decay is None else weight_decay
        if own_decay is not None and weight_decay != 0:
            decay = own_decay
        group: dict[str, Any] = {"params": [(route.name, route.parameter) for route in members]}
        if use_muon:
            group["views"] = [route.view for route in members]
        if any(route.factor != 1 for route in members):
            group["lr_factors"] = [route.factor for route in members]
        rate = _rate(lr, own_lr, config)
        groups.append({**group, "use_muon": use_muon, "lr": rate, "weight_decay": decay if decays else 0.0})
    return groups


def _rate(lr: Any, own_lr: float | None, config: MuonConfig) -> Any:
    """Return the rate of a param group, given the `lr` of a ready-made one and `muon_lr` or `adamw_lr` (`own_lr`)."""
    if own_lr is None:
        return config.value_of("lr") if lr is None else lr
    if lr is None or not config.lr or lr == config.lr:
        return own_lr
    return lr * own_lr / config.lr


def require_muon(routes: Sequence[Route], model_name: str) -> None:
    """Raise if no parameter goes to Muon: the user did not ask for plain AdamW.

    Raises:
        ValueError: no route goes to Muon; the message counts the reasons.
        RuntimeError: none does, and a parameter is stored in a way that this version cannot step.
    """
    if any(route.use_muon for route in routes):
        return
    for route in routes:
        if complaint := storage_complaint(route.parameter):  # flat parameters of FSDP1 are all vectors
            raise RuntimeError(f"{route.name} {complaint}")
    reasons = Counter(route.reason for route in routes)
    counted = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common()) or "nothing is trainable"
    advice = "Name matrices with muon_patterns, or choose another optimizer. [nothing-for-muon]"
    adapters = [route.name for route in routes if route.adapter]
    is_only_lora = all(is_lora(name) for name in adapters)
    if any("lora=muon opts in" in reason for reason in reasons) or not is_only_lora:
        factors, other_count = f"{'LoRA' if is_only_lora else 'adapter'} factors", len(routes) - len(adapters)
        trained = f"{factors} and {other_count} other parameters" if other_count else f"Only {factors}"
        advice = (
            f"{trained} are trained. Keep AdamW for them (optim: adamw_torch): no gain was shown. To try Muon on LoRA "
            'anyway, write optim_args: "lora=muon", or in optim_config of LLaMA-Factory v1 lora: muon; on other '
            "adapters, name their factors in muon_patterns. [lora-without-muon]"
        )
    raise ValueError(f"No parameter of {model_name} reaches Muon: {counted}. {advice}")


def log_routes(routes: Iterable[Route], more: Sequence[str] = ()) -> None:
    """Log the table of routes on rank 0, and more lines below it."""
    if diagnostics.is_rank_zero():
        diagnostics.logger().info("which parameter goes where:\n%s", "\n".join([table(list(routes)), *more]))
