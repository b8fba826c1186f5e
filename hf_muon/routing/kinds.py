"""What kind of parameter one is, by its shape, by the module that holds it, and by the names around it."""

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
# Names of learned vectors that stand in a table, where the parameter is not a module's `weight`.
TABLE = re.compile(r"(^|_)(pos|position|positions|latents?|query|queries|tokens?|scale|table)(_|$)", re.IGNORECASE)
_NORM_TYPES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_TRANSPOSED_CONV_TYPES = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def attends(module: nn.Module | None) -> bool:
    if module is None:
        return False
    named = module.named_modules()
    return any(isinstance(m, nn.MultiheadAttention) or name.endswith(("k_proj", "key", "qkv")) for name, m in named)


def layout_at(place: ModelParameter) -> WeightLayout:
    """How a weight is stored, as the module says that uses it, or one around that does nothing else."""
    layouts = [layout_of(place.folded, place.own_name, place.owner, *home) for home in place.homes()]
    layouts = layouts or [layout_of(place.folded, place.own_name, place.owner, "", None)]
    return next((layout for layout in layouts if layout.fused is not None), layouts[0])


def is_depthwise(owner: Any) -> bool:
    return bool(owner.groups > 1 and owner.groups == owner.in_channels)


def view_of_kernel(place: ModelParameter) -> str:
    """A matrix for each group of channels."""
    owner: Any = place.owner
    words = ["transposed"] if isinstance(owner, _TRANSPOSED_CONV_TYPES) else []
    words.append("flat")
    if owner.groups > 1 and not is_depthwise(owner):
        words.append(f"rows {owner.groups}x{place.shape[0] // owner.groups}")
    return ", ".join(words)


def not_hidden_matrices(place: ModelParameter) -> str | None:
    """Shapes that are no matrix, and stacks that are none, or none that can be told apart."""
    counts = expert_counts(place.owner)
    if place.is_kernel:
        return None
    if len(place.shape) == 3 and is_matrix(place.shape):
        layout = layout_at(place)
        if layout.stack or layout.flat or place.shape[0] in counts or "expert" in place.module_name.lower():
            return None
        return "three dims, not known as a stack of matrices (muon_patterns opts in)"
    if not is_matrix(place.shape):
        return "not a matrix"
    if place.own_name != "weight" and any(n > 1 and place.shape[0] % n == 0 for n in counts):
        if layout_at(place).experts:
            return None
        return "experts flattened into one matrix"
    return None


def is_matrix(shape: Sequence[int]) -> bool:
    """``(m, n)``, or a stack ``(B, m, n)`` of at least two; neither with a single row or column."""
    if len(shape) == 2:
        return min(shape) > 1
    return len(shape) == 3 and min(shape) > 1


def norm_or_bias(place: ModelParameter) -> str | None:
    component = place.module_name.rpartition(".")[2]
    if "bias" in place.own_name or component.endswith("bias"):
        return "bias"
    if isinstance(place.owner, _NORM_TYPES) or _NORM.search(component) or _NORM.search(place.own_name):
        return "norm"
    return None


def is_router(place: ModelParameter) -> bool:
    """Something called router; a gate beside experts, or inside one; a matrix with a row per expert beside them."""
    steps = place.steps[:-1]
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
        if depth == 0 and len(place.shape) == 2 and place.shape[0] in sizes:
            return True
    return False
