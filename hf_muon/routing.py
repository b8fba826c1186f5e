"""Which parameter goes to Muon, which to AdamW, and the reason, in words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_muon.config import MuonConfig
from hf_muon.distributed.base import shape_of
from hf_muon.fused import Layout, heads_of, layout_of
from hf_muon.patterns import compile_patterns, examples
from hf_muon.places import CONV_TYPES, Place, folded, places_of
from hf_muon.views import parse

# Besides LoRA factors, which have an option of their own.
EXCLUDED_NAMES = ("embed", "wte", "wpe", "lm_head")

_NORM = re.compile(r"(^|_|layer|rms|group|batch)norm(_?\d+)?$", re.IGNORECASE)
_HEAD = re.compile(
    r"^(score|classifier|qa_outputs|logits_proj|summary|seq_relationship|output_projection"
    r"|((classification|cls|v|value|reward|regression)_)?head)$"
)
# What configs call the sizes of vocabularies and of sets of labels.
_VOCABULARY = re.compile(r"(^|_)(vocab_size|num_labels|num_classes|num_embeddings|codebook_size|n_vocab)$")
_GATE = re.compile(r"^(.*_)?(gate|gating)$", re.IGNORECASE)
_STATE_SPACE = ("A_log", "D", "dt_bias")
# Names of learned vectors that stand in a table, where the parameter is not a module's `weight`.
_TABLE = re.compile(r"(^|_)(pos|position|positions|latents?|query|queries|tokens?|scale|table)(_|$)", re.IGNORECASE)
# peft's other factors of weights.
_ADAPTER = re.compile(r"(^|\.)(hada|lokr|oft|boft|hra|vera|ia3|loha|fourierft|randlora)_", re.IGNORECASE)
_LORA = re.compile(r"(^|[._])lora", re.IGNORECASE)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_experts", "moe_num_experts", "n_routed_experts")
_NORM_TYPES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_TRANSPOSED_CONV_TYPES = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDING_TYPES = (nn.Embedding, nn.EmbeddingBag)

# The names without decay in transformers' Trainer.get_decay_parameter_names.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


@dataclass(frozen=True)
class Route:
    """Where one parameter goes.

    Attributes:
        name: its name, without the prefixes of wrappers (DDP, torch.compile, activation checkpointing).
        parameter: the parameter itself.
        use_muon: Muon, or AdamW.
        decay: whether weight decay applies.
        reason: why, in words.
        view: how Muon sees it as matrices, in the words of :mod:`hf_muon.views`; empty for as it is stored.
    """

    name: str
    parameter: nn.Parameter
    use_muon: bool
    decay: bool
    reason: str
    view: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.parameter)


def is_lora(name: str) -> bool:
    """Whether a parameter is one of LoRA's factors, by its name."""
    return _LORA.search(name) is not None


def route_parameters(model: nn.Module, config: MuonConfig | None = None, **options: Any) -> list[Route]:
    """Decide for every trainable parameter, in the model's order; tied parameters once.

    The first rule that applies decides: the user's patterns, `optim_target_modules`, shape, excluded names, and then
    what the model says of itself: its input and output embeddings, the types of its modules, routers beside experts,
    heads outside the base model.

    Args:
        model: any module.
        config: the options; `muon_patterns`, `adamw_patterns`, `optim_target_modules`, `lora`, `split_fused` and
            `per_head` matter here.
        **options: options that replace those of `config`.

    Raises:
        ValueError: a pattern that matches nothing, or an option that is not valid.
    """
    config = (config or MuonConfig()).replace(options)
    places = places_of(model)
    rules = _Rules(model, config, places)
    return [
        Route(place.name, place.parameter, *rules.decide(place)) for place in places if place.parameter.requires_grad
    ]


