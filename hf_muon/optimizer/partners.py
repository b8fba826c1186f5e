"""Which matrices of a Muon group a rule steps in pairs, and the whole weights of their partners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_muon.optimizer.state import describe
from hf_muon.rules import registry
from hf_muon.storage import views
from hf_muon.storage.tensors import is_dtensor, local_of, shape_of

Group = Mapping[str, Any]


class Partner(NamedTuple):
    """The other matrix of a pair.

    Attributes:
        matrix: its position among the matrices of the param group.
        shape: its own.
        role: of the matrix whose partner it is.
    """

    matrix: int
    shape: tuple[int, ...]
    role: str


def names_of(group: Group) -> list[str]:
    """Return the name of each parameter of a group; empty ones where they are not known."""
    names, count = list(group.get("param_names") or []), len(group["params"])
    return names if len(names) == count else [""] * count


def pairs_of(group: Group, matrices: Sequence[tuple[str, Sequence[int]]]) -> dict[int, Partner]:
    """Return the partner of each matrix of a group that a rule steps with one, by position.

    Args:
        group: the param group.
        matrices: the names of their parameters, and their shapes.

    Raises:
        ValueError: a name of which the rule knows no pair.
    """
    rule = registry.paired(group)
    if rule is None or not all(name for name, _ in matrices):
        return {}
    assert rule.partner is not None
    places = {name: k for k, (name, _) in enumerate(matrices)}
    pairs = {}
    for k, (name, _) in enumerate(matrices):
        other = rule.partner(name)
        if other is not None and other[0] in places:
            place = places[other[0]]
            pairs[k] = Partner(place, tuple(matrices[place][1]), other[1])
    return pairs


def has_sides(group: Group) -> bool:
    """Return whether rules of a group tell the rows of directions from the columns."""
    return any(rule.direction is not None or rule.around is not None for rule in registry.rules_of(group))


def sides_of(group: Group, turned: Sequence[bool], pairs: Mapping[int, Partner]) -> list[tuple[Any, ...]] | None:
    """Return for each matrix what those of one unit have in common: which side is out, role, partner's shape.

    Args:
        group: the param group.
        turned: of each matrix, whether it is stored as ``(in, out)``.
        pairs: of `pairs_of`.
    """
    if not has_sides(group):
        return None
    return [(own, *(pairs[k][1:] if k in pairs else ())) for k, own in enumerate(turned)]


def partition_complaint(group: Group, *stages: int) -> str | None:
    """Say that a rule cannot step a group whose matrices ZeRO cuts; None where no rule needs whole ones."""
    rule = registry.paired(group)
    if rule is None:
        return None
    return (
        f"{rule.name} (lora=product) needs whole factors, and ZeRO-{', '.join(map(str, stages))} cuts matrices "
        "anywhere. Use ZeRO-0, DDP or FSDP2, or lora=muon"
    )


def complaint(group: Group) -> str | None:
    """Say why a rule cannot step the matrices of a group in pairs; None where it can, and where no rule does."""
    rule = registry.paired(group)
    if rule is None:
        return None
    assert rule.partner is not None
    if any(len(shape_of(param)) < 2 for param in group["params"]):
        return partition_complaint(group, 1, 2, 3)
    names = list(group.get("param_names") or [])
    if len(names) != len(group["params"]):
        return (
            f"{rule.name} knows the two matrices of a pair by their names, which this param group lacks: give "
            "(name, parameter) pairs, or let build_optimizer(model) do so"
        )
    try:
        pairs = pairs_of(group, list(zip(names, map(shape_of, group["params"]), strict=True)))
    except ValueError as error:
        return str(error)
    for i, (name, view) in enumerate(zip(names, views.views_of(group), strict=True)):
        if (other := rule.partner(name)) is None:
            continue
        if i not in pairs:
            return (
                f"{describe(group, i)} has no partner {other[0]} in its param group, and {rule.name} steps the two "
                "together: train both, by Muon, in one group, or use lora=muon"
            )
        if complaint := _pair_complaint(group, i, view, pairs[i]):
            return complaint
    if not pairs:
        return f"{rule.name}=true: this Muon group has no LoRA factors. Leave it out, or write lora=product"
    return None


def _pair_complaint(group: Group, index: int, view: str, pair: Partner) -> str | None:
    rule, param = registry.paired(group), group["params"][index]
    assert rule is not None
    if view:
        return f"{describe(group, index)} is seen as {view!r}, and {rule.name} takes single matrices: use lora=muon"
    if rule.scaled_like is not None:
        try:
            rule.scaled_like(shape_of(param), pair.shape, pair.role)
        except ValueError as error:
            return f"{describe(group, index)} and its partner make no pair for {rule.name}: {error}. Use lora=muon"
    if is_dtensor(param) and local_of(param).device.type != param.device_mesh.device_type:
        return (
            f"{describe(group, index)} is stored on the {local_of(param).device.type}, away from its ranks' devices, "
            f"and {rule.name} gathers whole factors: leave out the CPU offload of FSDP2, or use lora=muon"
        )
    return None


def whole_weights(params: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return copies of whole weights, see `whole_weight`."""
    return {k: whole_weight(param) for k, param in params.items()}


def whole_weight(param: Tensor) -> Tensor:
    """Return a copy of a whole weight, in fp32 or fp64. For a DTensor, all ranks of its mesh call this together."""
    whole = param.full_tensor() if is_dtensor(param) else param  # type: ignore[attr-defined]
    return whole.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)
