"""Decide for each parameter whether it goes to Muon, as which matrices, or to AdamW, and why.

`Router.decide` asks `_reason_against`. In this order, the first that says why sends a weight to AdamW:

1. The user's `adamw_patterns`; a shape with fewer than two dims, or a single row or column. Then `muon_patterns` end
   the search: what they match goes to Muon.
2. `_named`: LoRA without the option `lora`, an excluded word in the name (`EXCLUDED_NAMES`), other adapters.
3. `_structural`: what the model reports as embeddings, the kind of module, a router of experts, a head (`_head`), a
   shape other than a matrix's, and last what is guessed to be a head, because no other weight reads its rows.

Otherwise it goes to Muon, and `_view` says as which matrices. It asks `layout_at`, which reads the tables in `fused`: a
class that stores its weights in a new way is a row of `CUTS` (several matrices in one), `STORED` (other orders of dims)
or `BELOW` (matrices one below the other). Facts about a whole model are in `model_facts` and `widths`, those about one
parameter in `parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_muon.config import MuonConfig
from hf_muon.options.patterns import compile_patterns
from hf_muon.routing.fused import QUERY, WeightLayout, heads_of, layout_of
from hf_muon.routing.model_facts import expert_counts, is_outside_base_model, reported_embeddings
from hf_muon.routing.parameters import (
    CONV_TYPES,
    EMBEDDING_TYPES,
    PART,
    ModelParameter,
    examples,
    is_layer,
    matching,
)
from hf_muon.routing.widths import NOTHING, RESULT, UNCLEAR, Widths, is_bare, matrix_of
from hf_muon.storage.tensors import shape_of
from hf_muon.storage.views import parse

_NORM = re.compile(r"(^|_|layer|rms|group|batch)norm(_?\d+)?$", re.IGNORECASE)
_GATE = re.compile(r"^(.*_)?(gate|gating)$", re.IGNORECASE)
STATE_SPACE = ("A_log", "D", "dt_bias")
# Names of tables of learned vectors, for parameters that are not a module's `weight`.
TABLE = re.compile(r"(^|_)(ape|pos|position|positions|latents?|query|queries|tokens?|scale|table)(_|$)", re.IGNORECASE)
_NORM_TYPES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

# The option `lora` also excludes LoRA factors.
EXCLUDED_NAMES = ("embed", "wte", "wpe", "lm_head")

_HEAD = re.compile(
    "score|classifiers?|qa_outputs|logits_proj|summary|seq_relationship|output_projection|(.*_)?heads?", re.IGNORECASE
)
# A weight has few rows if it has at most MOST, and at most 1/FEW of its columns: a box, scores of masks, some classes.
MOST, FEW = 64, 16
GUESS = "a guess: "
"""How the reason of a route begins that the model does not settle."""
_LORA = re.compile(r"(^|[._])lora", re.IGNORECASE)

# Names without decay, as in transformers' Trainer.get_decay_parameter_names.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


def is_adapter(param: ModelParameter) -> bool:
    """Return whether a parameter is a factor of LoRA, by its name, or of another adapter, by the modules around it."""
    return is_lora(param.name) or param.is_adapter


def is_lora(name: str) -> bool:
    """Return whether a name is that of a LoRA factor."""
    return _LORA.search(name) is not None


class Router:
    """Decide for each parameter of one model, with the facts about it that the decisions share."""

    def __init__(self, model: nn.Module, config: MuonConfig, params: Sequence[ModelParameter]) -> None:
        self.config = config
        self.muon_patterns = compile_patterns(config.muon_patterns)
        self.adamw_patterns = compile_patterns(config.adamw_patterns)
        self._check_patterns(params)
        self.embeddings = reported_embeddings(model)
        self.widths = Widths(param for param in params if not is_adapter(param))
        self._ends: dict[str, tuple[str, bool]] = {}

    def _check_patterns(self, params: Sequence[ModelParameter]) -> None:
        for pattern in self.adamw_patterns:
            matching("adamw_patterns", pattern, params)
        for pattern in self.muon_patterns:
            matches = matching("muon_patterns", pattern, params)
            if not any(is_matrix(param.folded) for param in matches):
                names = examples(param.name for param in matches)
                raise ValueError(
                    f"muon_patterns: {pattern.pattern!r} matches no matrix, only {names} [matches-nothing]"
                )
        if self.config.lora == "muon" and not any(is_lora(p.name) and p.parameter.requires_grad for p in params):
            raise ValueError(
                "lora=muon: no LoRA factor is trained. Remove the option, or check the peft configuration "
                "[no-lora-factors]"
            )

    def decide(self, param: ModelParameter) -> tuple[bool, bool, str, str]:
        """Return ``(use_muon, decay, reason, view)`` for a parameter."""
        against = self._reason_against(param)
        if against is not None:
            return False, _decays(param), against, ""
        # After the reasons against: `adamw_patterns` and the shape also hold for factors and for `muon_patterns`.
        if is_lora(param.name):
            view = view_of_kernel(param) if param.is_kernel else view_of_experts(param)
            what = f"LoRA factor, lora={self.config.lora}"
        else:
            view, what = (view_of_kernel(param), "convolution") if param.is_kernel else self._view(param)
            if self._end_of(param) == UNCLEAR:
                what = f"{GUESS}{what}, no head with a row for each {UNCLEAR[0]}"
        for pattern in self.muon_patterns:
            if pattern.search(param.name):
                what = f"muon_patterns {pattern.pattern!r}"
                break
        return True, True, what, view

    def _view(self, param: ModelParameter) -> tuple[str, str]:
        """Return the view of a weight, and a text that describes the weight."""
        layout = layout_at(param)
        what = "hidden matrix" if len(param.shape) == 2 else "stack of hidden matrices"
        words = ["transposed"] if layout.transposed else []
        leaf, parent = param.holder
        fused = layout.fused
        if fused is not None:
            what += f": {fused.names}"
        elif self.config.per_head and not layout.transposed and param.own_name == "weight" and len(param.shape) == 2:
            fused = heads_of(leaf, parent, param.shape[0])
        if layout.below > 1:
            what = "hidden matrices, one below the other"
            words.append(f"rows {layout.below}x{param.shape[0] // layout.below}")
        elif fused is not None:
            cut = f"{'columns' if layout.transposed else 'rows'} {fused.sizes(self.config.per_head)}"
            if all(min(shape) > 1 for shape in parse(cut).shapes(param.shape)):
                words.append(cut)
        return ", ".join(words), what

    def _reason_against(self, param: ModelParameter) -> str | None:
        for pattern in self.adamw_patterns:
            if pattern.search(param.name):
                return f"adamw_patterns {pattern.pattern!r}"
        if len(param.shape) < 2:
            return norm_or_bias(param) or "vector"
        if len(param.shape) == 2 and not is_matrix(param.shape):
            return "single row or column"
        if is_matrix(param.folded) and any(pattern.search(param.name) for pattern in self.muon_patterns):
            return None
        return self._named(param) or self._structural(param)

    def _named(self, param: ModelParameter) -> str | None:
        if is_lora(param.name) and self.config.lora != "muon":
            return "name contains 'lora' (lora=muon opts in)"
        if excluded := excluded_word(param):
            return f"name contains {excluded!r}"
        if "trainable_tokens_delta" in dict(param.steps):
            return "rows of an embedding"
        if is_adapter(param) and not is_lora(param.name):
            return "adapter factor (muon_patterns opts in)"
        return None

    def _structural(self, param: ModelParameter) -> str | None:
        if id(param.parameter) in self.embeddings:
            return f"the model's {self.embeddings[id(param.parameter)]}"
        if isinstance(param.owner, EMBEDDING_TYPES):
            return "embedding"
        if any(isinstance(module, nn.AdaptiveLogSoftmaxWithLoss) for _, module in param.steps):
            return "head"
        if reason := norm_or_bias(param):
            return reason
        if param.own_name == PART and not is_lora(param.name):
            return f"{PART} (muon_patterns opts in)" if is_matrix(param.folded) else "magnitudes of a weight norm"
        if isinstance(param.owner, CONV_TYPES) and is_depthwise(param.owner):
            return "depthwise convolution"
        view = view_of_kernel(param) if param.is_kernel else view_of_experts(param)
        if view and any(min(shape) == 1 for shape in parse(view).shapes(param.shape)):
            return f"{'convolution' if param.is_kernel else 'expert'} of a single row or column"
        if param.own_name in STATE_SPACE:
            return "state space parameter"
        if param.own_name != "weight" and not is_lora(param.name) and TABLE.search(param.own_name):
            return "table of learned vectors"
        if is_router(param):
            return "router of a mixture of experts"
        return self._head(param) or not_hidden_matrices(param) or self._guess(param)

    def _head(self, param: ModelParameter) -> str | None:
        """Return why a weight is one of a head: by its place or name, or by its rows; None if it is not.

        What is called a head in a layer belongs to an attention.
        """
        if not param.in_layer:
            if is_outside_base_model(param):
                return "head: outside of the base model"
            # A head that attends pools tokens.
            if any(_HEAD.fullmatch(part) and not attends(module) for part, module in param.outward()):
                return "head"
        end, is_certain = self._end_of(param)
        if is_certain:
            return f"head: a row for each {end}"
        if is_few(param) and not param.in_layer and not is_lora(param.name):
            return "head: few rows"
        return None

    def _guess(self, param: ModelParameter) -> str | None:
        if self._end_of(param) != RESULT:
            return None
        return f"{GUESS}{'table or head' if is_bare(param) else 'head'}, no other weight reads its rows"

    def _end_of(self, param: ModelParameter) -> tuple[str, bool]:
        """Return what a weight has a row for, and whether that is certain; an empty text for a hidden matrix."""
        if param.name not in self._ends:
            is_head = not is_lora(param.name) and not QUERY.fullmatch(param.holder[0])
            self._ends[param.name] = self.widths.end_of(param) if is_head else NOTHING
        return self._ends[param.name]


def excluded_word(param: ModelParameter) -> str | None:
    """Return the excluded word in a parameter's name, within its layer or its model; None if there is none."""
    of_layer = False
    for part, module in param.outward():
        # The name of a model in another one says nothing about what is inside of it.
        if hasattr(module, "get_input_embeddings"):
            return None
        for excluded in EXCLUDED_NAMES:
            if excluded in part.lower():
                return excluded
        # Nor do names around a layer, except for that of the list of layers.
        if of_layer:
            return None
        of_layer = is_layer(part, module)
    return None


