"""The report of the first step, for `HF_MUON_STEP_REPORT=1`: how parameters are stored, and how they are stepped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics import log
from hf_muon.math.coefficients import resolve
from hf_muon.math.precision import compute_dtype
from hf_muon.optimizer.layout import StepLayout
from hf_muon.routing.parameters import folded
from hf_muon.storage.partitions import Partitions
from hf_muon.storage.shared import SharedStorage
from hf_muon.storage.tensors import is_dtensor, local_of, shape_of
from hf_muon.storage.views import views_of

Group = Mapping[str, Any]


class FirstStepReport:
    """The report of an optimizer's first step, logged once on rank 0 if the environment asks for it. Sends nothing.

    A framework that steps one flat partition after the other calls `add` for each; the report comes with the last one.
    """

    def __init__(self) -> None:
        self._entries: Counter[str] = Counter()  # parameters that differ in nothing but their layer share one
        self._params: set[int] = set()
        self._is_logged = False

    def add(self, groups: Sequence[Group], layout: StepLayout, partitions: Partitions | None = None) -> None:
        """Add the parameters that stand in the groups, and log the report when all `partitions` of a step are there."""
        if self._is_logged or not log.report_wanted() or not log.is_rank_zero():
            return
        params = {id(param) for group in groups for param in group["params"]}
        if not params & self._params:
            self._entries.update(_entries(groups, layout, partitions or {}))
        self._params |= params
        if not self._params.issuperset(map(id, partitions or ())):
            return
        self._is_logged = True
        world = "one process, no process group"
        if log.has_process_group():
            world = f"{torch.distributed.get_world_size()} processes, {torch.distributed.get_backend()}"
        counts = self._entries.items()
        entries = [entry.replace("\n", f"  ({count} of them)\n", 1) if count > 1 else entry for entry, count in counts]
        log.logger().info("%s", "\n".join([f"the first step of Muon, as rank 0 sees it ({world}):", *entries]))


def _entries(groups: Sequence[Group], layout: StepLayout, partitions: Partitions) -> Iterator[str]:
    """Yield a text for each parameter, or for each slice of a flat partition."""
    for group, work in zip(groups, layout.works, strict=False):  # fewer works where the layout has complaints
        names = group.get("param_names") or [f"parameters of shape {shape_of(param)}" for param in group["params"]]
        views = views_of(group)
        for i, (param, place) in enumerate(zip(group["params"], work.shared, strict=True)):
            gradient = "none" if param.grad is None else _described(param.grad)
            if param in partitions:
                stored = f"a slice in a flat ZeRO partition on each of {partitions[param].group.size()} ranks"
                gradient = f"of that partition, {_where(param.grad)}" if param.grad is not None else gradient
                slices = partitions[param].slices
                members = [(one.name, f"{one.shape}, {stored}, {_where(param)}", one.view.text) for one in slices]
            else:
                members = [(names[i], _described(param), views[i])]
            for own, described, seen in members:
                lines = [folded(own), f"    parameter  {described}", *([f"    seen as    {seen}"] if seen else [])]
                yield "\n".join([*lines, f"    gradient   {gradient}", f"    step       {_how(group, param, place)}"])


def _described(tensor: Tensor) -> str:
    """Return type, shape, placements, mesh, local shape, dtype and device of a tensor, as text."""
    parts = [f"{type(tensor).__name__} {shape_of(tensor)}"]
    if is_dtensor(tensor):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        parts += [f"placements {tensor.placements}", f"mesh {tuple(mesh.mesh.shape)}{names}"]  # type: ignore[attr-defined]
        parts += [f"local {tuple(local_of(tensor).shape)}"]
    return ", ".join([*parts, _where(tensor)])


def _where(tensor: Tensor) -> str:
    return f"{tensor.dtype}, {local_of(tensor).device}".removeprefix("torch.")


def _how(group: Group, param: Tensor, place: SharedStorage | None) -> str:
    if not group["use_muon"]:
        return "AdamW on the local part, no communication"
    device = local_of(param).device
    dtype = str(compute_dtype(group["ns_dtype"], device.type, device.index)).removeprefix("torch.")
    steps = f"{len(resolve(group['ns_coefficients'], group['ns_steps']))} Newton-Schulz steps in {dtype}"
    if place is None or place.group is None:
        return f"Muon, whole on this rank: {steps}"
    stored = "parts travel to" if is_dtensor(param) else "stored whole on each,"
    stored = stored if place.regions else "slices of ZeRO's partitions travel to"
    return f"Muon, {stored} one owner of {place.group.size()} ranks, which orthogonalizes the whole matrix: {steps}"
