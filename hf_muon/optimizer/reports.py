"""Warnings about an optimizer, which rank 0 logs, and how a step is taken, as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics import log
from hf_muon.math.coefficients import resolve
from hf_muon.math.precision import compute_dtype
from hf_muon.math.rounding import is_half
from hf_muon.math.update import lr_scale
from hf_muon.optimizer.layout import StepLayout
from hf_muon.routing.parameters import folded
from hf_muon.storage.boxes import SharedStorage
from hf_muon.storage.partitions import Partitions
from hf_muon.storage.tensors import has_data, is_dtensor, local_of, shape_of
from hf_muon.storage.views import views_of

Group = Mapping[str, Any]


def warn_of_empty_step(groups: Sequence[Group]) -> None:
    """Warn that no parameter has a gradient on any rank, and log the likely cause."""
    if log.is_rank_zero():
        log.logger().warning(
            "no parameter of this optimizer has a gradient, so that the step changes nothing: %s [no-gradients]",
            _likely_cause([param for group in groups for param in group["params"]]),
        )


def _likely_cause(params: Sequence[Tensor]) -> str:
    """Return the likely reason why parameters have no gradients, from their present state."""
    if not any(param.requires_grad for param in params):
        return "none of them requires a gradient"
    if any(param.device.type == "meta" for param in params):
        return (
            "they are on the meta device. Build the optimizer after the model was materialized (to_empty), not before"
        )
    return (
        "either there was no backward pass since zero_grad(), or the model has other parameters by now (fully_shard, "
        "parallelize_module, to_empty and peft replace them). In the latter case, build the optimizer after that"
    )


def warn_of_weights_that_cannot_move(groups: Sequence[Group], layout: StepLayout) -> bool:
    """Warn if rounding to nearest loses typical updates of more than half of the bf16 and fp16 weights on rank 0.

    A typical update is the learning rate times the root mean square of directions. The step to judge by is the first
    with at least half of the highest learning rate that a group knows of: a warmup begins with smaller updates.

    Args:
        groups: param groups, before their step, with learning rates as numbers.
        layout: the layout of these groups.

    Returns:
        Whether this was a step to judge by.
    """
    counts: dict[tuple[float, torch.dtype], list[Tensor]] = {}
    total = 0
    for group, work in zip(groups, layout.works, strict=True):
        if group["weight_rounding"] != "nearest" or not log.is_rank_zero():
            continue
        halves = {i: param for i, param in enumerate(group["params"]) if is_half(param) and param.grad is not None}
        lr = group["lr"]
        highest = max(lr, *(float(group.get(key, 0)) for key in ("initial_lr", "max_lr")))
        if not halves or lr <= 0 or lr < highest / 2:
            continue
        moves = {i: factor for i, ((_, factor), *_) in enumerate(work.factors)}
        for matrix in (matrix for matrix in work.matrices if math.prod(matrix.shape)):
            scale = lr_scale(group["adjust_lr_fn"], matrix.out_in, group["update_rms"])
            moves[matrix.param] = scale * matrix.factor / math.sqrt(max(matrix.out_in))
        for i, param in halves.items():
            weights = local_of(param)
            if has_data(weights):
                stays = (weights.float() + lr * moves.get(i, 1.0)).to(weights.dtype) == weights
                counts.setdefault((lr, weights.dtype), []).append(stays.sum())
                total += weights.numel()
    share = sum(int(count) for of_kind in counts.values() for count in of_kind) / max(total, 1)
    if share > 0.5:
        log.logger().warning(
            "weight_rounding=nearest: at a learning rate of %s, %.0f%% of the %s weights cannot move, because their "
            "updates are smaller than half a unit in the last place. Train bf16 weights with "
            "weight_rounding=stochastic, or fp32 weights [weights-cannot-move]",
            "|".join(dict.fromkeys(f"{lr:.3g}" for lr, _ in counts)),
            100 * share,
            " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for _, dtype in counts)),
        )
    return total > 0


def first_step(groups: Sequence[Group], layout: StepLayout, partitions: Partitions) -> dict[int, list[str]]:
    """Return how parameters and their gradients are stored and stepped.

    Returns:
        By the id of a parameter, a text for it, or for each slice of a flat partition.
    """
    entries: dict[int, list[str]] = {}
    # There are fewer works where the layout has complaints.
    for group, work in zip(groups, layout.works, strict=False):
        names = group.get("param_names") or [f"parameters of shape {shape_of(param)}" for param in group["params"]]
        views = views_of(group)
        for i, (param, place) in enumerate(zip(group["params"], work.shared, strict=True)):
            gradient = "none" if param.grad is None else _described(param.grad)
            if param in partitions:
                stored = f"a slice in a flat ZeRO partition on each of {partitions[param].group.size()} ranks"
                gradient = f"of that partition, {_where(param.grad)}" if param.grad is not None else gradient
                slices = partitions[param].slices
                described = f", {stored}, {_where(param)}"
                members = [(slice_.name, f"{slice_.shape}{described}", slice_.view.text) for slice_ in slices]
            else:
                members = [(names[i], _described(param), views[i])]
            for name, described, seen in members:
                lines = [folded(name), f"    parameter  {described}", *([f"    seen as    {seen}"] if seen else [])]
                lines += [f"    gradient   {gradient}", f"    step       {_how(group, param, place)}"]
                entries.setdefault(id(param), []).append("\n".join(lines))
    return entries


def _described(tensor: Tensor) -> str:
    """Return type, shape, placements, mesh, local shape, dtype and device of a tensor, as text."""
    words = [f"{type(tensor).__name__} {shape_of(tensor)}"]
    if is_dtensor(tensor):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        words += [f"placements {tensor.placements}", f"mesh {tuple(mesh.mesh.shape)}{names}"]  # type: ignore[attr-defined]
        words += [f"local {tuple(local_of(tensor).shape)}"]
    return ", ".join([*words, _where(tensor)])


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
