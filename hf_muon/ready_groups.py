"""From param groups that the caller has made to an optimizer: `MuonOfGroups`."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_muon.build import group_of, log_routes, muon_options, require_muon
from hf_muon.config import MuonConfig
from hf_muon.optimizer.muon import Muon
from hf_muon.routing.route import Route, route_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What routing decides for each part of a group; every other key of a group is copied to both parts.
_ROUTED = ("params", "param_names", "lr", "weight_decay")


class MuonOfGroups(Muon):
    """`Muon` over ready-made param groups, as callers without a model pass them (LLaMA-Factory's PPO and LoRA+).

    Each group is split into a Muon and an AdamW part, with the group's own learning rate and decay. Groups do not say
    which of their matrices are embeddings. The model that holds them does, and is looked up among the live modules.

    Raises:
        ValueError: no parameter reaches Muon.
        RuntimeError: a parameter that belongs to no live module.
    """

    def __init__(
        self, params: Iterable[Any], config: MuonConfig, *, replicate_group: ProcessGroup | None = None, **options: Any
    ) -> None:
        config = config.replace(options)
        items: list[Any] = [params] if isinstance(params, Tensor) else list(params)
        groups: list[dict[str, Any]] = items if all(isinstance(g, dict) for g in items) else [{"params": items}]
        members = [_tensors(group["params"]) for group in groups]
        routes = _routes_of({p for group in members for p in group if p.requires_grad}, config)
        require_muon(list(routes.values()), "the given param groups")
        split = []
        for group, parameters in zip(groups, members, strict=True):
            group_routes = [routes[p] for p in parameters if p.requires_grad]
            decay = group.get("weight_decay")
            other_keys = {key: value for key, value in group.items() if key not in _ROUTED}
            for use_muon in (True, False):
                for decays in (True, False) if decay is None else (None,):
                    part = [r for r in group_routes if r.use_muon is use_muon and decays in (None, r.decay)]
                    if part:
                        split.append({**group_of(part, config, lr=group.get("lr"), weight_decay=decay), **other_keys})
        super().__init__(split, replicate_group=replicate_group, **muon_options(config))
        log_routes(routes.values())


def _tensors(params: Any) -> list[Tensor]:
    """Return the tensors of a group's `params`: one, several, or ``(name, tensor)`` pairs."""
    if isinstance(params, Tensor):
        return [params]
    return [p[1] if isinstance(p, tuple) else p for p in params]


def _routes_of(parameters: set[Tensor], config: MuonConfig) -> dict[Tensor, Route]:
    """Return the route of each parameter, by the model that holds it."""
    routes: dict[Tensor, Route] = {}
    counts = {model: sum(p in parameters for p in model.parameters()) for model in _live_models()}
    # A wrapper may share some of a model's parameters: the one that holds most of them knows most about them.
    for model in sorted(counts, key=lambda model: counts[model], reverse=True):
        if any(p in parameters and p not in routes for p in model.parameters()):
            of_model = {route.parameter: route for route in route_parameters(model, config)}
            routes.update({p: route for p, route in of_model.items() if p in parameters and p not in routes})
    homeless = [tuple(p.shape) for p in parameters if p not in routes]
    if homeless:
        raise RuntimeError(
            f"Muon cannot tell what {len(homeless)} of the given parameters are (shapes {homeless[:5]}): no live model "
            "holds them. Use hf_muon.build_optimizer(model), which is given the model."
        )
    return routes


def _live_models() -> list[nn.Module]:
    """Return the modules that no other module holds."""
    modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    children = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    return [module for module in modules if id(module) not in children and "_modules" in module.__dict__]
