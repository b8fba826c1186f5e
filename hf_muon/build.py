"""Build an optimizer from a model and options: routes, param groups, `Muon`, and the table of routes."""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_muon.config import MUON_OPTIONS, MuonConfig
from hf_muon.diagnostics import log as diagnostics
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.state import check_params
from hf_muon.routing.live_models import holder_of
from hf_muon.routing.route import Route, frozen, route_parameters, table
from hf_muon.routing.router import is_lora
from hf_muon.split_groups import complete_rate, groups_of, split_groups, with_names, with_own_names
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
    # Not the model itself, which an optimizer does not keep alive.
    optimizer.add_group = functools.partial(add_routed, config=config, model=weakref.ref(model))
    return optimizer


def add_routed(
    optimizer: Muon,
    add: Callable[[dict[str, Any]], None],
    group: Mapping[str, Any],
    *,
    config: MuonConfig,
    model: Callable[[], nn.Module | None],
) -> None:
    """Add a later param group, divided as the first ones, or as it is if it says `use_muon`.

    Args:
        optimizer: made of a model or of ready-made groups.
        add: adds a param group to it as it is.
        group: as in `MuonOfGroups`.
        config: the options of the optimizer.
        model: returns the model that holds the parameters; None to look among all live modules.

    Raises:
        ValueError: frozen parameters, or as `MuonOfGroups`.
        RuntimeError: as `MuonOfGroups`.
    """
    group, count = with_own_names(group), len(optimizer.param_groups)
    check_params([group], count)
    routes: list[Route] = []
    if "use_muon" in group:
        parts = [with_names(complete_rate(group, config), config, model(), count)]
    else:
        parts, routes = split_groups([group], config, model(), count)
        if not parts:
            raise ValueError(
                f"param group {count} has no trained parameters: call requires_grad_(True) on them before "
                "add_param_group, or say use_muon in the group [nothing-trained]"
            )
    try:
        for part in parts:
            add(part)
    except Exception:
        del optimizer.param_groups[count:]
        raise
    follow_heads(optimizer, model)
    log_routes(routes)


def follow_heads(optimizer: Muon, model: Callable[[], nn.Module | None]) -> None:
    """Attach rules that follow heads to all param groups."""
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    optimizer.head_rules.attach(optimizer.param_groups, lambda: holder_of(trained, model()))


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
