"""Divide param groups into those of Muon and of AdamW, by the routes of their parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from hf_muon.config import MuonConfig, check_option
from hf_muon.diagnostics.log import first_few
from hf_muon.optimizer.groups import ONLY_DEFAULT, RENAMED, SPEED_ONLY, refuse_other_than_default
from hf_muon.optimizer.state import check_params
from hf_muon.routing.live_models import routes_of
from hf_muon.routing.route import Route
from hf_muon.storage.tensors import shape_of

# Routing sets these for each part of a group; all other keys of a group are copied to both parts.
_ROUTED = ("params", "param_names", "use_muon", "lr", "weight_decay")


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


def split_groups(
    groups: Sequence[Mapping[str, Any]], config: MuonConfig, model: nn.Module | None, first: int = 0
) -> tuple[list[dict[str, Any]], list[Route]]:
    """Return the parts of param groups that go to Muon and to AdamW, and the routes of all their parameters.

    Args:
        groups: param groups under our names of options.
        config: the options.
        model: the module that holds the parameters; None to look among all live modules.
        first: position of the first group, for names of parameters that have none.
    """
    check_params(groups, first)
    pairs = [_named(group["params"], k) for k, group in enumerate(groups, first)]
    members = [[param for _, param in of_group] for of_group in pairs]
    known = {
        param: Route(name, cast(nn.Parameter, param), False, len(shape_of(param)) > 1, "no module holds it")
        for group, of_group in zip(groups, pairs, strict=True)
        for name, param in of_group
        # They go to AdamW whatever they are in a model.
        if group.get("use_muon") is False or len(shape_of(param)) < 2
    }
    routes = routes_of({p for group in members for p in group if p.requires_grad}, config, model, known)
    split: list[dict[str, Any]] = []
    reached: list[Route] = []
    rates: list[tuple[bool, Any]] = []
    for group, parameters in zip(groups, members, strict=True):
        group_routes = _as_asked(group, [routes[p] for p in parameters if p.requires_grad])
        lr = None if group.get("lr") is None else check_option("lr", group["lr"])
        rates_of = config
        if first and lr is not None and not config.lr:
            # The rate that was written for a later group is its own: there is no rate that muon_lr is in proportion to.
            rates_of = dataclasses.replace(config, muon_lr=None, adamw_lr=None)
        group_parts = groups_of(group_routes, rates_of, lr=lr, weight_decay=group.get("weight_decay"))
        other_keys = {key: value for key, value in group.items() if key not in _ROUTED}
        split += [{**part, **other_keys} for part in group_parts]
        reached += group_routes
        rates += [(part["use_muon"], lr) for part in group_parts]
    _require_one_rate(rates, config)
    return split, reached


def _as_asked(group: Mapping[str, Any], routes: Sequence[Route]) -> list[Route]:
    """Return the routes of a group's parameters, all to AdamW if the group says `use_muon: False`.

    Raises:
        ValueError: the group says `use_muon: True`, and a route goes to AdamW.
    """
    use_muon = group.get("use_muon")
    if use_muon is False:
        return [dataclasses.replace(route, use_muon=False, reason="use_muon: False in its group") for route in routes]
    complaints = [f"{route.name} ({route.reason})" for route in routes if not route.use_muon]
    if use_muon and complaints:
        raise ValueError(
            f"A param group says use_muon: True, and holds {first_few(complaints, 3)}. Leave use_muon out, name hidden "
            "matrices with muon_patterns, or pass the group to hf_muon.Muon, which takes every matrix as it is "
            "[not-for-muon]"
        )
    return list(routes)


def _named(params: Any, position: int) -> list[tuple[str, Tensor]]:
    """Return the parameters of a group with their names, or else with names by their places."""
    items = [params] if isinstance(params, Tensor) else list(params)
    return [item if isinstance(item, tuple) else (f"group{position}.{i}", item) for i, item in enumerate(items)]


def complete_rate(group: Mapping[str, Any], config: MuonConfig) -> dict[str, Any]:
    """Return a group that says `use_muon` with the rate of its optimizer, if it has none."""
    return {"lr": _rate(None, config.muon_lr if group["use_muon"] else config.adamw_lr, config), **group}


def with_names(group: Mapping[str, Any], config: MuonConfig, model: nn.Module | None, position: int) -> dict[str, Any]:
    """Return a group with a name for each parameter: its own, that in the model, or that of its place."""
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    if "param_names" in group or all(isinstance(item, tuple) for item in params):
        return {**group, "params": params}
    known = {p: Route(name, cast(nn.Parameter, p), False, False, "") for name, p in _named(params, position)}
    routes = routes_of(params, config, model, known)
    return {**group, "params": [(routes[param].name, param) for param in params]}


def with_own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename options that arguments or a param group have under the names of torch.optim.AdamW.

    Raises:
        ValueError: an option is set under both names, or an option that only torch has is not at its default.
    """
    refuse_other_than_default(options)
    renamed = {name: value for name, value in options.items() if name not in (*ONLY_DEFAULT, *SPEED_ONLY)}
    for theirs, ours in RENAMED.items():
        if theirs in renamed:
            if ours in renamed:
                raise ValueError(f"{theirs} and {ours} are the same option of Muon: set one of the two [given-twice]")
            renamed[ours] = renamed.pop(theirs)
    return renamed


def _require_one_rate(rates: Sequence[tuple[bool, Any]], config: MuonConfig) -> None:
    """Raise if `muon_lr` or `adamw_lr` would replace the different rates of groups by one.

    Args:
        rates: for each part of a group whether Muon steps it, and the `lr` of the group; None if the group sets none.
        config: the options. If it has `lr`, groups keep their proportions to it.

    Raises:
        ValueError: groups have different rates, and `lr` is not set.
    """
    for for_muon, name in ((True, "muon_lr"), (False, "adamw_lr")):
        group_rates = [lr for use_muon, lr in rates if use_muon is for_muon]
        texts = dict.fromkeys("none" if lr is None else f"{float(lr):g}" for lr in group_rates)
        if (rate := getattr(config, name)) is not None and not config.lr and len(texts) > 1:
            raise ValueError(
                f"{name}={rate:g} is one rate, and param groups have several: {first_few(texts, 4)}. Pass lr, too: the "
                f"rate of a group is then its own times {name} / lr. Or leave {name} out, and set lr in each group "
                "[one-rate-for-several]"
            )
