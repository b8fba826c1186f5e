"""The report of the first step, for `HF_MUON_STEP_REPORT=1`: what is stored how, and how it will be stepped."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_muon.diagnostics import log as diagnostics
from hf_muon.math import cost as forms
from hf_muon.math import update
from hf_muon.math.momentum import momentum_dtype
from hf_muon.math.newton_schulz import compute_dtype
from hf_muon.optimizer.preflight import Matrix, StepLayout
from hf_muon.routing.parameters import folded
from hf_muon.storage.partitions import Partition, Partitions, Slice
from hf_muon.storage.shared import Shared
from hf_muon.storage.tensors import is_dtensor, local_of, shape_of
from hf_muon.storage.views import views_of

Group = Mapping[str, Any]
Kinds = dict[tuple[str, ...], int]
"""Name, parameter, view, gradient and step of each kind of parameter, and how many there are of it."""

_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_begun: weakref.WeakKeyDictionary[Optimizer, tuple[Kinds, set[int]]] = weakref.WeakKeyDictionary()


def tell_once(optimizer: Optimizer, layout: StepLayout, partitions: Partitions | None = None) -> None:
    """Log the report on rank 0, once for an optimizer, if the environment asks for it. Talks to no other rank.

    DeepSpeed ZeRO steps one partition after the other; the report comes with the last one.

    Args:
        optimizer: whose step begins.
        layout: of what stands in its param groups now.
        partitions: all that a step of ZeRO is made of.
    """
    if optimizer in _told or not diagnostics.report_wanted() or not diagnostics.is_rank_zero():
        return
    kinds, stepped = _begun.setdefault(optimizer, ({}, set()))
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not params & stepped:
        _add(kinds, optimizer.param_groups, layout, partitions or {})
    stepped |= params
    if layout.complaints or stepped.issuperset(map(id, partitions or ())):
        _tell(optimizer, layout.complaints)


@contextlib.contextmanager
def told_if_refused(optimizer: Optimizer) -> Iterator[None]:
    """Log what there is of a report if the step is refused in here."""
    try:
        yield
    except RuntimeError:
        if optimizer in _begun:
            _tell(optimizer, ())
        raise


def _tell(optimizer: Optimizer, complaints: Sequence[str]) -> None:
    _told.add(optimizer)
    kinds, _ = _begun.pop(optimizer)
    lines = [f"the first step of Muon, as rank 0 sees it ({_world()}):"]
    for (name, param, view, grad, how), count in kinds.items():
        lines += [f"{name}" + (f"  ({count} of them)" if count > 1 else ""), f"    parameter  {param}"]
        lines += [f"    seen as    {view}"] if view else []
        lines += [f"    gradient   {grad}", f"    step       {how}"]
    lines += [f"cannot be stepped: {complaint}" for complaint in complaints]
    diagnostics.logger().info("%s", "\n".join(lines))


def _add(kinds: Kinds, groups: Sequence[Group], layout: StepLayout, partitions: Partitions) -> None:
    """Parameters of one kind, which differ in nothing but the number of their layer, are told together."""
    for group, places, matrices in zip(groups, layout.places, layout.matrices, strict=True):
        for i, (param, place, view) in enumerate(zip(group["params"], places, views_of(group), strict=True)):
            mine = [matrix for matrix in matrices if matrix.param == i]
            found: Iterable[tuple[str, ...]]
            if param in partitions:
                found = _slices(group, param, place, mine, partitions[param])
            else:
                how = _how(group, param, [matrix.shape for matrix in mine], place)
                found = [(_name(group, i), _tensor(param), view, _grad(param), how)]
            for kind in found:
                kinds[kind] = kinds.get(kind, 0) + 1


def _slices(
    group: Group, flat: Tensor, place: Shared | None, matrices: Sequence[Matrix], partition: Partition
) -> Iterator[tuple[str, ...]]:
    """The parameters of a flat partition of DeepSpeed ZeRO."""
    missing = {elements.start for elements in partition.without_gradient()} if partition.without_gradient else set()

    def grad_of(part: Slice) -> str:
        elements = part.elements(partition.rank)
        lacks = flat.grad is None or (elements.start in missing and elements.start < elements.stop)
        return "none" if lacks else f"a slice of one in the same way, {_kind(flat.grad)}"  # type: ignore[arg-type]

    stored = f"a slice in a flat partition of DeepSpeed ZeRO on each of {partition.group.size()} ranks, {_kind(flat)}"
    for part in partition.slices:
        shapes = [matrix.shape for matrix in matrices if matrix.name == part.name]
        how = _how(group, flat, shapes, place)
        yield folded(part.name), f"{part.shape}, {stored}", part.view.text, grad_of(part), how


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}, {tensor.device}"


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
    if not diagnostics.has_process_group():
        return "one process, no process group"
    return f"{torch.distributed.get_world_size()} processes, {torch.distributed.get_backend()}"
