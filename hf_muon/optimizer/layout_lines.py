"""What must be the same on all ranks before they step together, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_muon.optimizer.state import describe
from hf_muon.storage import views
from hf_muon.storage.factors import factors_of, has_factors
from hf_muon.storage.tensors import is_dtensor

Group = Mapping[str, Any]


def lines_of(groups: Sequence[Group]) -> Iterator[str]:
    """Yield what must be equal of param groups: numbers of parameters, how each is stored and stepped, factors."""
    sizes = [len(group["params"]) for group in groups]
    yield f"{sum(sizes)} parameters, in param groups of {' and '.join(map(str, sizes))}"
    for group in groups:
        for i, view in enumerate(views.views_of(group)):
            yield _parameter_line(group, i, view)
    for k, group in enumerate(groups):
        if has_factors(group):
            names = group.get("param_names") or []
            for i, factor in enumerate(factors_of(group)):
                name = names[i] if i < len(names) else f"parameter {i} of param group {k}"
                if factor != 1:
                    yield f"{name} with the learning rate times {factor}"


def _parameter_line(group: Group, index: int, view: str) -> str:
    param = group["params"][index]
    # The mesh by its shape, not by its ranks: those differ between the submeshes of one mesh.
    stored = f"{param.placements} on a mesh of {tuple(param.device_mesh.shape)}" if is_dtensor(param) else "plain"
    route = "Muon" if group["use_muon"] else "AdamW"
    matrices = f", seen as {view!r}" if view else ""
    return f"{describe(group, index)} {param.dtype} {param.device.type} {stored} {route}{matrices}"
