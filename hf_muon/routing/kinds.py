"""Kinds of parameters, known by shape, by the module that holds them, and by the names around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_muon.routing.fused import layout_of
from hf_muon.routing.model_facts import expert_counts
from hf_muon.routing.parameters import ModelParameter
from hf_muon.routing.parts import WeightLayout
from hf_muon.storage.tensors import shape_of

_NORM = re.compile(r"(^|_|layer|rms|group|batch)norm(_?\d+)?$", re.IGNORECASE)
_GATE = re.compile(r"^(.*_)?(gate|gating)$", re.IGNORECASE)
STATE_SPACE = ("A_log", "D", "dt_bias")
# Names of tables of learned vectors, for parameters that are not a module's `weight`.
TABLE = re.compile(r"(^|_)(ape|pos|position|positions|latents?|query|queries|tokens?|scale|table)(_|$)", re.IGNORECASE)
_BATCH_NORM_TYPES = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_NORM_TYPES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *_BATCH_NORM_TYPES)
_TRANSPOSED_CONV_TYPES = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def attends(module: nn.Module | None) -> bool:
    """Return whether a module holds an attention."""
    if module is None:
        return False
    named = module.named_modules()
    return any(isinstance(m, nn.MultiheadAttention) or name.endswith(("k_proj", "key", "qkv")) for name, m in named)


def layout_at(param: ModelParameter) -> WeightLayout:
    """Return how a weight is stored, as known from its module or from a module around it that holds nothing else."""
    layouts = [layout_of(param.folded, param.own_name, param.owner, *holder) for holder in param.holders()]
    layouts = layouts or [layout_of(param.folded, param.own_name, param.owner, "", None)]
    return next((layout for layout in layouts if layout.fused is not None), layouts[0])


def is_depthwise(owner: Any) -> bool:
    """Return whether a convolution has one group per input channel."""
    return bool(owner.groups > 1 and owner.groups == owner.in_channels)


def view_of_kernel(param: ModelParameter) -> str:
    """Return the view of a convolution's kernel: one matrix per group of channels."""
    owner: Any = param.owner
    words = ["transposed"] if isinstance(owner, _TRANSPOSED_CONV_TYPES) else []
    words.append("flat")
    if owner.groups > 1 and not is_depthwise(owner):
        words.append(f"rows {owner.groups}x{param.shape[0] // owner.groups}")
    return ", ".join(words)


def not_hidden_matrices(param: ModelParameter) -> str | None:
    """Return why a shape is no matrix or no known stack of matrices; None if it is one."""
    counts = expert_counts(param.owner)
    if param.is_kernel:
        return None
    if len(param.shape) == 3 and is_matrix(param.shape):
        layout = layout_at(param)
        if layout.stack or layout.flat or param.shape[0] in counts or "expert" in param.module_name.lower():
            return None
        return "three dims, not known as a stack of matrices (muon_patterns opts in)"
    if not is_matrix(param.shape):
        return "not a matrix"
    if param.own_name != "weight" and any(n > 1 and param.shape[0] % n == 0 for n in counts):
        if layout_at(param).below:
            return None
        return "experts flattened into one matrix"
    return None


def is_matrix(shape: Sequence[int]) -> bool:
    """Return whether a shape is ``(m, n)`` or ``(B, m, n)`` without a dim of size 1."""
    if len(shape) == 2:
        return min(shape) > 1
    return len(shape) == 3 and min(shape) > 1


def norm_or_bias(param: ModelParameter) -> str | None:
    """Return "norm" or "bias" if a parameter is one of them, else None."""
    component = param.module_name.rpartition(".")[2]
    if "bias" in param.own_name or component.endswith("bias"):
        return "bias"
    if isinstance(param.owner, _NORM_TYPES) or _NORM.search(component) or _NORM.search(param.own_name):
        return "norm"
    return None


def is_router(param: ModelParameter) -> bool:
    """Return whether a weight routes tokens to experts.

    A router has "router" in its name, is a gate beside or inside experts, or stands beside them with a row per expert.
    """
    steps = param.steps[:-1]
    if any("router" in part.lower() for part, _ in steps):
        return True
    for depth, (part, parent) in enumerate(reversed(steps)):
        if "expert" in part.lower() and not _GATE.match(part):
            return False
        experts = next((child for name, child in parent.named_children() if "experts" in name.lower()), None)
        if experts is None:
            continue
        if _GATE.match(part):
            return True
        sizes = {shape[0] for p in experts.parameters(recurse=False) if len(shape := shape_of(p)) == 3}
        sizes |= {len(experts)} if isinstance(experts, (nn.ModuleList, nn.ModuleDict)) else set()
        if depth == 0 and len(param.shape) == 2 and param.shape[0] in sizes:
            return True
    return False
