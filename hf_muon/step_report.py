"""The report of an optimizer's first step, for `HF_MUON_DIAG=1`: what is stored how, and how it will be stepped."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_muon import diagnostics, forms, update
from hf_muon.distributed import Shared, is_dtensor, local_of, shape_of
from hf_muon.momentum import momentum_dtype
from hf_muon.newton_schulz import compute_dtype
from hf_muon.places import folded
from hf_muon.preflight import Layout
from hf_muon.views import views_of

Group = Mapping[str, Any]

_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def tell_once(optimizer: Optimizer, layout: Layout) -> None:
    """Log the report on rank 0, once for an optimizer, if the environment asks for it. Talks to no other rank."""
    if optimizer in _told or not diagnostics.wanted():
        return
    _told.add(optimizer)
    if diagnostics.is_rank_zero():
        diagnostics.logger().info("%s", report(optimizer.param_groups, layout))


def report(groups: Sequence[Group], layout: Layout) -> str:
    """Parameters of one kind, which differ in nothing but the number of their layer, are told together.

    Args:
        groups: param groups, with the gradients that are about to be stepped.
        layout: of these groups.
    """
    kinds: dict[tuple[str, ...], int] = {}
    for group, places, matrices in zip(groups, layout.places, layout.matrices, strict=True):
        shapes: dict[int, list[tuple[int, ...]]] = {}
        for matrix in matrices:
            shapes.setdefault(matrix.param, []).append(matrix.shape)
        for i, (param, place, view) in enumerate(zip(group["params"], places, views_of(group), strict=True)):
            how = _how(group, param, shapes.get(i, []), place)
            kind = (_name(group, i), _tensor(param), view, _grad(param), how)
            kinds[kind] = kinds.get(kind, 0) + 1
    lines = [f"the first step of Muon, as rank 0 sees it ({_world()}):"]
    for (name, param, view, grad, how), count in kinds.items():
        lines += [f"{name}" + (f"  ({count} of them)" if count > 1 else ""), f"    parameter  {param}"]
        lines += [f"    seen as    {view}"] if view else []
        lines += [f"    gradient   {grad}", f"    step       {how}"]
    lines += [f"cannot be stepped: {complaint}" for complaint in layout.complaints]
    return "\n".join(lines)


def _name(group: Group, index: int) -> str:
    names = group.get("param_names")
    if names and len(names) == len(group["params"]):
        return folded(names[index])
    return f"parameters of shape {tuple(group['params'][index].shape)}"


def _tensor(tensor: Tensor) -> str:
    """Type, shape, placements, mesh, local shape, dtype and device."""
    parts = [f"{type(tensor).__name__} {shape_of(tensor)}"]
    if is_dtensor(tensor):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        parts += [f"placements {tensor.placements}", f"mesh {tuple(mesh.mesh.shape)}{names}"]  # type: ignore[attr-defined]
        parts += [f"local {tuple(local_of(tensor).shape)}"]
    return ", ".join([*parts, str(tensor.dtype).removeprefix("torch."), str(local_of(tensor).device)])


def _grad(param: Tensor) -> str:
    return "none" if param.grad is None else _tensor(param.grad)


def _how(group: Group, param: Tensor, shapes: Sequence[tuple[int, ...]], place: Shared | None) -> str:
    device = local_of(param).device
    if not group["use_muon"]:
        kernel = "fused kernel" if update.uses_fused_adamw(group["params"]) else "foreach"
        return f"AdamW on the local part ({kernel}), no communication"
    dtype = compute_dtype(group["ns_dtype"], device.type, device.index)
    newton_schulz = f"{group['ns_steps']} Newton-Schulz steps in {str(dtype).removeprefix('torch.')}"
    forms_of = dict.fromkeys(forms.described(shape, group["ns_steps"], dtype, device.type) for shape in shapes)
    newton_schulz += f" ({' and '.join(forms_of)})" if forms_of else ""
    momentum = f"momentum in {str(momentum_dtype(param, group['momentum_dtype'])).removeprefix('torch.')}"
    if place is None:
        return f"Muon, whole on this rank: {newton_schulz}; {momentum}"
    count, backend = place.group.size(), torch.distributed.get_backend(place.group)
    stored = "parts travel to" if is_dtensor(param) else "stored whole on each,"
    if not place.regions:
        stored = "slices of ZeRO's partitions travel to"
    return (
        f"Muon, {stored} one owner of {count} ranks ({backend}), which orthogonalizes the whole matrix: "
        f"{newton_schulz}; directions travel back; {momentum}"
    )


def _world() -> str:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return "one process, no process group"
    return f"{torch.distributed.get_world_size()} processes, {torch.distributed.get_backend()}"
