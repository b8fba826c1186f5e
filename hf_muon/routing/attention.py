"""Find the attentions of a model, and the rows of weights of their query and key heads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from hf_muon.routing.fused import HEAD_SIZES, Fused, layout_of, number
from hf_muon.routing.parameters import ModelParameter, parameters_of
from hf_muon.routing.router import is_adapter
from hf_muon.rules.heads import Attention, Heads, Rows
from hf_muon.storage.tensors import shape_of

_QUERY = re.compile(r"q|query|q_proj|query_proj|to_q|q_b_proj")
_KEY = re.compile(r"k|key|k_proj|key_proj|to_k")
_NORM = re.compile(r"(q|k|qk|query|key)_?(layer)?_?norm|norm_(q|k|query|key)|(q|k)_ln")
_ATTENTION = re.compile(r"Attention(?!Output|Layer)")

Ranges = dict[str, list[range]]
"""By role, the outputs of each head, in the order of heads."""


class _Projection(NamedTuple):
    """A weight of queries or keys, its bias if it has one, and the rows of the heads of each role."""

    parameters: dict[str, Tensor]  # keys are names
    transposed: bool
    ranges: Ranges


def attentions_of(model: nn.Module) -> tuple[dict[Attention, dict[str, Tensor]], list[tuple[str, str]]]:
    """Return the attentions of a model whose query and key heads are known, and complaints about the others.

    Each attention has the parameters that its rows name. Attentions without a trainable one are left out. A complaint
    is the name of a module, and a text.
    """
    params = parameters_of(model)
    names = {param.parameter: param.name for param in params}
    candidates: dict[nn.Module, tuple[str, list[_Projection]]] = {}
    for param in params:
        leaf, parent = param.holder
        if parent is None or not param.name.endswith("weight") or len(param.shape) != 2 or is_adapter(param):
            continue
        layout = layout_of(param.folded, param.own_name, param.owner, leaf, parent)
        ranges = dict(_ranges(leaf, parent, param.shape[1 if layout.transposed else 0], layout.fused))
        if ranges or _ATTENTION.search(type(parent).__name__):
            # By the module and not by the length of the name: `holder` skips what peft puts in between.
            depth = [module for _, module in param.steps].index(parent)
            name = ".".join(part for part, _ in param.steps[:depth])
            _, projections = candidates.setdefault(parent, (name, []))
        if ranges:
            parameters: dict[str, Tensor] = {param.name: param.parameter}
            bias = getattr(param.owner, "bias", None)
            if isinstance(bias, nn.Parameter):
                parameters[names[bias]] = bias
            projections.append(_Projection(parameters, layout.transposed, ranges))
    attentions: dict[Attention, dict[str, Tensor]] = {}
    complaints: list[tuple[str, str]] = []
    for module, (name, projections) in candidates.items():
        inside = [p for p in params if p.parameter.requires_grad and p.name.startswith(f"{name}.")]
        if not inside:
            continue
        attention = _attention(name, module, projections)
        parameters = {key: p for projection in projections for key, p in projection.parameters.items()}
        reason = attention if isinstance(attention, str) else _untrained(name, parameters, inside)
        if reason is not None:
            complaints.append((name, f"({type(module).__name__}) {reason}"))
        elif isinstance(attention, Attention) and any(p.requires_grad for p in parameters.values()):
            attentions[attention] = parameters
    return attentions, complaints


def _untrained(attention: str, parameters: dict[str, Tensor], inside: list[ModelParameter]) -> str | None:
    """Return why rows of an attention's weights cannot be rescaled; None if they can, or if none is trainable."""
    leaves = [name.removeprefix(f"{attention}.").partition(".")[0] for name in parameters]
    for param in inside:
        if is_adapter(param) and param.name.removeprefix(f"{attention}.").partition(".")[0] in leaves:
            return f"is trained by an adapter ({param.name}), and the weights to rescale are frozen [frozen-attention]"
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if frozen and len(frozen) < len(parameters):
        return f"is trained in part: {frozen[0]} is frozen [frozen-attention]"
    return None


def _ranges(leaf: str, parent: nn.Module, rows: int, fused: Fused | None) -> Iterator[tuple[str, list[range]]]:
    """Yield the roles (query, key) of a projection's rows, each with the rows of its heads."""
    if fused is not None:
        block = fused.size // fused.blocks
        start = 0
        for part in fused.parts:
            if part.name in ("q", "k"):
                head = part.head or part.size
                starts = [i * block + start + k for i in range(fused.blocks) for k in range(0, part.size, head)]
                yield "query" if part.name == "q" else "key", [range(first, first + head) for first in starts]
            start += part.size
        return
    is_query = _QUERY.fullmatch(leaf) is not None
    if not is_query and not _KEY.fullmatch(leaf):
        return
    head = number(parent, *(("qk_head_dim", *HEAD_SIZES) if is_query else HEAD_SIZES))
    if not head or rows % head:
        return
    head_rows = [range(first, first + head) for first in range(0, rows, head)]
    nope = number(parent, "qk_nope_head_dim") if number(parent, "kv_lora_rank") else 0
    if is_query and nope:
        yield "query", [rows_of_head[:nope] for rows_of_head in head_rows]
        yield "query_rotary", [rows_of_head[nope:] for rows_of_head in head_rows]
    else:
        yield "query" if is_query else "key", head_rows


def _attention(name: str, module: nn.Module, projections: Sequence[_Projection]) -> Attention | str:
    """Return an attention, or the reason why its heads are not known."""
    by_role: Ranges = {}
    for projection in projections:
        for role in projection.ranges.keys() & by_role.keys():
            return f"has two projections of the role {role!r} [unknown-attention]"
        by_role |= projection.ranges
    queries, keys, rotary = (by_role.get(role, []) for role in ("query", "key", "query_rotary"))
    if not queries or not keys:
        return "has no query and key projections that hf_muon knows [unknown-attention]"
    sizes = {len(head) for head in queries} | {len(head) for head in keys}
    if len(queries) % len(keys) or len(sizes) > 1:
        of_query, of_key = len(queries[0]), len(keys[0])
        return f"has {len(queries)} query heads of {of_query} and {len(keys)} key heads of {of_key} outputs"
    first = {"query": 1, "key": 1 + len(queries), "query_rotary": 1 + len(queries) + len(keys)}
    rows: dict[str, Rows] = {}
    for parameters, transposed, ranges in projections:
        weight, *biases = parameters
        roles = [0] * shape_of(parameters[weight])[1 if transposed else 0]
        for role, heads in ranges.items():
            for h, rows_of_head in enumerate(heads):
                for row in rows_of_head:
                    roles[row] = first[role] + h
        rows[weight] = Rows(tuple(roles), transposed)
        rows |= {bias: Rows(tuple(roles)) for bias in biases}
    children = module.named_children()
    norms = [norm for norm, child in children if _NORM.fullmatch(norm) and not isinstance(child, nn.Identity)]
    size = len(queries[0]) + (len(rotary[0]) if rotary else 0)
    heads_of = Heads(len(queries), len(keys), bool(rotary), ", ".join(norms))
    return Attention(name, module, heads_of, size, rows)