class _Rules:
    """The rules, with what they need to know of the model found once."""

    def __init__(self, model: nn.Module, config: MuonConfig, places: Sequence[Place]) -> None:
        self.config = config
        self.muon_patterns = compile_patterns(config.muon_patterns)
        self.adamw_patterns = compile_patterns(config.adamw_patterns)
        self._check_patterns(places)
        self.embeddings = _reported_embeddings(model)
        reported = "output embeddings" in self.embeddings.values()
        self.unreported_head = None if reported else _last_like_vocabulary(places)
        self.heads = _outside_base_model(model)
        self.vocabularies = _vocabulary_sizes(model)
        # What something takes in is a hidden size, and no vocabulary's, unless it is that large.
        linear = [p for p in places if isinstance(p.owner, nn.Linear) and len(p.shape) == 2 and not is_lora(p.name)]
        self.inputs = {place.shape[1] for place in linear}

    def _check_patterns(self, places: Sequence[Place]) -> None:
        names = [place.name for place in places]
        for option, patterns in (("muon_patterns", self.muon_patterns), ("adamw_patterns", self.adamw_patterns)):
            for pattern in patterns:
                found = [place for place in places if pattern.search(place.name)]
                if not found:
                    raise ValueError(
                        f"{option}: {pattern.pattern!r} matches no parameter. Names look like {examples(names)}"
                    )
                if not any(place.parameter.requires_grad for place in found):
                    raise ValueError(
                        f"{option}: {pattern.pattern!r} matches nothing that is trained, only "
                        f"{examples([place.name for place in found])}"
                    )
                if option == "muon_patterns" and not any(_is_matrix(place.folded) for place in found):
                    raise ValueError(
                        f"muon_patterns: {pattern.pattern!r} matches no matrix, only "
                        f"{examples([p.name for p in found])}"
                    )
        if self.config.lora == "muon" and not any(is_lora(p.name) and p.parameter.requires_grad for p in places):
            raise ValueError("lora=muon: no LoRA factor is trained. Remove the option, or check the peft configuration")
        targets = self.config.optim_target_modules
        if targets is not None and not any(_is_target(targets, place) for place in places):
            raise ValueError(
                f"optim_target_modules={targets!r} matches no module. Names look like "
                f"{examples([place.module_name for place in places])}"
            )

    def decide(self, place: Place) -> tuple[bool, bool, str, str]:
        """(use_muon, decay, reason, view)"""
        against = self._reason_against(place)
        if against is not None:
            return False, _decays(place), against, ""
        if is_lora(place.name):
            view, what = "", "LoRA factor, lora=muon"
        elif place.is_kernel:
            view, what = _view_of_kernel(place), "convolution"
        else:
            view, what = self._view(place)
        for pattern in self.muon_patterns:
            if pattern.search(place.name):
                what = f"muon_patterns {pattern.pattern!r}"
                break
        return True, True, what, view

    def _view(self, place: Place) -> tuple[str, str]:
        """How a weight is seen as matrices, and what it is, in words."""
        layout = _layout(place)
        what = "hidden matrix" if len(place.shape) == 2 or layout.flat else "stack of hidden matrices"
        words = [word for word, holds in (("transposed", layout.transposed), ("flat", layout.flat)) if holds]
        leaf, parent = place.home
        fused = layout.fused
        if fused is not None:
            what += f": {fused.names}"
        elif self.config.per_head and not layout.transposed and place.own_name == "weight" and len(place.shape) == 2:
            fused = heads_of(leaf, parent, place.shape[0])
        if layout.experts:
            what = "experts, one below the other"
            words.append(f"rows {layout.experts}x{place.shape[0] // layout.experts}")
        elif fused is not None and self.config.split_fused:
            cut = f"{'columns' if layout.transposed else 'rows'} {fused.sizes(self.config.per_head)}"
            if all(min(shape) > 1 for shape in parse(cut).shapes(place.shape)):
                words.append(cut)
        return ", ".join(words), what

    def _reason_against(self, place: Place) -> str | None:
        for pattern in self.adamw_patterns:
            if pattern.search(place.name):
                return f"adamw_patterns {pattern.pattern!r}"
        if len(place.shape) < 2:
            return _norm_or_bias(place) or "vector"
        if len(place.shape) == 2 and not _is_matrix(place.shape):
            return "single row or column"
        if _is_matrix(place.folded) and any(pattern.search(place.name) for pattern in self.muon_patterns):
            return None
        targets = self.config.optim_target_modules
        if targets is not None and not _is_target(targets, place):
            return "outside optim_target_modules"
        return self._named(place) or self._structural(place)

    def _named(self, place: Place) -> str | None:
        if is_lora(place.name) and self.config.lora != "muon":
            return "name contains 'lora' (lora=muon opts in)"
        if excluded := _excluded(place):
            return f"name contains {excluded!r}"
        if _ADAPTER.search(place.name):
            return "adapter factor (muon_patterns opts in)"
        return None

    def _structural(self, place: Place) -> str | None:
        if id(place.parameter) in self.embeddings:
            return f"the model's {self.embeddings[id(place.parameter)]}"
        if isinstance(place.owner, _EMBEDDING_TYPES):
            return "embedding"
        if reason := _norm_or_bias(place):
            return reason
        if isinstance(place.owner, CONV_TYPES) and _is_depthwise(place.owner):
            return "depthwise convolution"
        if place.is_kernel and any(min(shape) == 1 for shape in parse(_view_of_kernel(place)).shapes(place.shape)):
            return "convolution of a single row or column"
        if place.own_name in _STATE_SPACE:
            return "state space parameter"
        if place.own_name != "weight" and not is_lora(place.name) and _TABLE.search(place.own_name):
            return "table of learned vectors"
        if _is_router(place):
            return "router of a mixture of experts"
        if self._is_head(place):
            return "head"
        if place.parameter is self.unreported_head:
            return "output head: the last matrix, of the vocabulary's shape"
        return _not_hidden_matrices(place)

    def _is_head(self, place: Place) -> bool:
        """Outside the base model, by name or with a row per label; or anywhere, with a row for each token or label."""
        rows = place.shape[0]
        if place.home[0] == "final_layer" and isinstance(place.owner, nn.Linear):
            return True
        layered = any(part.isdigit() for part, _ in place.steps)
        per_token = isinstance(place.owner, nn.Linear) and rows in self.vocabularies
        per_token = per_token and (rows not in self.inputs or rows > 8 * place.shape[-1])
        if per_token and not layered:
            return True
        if id(place.parameter) not in self.heads:
            return False
        labels = self.heads[id(place.parameter)]
        for depth, (part, module) in enumerate(place.outward()):
            if not (_HEAD.match(part) or (labels is not None and part.endswith("_head"))):
                continue
            # What is called so inside of a layer is a part of its attention; one that attends is a pooling of tokens.
            inside = any(outer.isdigit() for outer, _ in place.steps[: -1 - depth])
            if per_token or not (inside or _attends(module)):
                return True
        return len(place.shape) == 2 and rows == labels


