"""The report of the first step, for `HF_MUON_STEP_REPORT=1`: how parameters are stored, and how they are stepped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics import log
from hf_muon.math import cost
from hf_muon.math.adamw import uses_fused_adamw
from hf_muon.math.coefficients import resolve
from hf_muon.math.moments import moment_dtype
from hf_muon.math.precision import compute_dtype
from hf_muon.optimizer.layout import Matrix, StepLayout
from hf_muon.optimizer.state import dtype_of, is_offloaded
from hf_muon.routing.parameters import folded
from hf_muon.storage.partitions import Partition, Partitions, Slice
from hf_muon.storage.shared import SharedStorage
from hf_muon.storage.tensors import is_dtensor, local_of, shape_of
from hf_muon.storage.views import views_of

Group = Mapping[str, Any]
Kind = tuple[str, str, str, str, str]
"""Name, parameter, view, gradient and step of parameters that differ in nothing but the number of their layer."""


class FirstStepReport:
    """The report of an optimizer's first step, logged once on rank 0 if the environment asks for it. Sends nothing.

    A framework that steps one flat partition after the other calls `add` for each; the report comes with the last one.
    """

    def __init__(self) -> None:
        self._kinds: dict[Kind, int] = {}
        self._params: set[int] = set()
        self._is_logged = False

    def add(self, groups: Sequence[Group], layout: StepLayout, partitions: Partitions | None = None) -> None:
        """Add the parameters that stand in the groups, and log the report when it is complete.

        Args:
            groups: param groups.
            layout: of these groups.
            partitions: all flat partitions of a step; None where there are none.
        """
        if self._is_logged or not log.report_wanted() or not log.is_rank_zero():
            return
        params = {id(param) for group in groups for param in group["params"]}
        if not params & self._params:
            for kind in _kinds_of(groups, layout, partitions or {}):
                self._kinds[kind] = self._kinds.get(kind, 0) + 1
        self._params |= params
        if layout.complaints or self._params.issuperset(map(id, partitions or ())):
            self._log(layout.complaints)

    @contextlib.contextmanager
    def ends_if_refused(self) -> Iterator[None]:
        """Log what has been added if the block refuses the step, before the report is complete."""
        try:
            yield
        except RuntimeError:
            if self._params and not self._is_logged:
                self._log(())
            raise

    def _log(self, complaints: Sequence[str]) -> None:
        self._is_logged = True
        lines = [f"the first step of Muon, as rank 0 sees it ({_world()}):"]
        for (name, param, view, grad, how), count in self._kinds.items():
            lines += [f"{name}" + (f"  ({count} of them)" if count > 1 else ""), f"    parameter  {param}"]
            lines += [f"    seen as    {view}"] if view else []
            lines += [f"    gradient   {grad}", f"    step       {how}"]
        lines += [f"cannot be stepped: {complaint}" for complaint in complaints]
        log.logger().info("%s", "\n".join(lines))
        self._kinds.clear()


def _kinds_of(groups: Sequence[Group], layout: StepLayout, partitions: Partitions) -> Iterator[Kind]:
    """Yield the kind of each parameter, or of each slice of a flat partition."""
    for group, work in zip(groups, layout.works, strict=False):  # fewer works where the layout has complaints
        for i, (param, place, view) in enumerate(zip(group["params"], work.shared, views_of(group), strict=True)):
            matrices = [matrix for matrix in work.matrices if matrix.param == i]
            if param in partitions:
                yield from _slices(group, param, place, matrices, partitions[param])
            else:
                how = _how(group, param, [matrix.shape for matrix in matrices], place)
                yield _name(group, i), _tensor(param), view, _grad(param), how


def _slices(
    group: Group, flat: Tensor, place: SharedStorage | None, matrices: Sequence[Matrix], partition: Partition
) -> Iterator[Kind]:
    """Yield the kinds of the parameters in a flat partition."""
    missing = {elements.start for elements in partition.without_gradient()} if partition.without_gradient else set()

    def grad_of(part: Slice) -> str:
        elements = part.elements(partition.rank)
        lacks = flat.grad is None or (elements.start in missing and elements.start < elements.stop)
        return "none" if lacks else f"a slice of the gradient of that partition, {_dtype_and_device(flat.grad)}"  # type: ignore[arg-type]

    stored = f"a slice in a flat ZeRO partition on each of {partition.group.size()} ranks, {_dtype_and_device(flat)}"
    for part in partition.slices:
        shapes = [matrix.shape for matrix in matrices if matrix.name == part.name]
        how = _how(group, flat, shapes, place)
        yield folded(part.name), f"{part.shape}, {stored}", part.view.text, grad_of(part), how


def _dtype_and_device(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}, {tensor.device}"


def _name(group: Group, index: int) -> str:
    names = group.get("param_names")
    if names and len(names) == len(group["params"]):
        return folded(names[index])
    return f"parameters of shape {tuple(group['params'][index].shape)}"


def _tensor(tensor: Tensor) -> str:
    """Return type, shape, placements, mesh, local shape, dtype and device of a tensor, as text."""
    parts = [f"{type(tensor).__name__} {shape_of(tensor)}"]
    if is_dtensor(tensor):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        parts += [f"placements {tensor.placements}", f"mesh {tuple(mesh.mesh.shape)}{names}"]  # type: ignore[attr-defined]
        parts += [f"local {tuple(local_of(tensor).shape)}"]
    return ", ".join([*parts, str(tensor.dtype).removeprefix("torch."), str(local_of(tensor).device)])


def _grad(param: Tensor) -> str:
    return "none" if param.grad is None else _tensor(param.grad)


def _how(group: Group, param: Tensor, shapes: Sequence[tuple[int, ...]], place: SharedStorage | None) -> str:
    device = local_of(param).device
    host = " on the host" if is_offloaded(group, param) else ""
    if not group["use_muon"]:
        kernel = "fused kernel" if uses_fused_adamw(group["params"], dtype_of(group)) else "foreach"
        return f"AdamW on the local part ({kernel}), no communication{host and f'; moments{host}'}"
    dtype = compute_dtype(group["ns_dtype"], device.type, device.index)
    steps = len(resolve(group["ns_coefficients"], group["ns_steps"]))
    newton_schulz = f"{steps} Newton-Schulz steps in {str(dtype).removeprefix('torch.')}"
    forms = dict.fromkeys(cost.described(shape, steps, dtype, device.type) for shape in shapes)
    newton_schulz += f" ({' and '.join(forms)})" if forms else ""
    dtype_of_momentum = moment_dtype(param, "momentum_buffer", group["momentum_dtype"])
    momentum = f"momentum in {str(dtype_of_momentum).removeprefix('torch.')}{host}"
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
    if not log.has_process_group():
        return "one process, no process group"
    return f"{torch.distributed.get_world_size()} processes, {torch.distributed.get_backend()}"