def is_few(param: ModelParameter) -> bool:
    """Return whether a weight has few rows, other than a query, key or value."""
    rows, columns = matrix_of(param) or (0, 0)
    return 0 < rows <= MOST and rows * FEW <= columns and not is_bare(param) and not QUERY.fullmatch(param.holder[0])


def _decays(param: ModelParameter) -> bool:
    """Apply transformers' rule: no decay in LayerNorm modules, and none for names with bias or norm."""
    return not (isinstance(param.owner, nn.LayerNorm) or _NO_DECAY.search(param.name.lower()))


def attends(module: nn.Module | None) -> bool:
    """Return whether a module holds an attention."""
    named = module.named_modules() if module is not None else ()
    return any(isinstance(m, nn.MultiheadAttention) or name.endswith(("k_proj", "key", "qkv")) for name, m in named)


def layout_at(param: ModelParameter) -> WeightLayout:
    """Return how a weight is stored."""
    return layout_of(param.shape, param.own_name, param.owner, *param.holder)


def is_depthwise(owner: Any) -> bool:
    """Return whether a convolution has one group per input channel."""
    return bool(owner.groups > 1 and owner.groups == owner.in_channels)


def view_of_kernel(param: ModelParameter) -> str:
    """Return the view of a convolution's kernel: one matrix per group of channels."""
    owner: Any = param.owner
    words = ["transposed"] if owner.transposed else []
    words.append("flat")
    if owner.groups > 1 and not is_depthwise(owner):
        words.append(f"rows {owner.groups}x{param.shape[0] // owner.groups}")
    return ", ".join(words)