def _attends(module: nn.Module | None) -> bool:
    if module is None:
        return False
    named = module.named_modules()
    return any(isinstance(m, nn.MultiheadAttention) or name.endswith(("k_proj", "key")) for name, m in named)


def _layout(place: Place) -> Layout:
    return layout_of(place.shape, place.own_name, place.owner, *place.home)


def _excluded(place: Place) -> str | None:
    """The excluded word that its name contains, unless outside of the layer, or of the model, that this is in."""
    for part, module in place.outward():
        if hasattr(module, "get_input_embeddings"):
            return None
        for excluded in EXCLUDED_NAMES:
            if excluded in part.lower():
                return excluded
        if part.isdigit() and module is not None and sum(len(shape_of(p)) > 1 for p in module.parameters()) > 1:
            return None
    return None


def _is_depthwise(owner: Any) -> bool:
    return bool(owner.groups > 1 and owner.groups == owner.in_channels)


def _view_of_kernel(place: Place) -> str:
    """A matrix for each group of channels."""
    owner: Any = place.owner
    words = ["transposed"] if isinstance(owner, _TRANSPOSED_CONV_TYPES) else []
    words.append("flat")
    if owner.groups > 1 and not _is_depthwise(owner):
        words.append(f"rows {owner.groups}x{place.shape[0] // owner.groups}")
    return ", ".join(words)


def _not_hidden_matrices(place: Place) -> str | None:
    """Shapes that are no matrix, and stacks that are none, or none that can be told apart."""
    counts = [count for name in _EXPERT_COUNTS if isinstance(count := getattr(place.owner, name, None), int)]
    if place.is_kernel:
        return None
    if len(place.shape) == 3 and _is_matrix(place.shape):
        layout = _layout(place)
        if layout.stack or layout.flat or place.shape[0] in counts or "expert" in place.module_name.lower():
            return None
        return "three dims, not known as a stack of matrices (muon_patterns opts in)"
    if not _is_matrix(place.shape):
        return "not a matrix"
    if place.own_name != "weight" and any(n > 1 and place.shape[0] % n == 0 for n in counts):
        if _layout(place).experts:
            return None
        return "experts flattened into one matrix"
    return None


def _is_matrix(shape: Sequence[int]) -> bool:
    """``(m, n)``, or a stack ``(B, m, n)`` of at least two; neither with a single row or column."""
    if len(shape) == 2:
        return min(shape) > 1
    return len(shape) == 3 and min(shape) > 1


def _decays(place: Place) -> bool:
    """transformers' rule: no decay in LayerNorm modules and where the name says bias or norm."""
    return not (isinstance(place.owner, nn.LayerNorm) or _NO_DECAY.search(place.name.lower()))


def _norm_or_bias(place: Place) -> str | None:
    component = place.module_name.rpartition(".")[2]
    if "bias" in place.own_name or component.endswith("bias"):
        return "bias"
    if isinstance(place.owner, _NORM_TYPES) or _NORM.search(component) or _NORM.search(place.own_name):
        return "norm"
    return None


def _is_router(place: Place) -> bool:
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


