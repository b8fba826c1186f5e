"""Route parameters without their model, by the live modules that hold them."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from hf_muon.config import MuonConfig
from hf_muon.routing.route import Route, route_parameters


def routes_of(
    parameters: Collection[Tensor],
    config: MuonConfig,
    model: nn.Module | None = None,
    known: Mapping[Tensor, Route] = MappingProxyType({}),
) -> dict[Tensor, Route]:
    """Return the route of each parameter in the model that holds it: `model`, or else a live one.

    Args:
        parameters: trained parameters.
        config: the options.
        model: the module that holds them.
        known: routes of parameters that need no module.

    Raises:
        ValueError: as in `route_parameters`.
        RuntimeError: no live module holds a parameter.
    """
    parameters = set(parameters)
    routes: dict[Tensor, Route] = {}
    models = [] if model is None else [model]
    if not parameters <= {p for module in models for p in module.parameters()}:
        counts = {module: sum(p in parameters for p in module.parameters()) for module in _live_models()}
        # A wrapper may share some parameters of a model: choose the module that holds most of them.
        models += sorted(counts, key=lambda module: counts[module], reverse=True)
    for module in models:
        if any(p in parameters and p not in routes for p in module.parameters()):
            of_model = {route.parameter: route for route in route_parameters(module, config)}
            routes.update({p: route for p, route in of_model.items() if p in parameters and p not in routes})
    routes.update({p: route for p, route in known.items() if p in parameters and p not in routes})
    homeless = [tuple(p.shape) for p in parameters if p not in routes]
    if homeless:
        raise RuntimeError(
            f"Muon cannot tell what {len(homeless)} of the given parameters are (shapes {homeless[:5]}): no live model "
            "holds them. Use hf_muon.build_optimizer(model), which is given the model; put parameters that are in no "
            'module into a group of their own with "use_muon": False, for AdamW [no-live-model]'
        )
    return routes


def holder_of(parameters: Collection[Tensor], model: nn.Module | None = None) -> nn.Module:
    """Return the model that holds most of some parameters, and few others: `model`, or else a live one."""
    wanted = set(parameters)
    models = _live_models() if model is None else [model]
    held = {module: list(module.parameters()) for module in models}
    fit = {module: (sum(map(wanted.__contains__, own)), -len(own)) for module, own in held.items()}
    return max(models, key=fit.__getitem__, default=nn.Module())


def _live_models() -> list[nn.Module]:
    """Return the modules that no other module holds."""
    # isinstance would ask proxies and lazy modules for their `__class__`.
    modules: list[nn.Module] = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    children = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    return [module for module in modules if id(module) not in children and "_modules" in module.__dict__]