def view_of_experts(param: ModelParameter) -> str:
    """Return the view of a LoRA factor that peft made for stacked experts: a matrix for each of them."""
    # peft's ParamWrapper, then its ModuleDict of factors (lora_A, lora_B), then the adapter's linear layer.
    layer: Any = param.steps[-3][1] if len(param.steps) > 2 else None
    if not is_lora(param.name) or type(layer).__name__ != "ParamWrapper" or layer.num_experts == 1:
        return ""
    if "lora_B" in param.name:
        return f"columns {param.shape[1] // layer.num_experts}*({'+'.join('1' * layer.num_experts)})"
    return f"rows {layer.num_experts}x{param.shape[0] // layer.num_experts}"


def not_hidden_matrices(param: ModelParameter) -> str | None:
    """Return why a shape is neither a matrix nor a known stack of matrices; None if it is one."""
    counts = expert_counts(param.owner)
    if param.is_kernel:
        return None
    if len(param.shape) == 3 and is_matrix(param.shape):
        layout = layout_at(param)
        if layout.stack or param.shape[0] in counts or "expert" in param.module_name.lower():
            return None
        return "three dims, not known as a stack of matrices (muon_patterns opts in)"
    if not is_matrix(param.shape):
        return "not a matrix"
    if param.own_name != "weight" and any(n > 1 and param.shape[0] % n == 0 for n in counts):
        return None if layout_at(param).below else "experts flattened into one matrix"
    return None


def is_matrix(shape: Sequence[int]) -> bool:
    """Return whether a shape is ``(m, n)`` or ``(B, m, n)`` without a dim of size 1."""
    return len(shape) in (2, 3) and min(shape) > 1


def norm_or_bias(param: ModelParameter) -> str | None:
    """Return "norm" or "bias" if a parameter is one of them, else None."""
    component = param.module_name.rpartition(".")[2]
    if "bias" in param.own_name or component.endswith("bias"):
        return "bias"
    # Batch and instance norms have running means. A layer of others may have them in addition to a matrix.
    if isinstance(param.owner, _NORM_TYPES) or (hasattr(param.owner, "running_mean") and len(param.shape) < 2):
        return "norm"
    if _NORM.search(component) or _NORM.search(param.own_name):
        return "norm"
    return None


def is_router(param: ModelParameter) -> bool:
    """Return whether a weight routes tokens to experts.

    A router has "router" in its name, is a gate of experts, or is a sibling of experts with a row per expert.
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