def _reported_embeddings(model: nn.Module) -> dict[int, str]:
    """Parameters of the modules that the model, or a model in it, names as its embeddings."""
    found: dict[int, str] = {}
    for module in model.modules():
        for role in ("output embeddings", "input embeddings"):
            try:
                embeddings = getattr(module, f"get_{role.replace(' ', '_')}")()
            except (AttributeError, NotImplementedError, TypeError):
                continue
            if isinstance(embeddings, nn.Module):
                found.update((id(parameter), role) for parameter in embeddings.parameters())
    return found


def _last_like_vocabulary(places: Sequence[Place]) -> nn.Parameter | None:
    """The last matrix, if it has the shape of the largest embedding: the output head of a model that reports none."""
    vocabularies = [place.shape for place in places if isinstance(place.owner, _EMBEDDING_TYPES)]
    matrices = [place for place in places if len(place.shape) == 2 and isinstance(place.owner, nn.Linear)]
    if vocabularies and matrices and matrices[-1].shape == max(vocabularies):
        return matrices[-1].parameter
    return None


def _outside_base_model(model: nn.Module) -> dict[int, int | None]:
    """Parameters that do not belong to the base model, with the number of labels where the model has one.

    transformers names a model's base in `base_model_prefix`; what stands beside it are heads. A model without a base
    may have heads anywhere.
    """
    inside: set[int] = set()
    labels: int | None = None
    for module in model.modules():
        # Of the class and its own children: peft's wrappers answer for the model inside.
        base = module._modules.get(getattr(type(module), "base_model_prefix", "") or "")
        if base is not None:
            inside.update(id(parameter) for parameter in base.parameters())
            labels = getattr(getattr(module, "config", None), "num_labels", labels)
    return {id(p): labels if inside else None for p in model.parameters() if id(p) not in inside}


def _vocabulary_sizes(model: nn.Module) -> set[int]:
    """How many tokens or labels a configuration of the model, or of a part of it, knows."""
    found: set[int] = set()
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    seen: set[int] = set()
    while waiting:
        config = waiting.pop()
        if id(config) in seen:
            continue
        seen.add(id(config))
        values = {**getattr(config, "__dict__", {}), "num_labels": getattr(config, "num_labels", None)}
        found.update(n for name, n in values.items() if _VOCABULARY.search(name) and isinstance(n, int) and n > 1)
        waiting += [value for value in values.values() if hasattr(value, "model_type")]
    return found


def _is_target(targets: str | Sequence[str], place: Place) -> bool:
    """transformers' meaning of `optim_target_modules`: one regular expression, or a list of names and expressions."""
    module = place.module_name
    if isinstance(targets, str):
        if targets.replace("_", "-") == "all-linear":
            return isinstance(place.owner, nn.Linear)
        return re.fullmatch(targets, module) is not None
    return any(target in module or re.fullmatch(target, module) for target in targets)


def table(routes: Sequence[Route]) -> str:
    """The routes as text: layers folded into one row each, the totals below."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for route in routes:
        reason = f"{route.reason} [{route.view}]" if route.view else route.reason
        key = (
            folded(route.name),
            "x".join(map(str, route.shape)) or "scalar",
            "muon" if route.use_muon else "adamw",
            reason,
        )
        rows.setdefault(key, []).append(math.prod(route.shape))
    cells = [("parameter", "shape", "count", "optimizer", "reason")]
    cells += [(name, shape, str(len(sizes)), to, reason) for (name, shape, to, reason), sizes in rows.items()]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in cells]
    lines.insert(1, "  ".join("-" * w for w in (*widths, max(len(row[4]) for row in cells))))
    return "\n".join([*lines, *totals(routes)])


def frozen(model: nn.Module) -> list[str]:
    """A line on the parameters that are not trained, if there are some."""
    found = [p for p in model.parameters() if not p.requires_grad]
    if not found:
        return []
    quantized = [p for p in found if p.dtype.itemsize == 1 or hasattr(p, "quant_state")]
    kinds = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in quantized}))
    return [
        f"frozen: {len(found)} parameters" + (f", {len(quantized)} of them quantized ({kinds})" if quantized else "")
    ]


def totals(routes: Sequence[Route]) -> list[str]:
    """Two lines: how many parameters and weights go to Muon and to AdamW."""
    weights = sum(math.prod(route.shape) for route in routes) or 1
    lines = []
    for name, use_muon in (("muon", True), ("adamw", False)):
        chosen = [math.prod(route.shape) for route in routes if route.use_muon == use_muon]
        lines.append(f"{name}: {len(chosen)} parameters, {sum(chosen):,} weights ({sum(chosen) / weights:.1%})")
    return lines
