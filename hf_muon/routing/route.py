"""Which parameter goes to Muon, which to AdamW, and the reason, in words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_muon.config import MuonConfig
from hf_muon.options.patterns import compile_patterns
from hf_muon.routing.fused import heads_of
from hf_muon.routing.kinds import (
    STATE_SPACE,
    TABLE,
    attends,
    is_depthwise,
    is_matrix,
    is_router,
    layout_at,
    norm_or_bias,
    not_hidden_matrices,
    view_of_kernel,
)
from hf_muon.routing.model_facts import (
    last_like_vocabulary,
    outside_base_model,
    reported_embeddings,
    target_sizes,
    vocabulary_sizes,
)
from hf_muon.routing.outputs import MANY, Outputs, widths_of
from hf_muon.routing.parameters import (
    CONV_TYPES,
    EMBEDDING_TYPES,
    MAGNITUDE,
    ModelParameter,
    examples,
    folded,
    matrices_of,
    parameters_of,
)
from hf_muon.storage.tensors import shape_of
from hf_muon.storage.views import parse

# Besides LoRA factors, which have an option of their own.
EXCLUDED_NAMES = ("embed", "wte", "wpe", "lm_head")

_HEAD = re.compile(
    r"^(score|classifier|qa_outputs|logits_proj|summary|seq_relationship|output_projection"
    r"|((classification|cls|v|value|reward|regression)_)?head)$"
)
# peft's other factors of weights.
_ADAPTER = re.compile(r"(^|\.)(hada|lokr|oft|boft|hra|vera|ia3|loha|fourierft|randlora)_", re.IGNORECASE)
_LORA = re.compile(r"(^|[._])lora", re.IGNORECASE)

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
        view: how Muon sees it as matrices, in the words of :mod:`hf_muon.storage.views`; empty for as it is stored.
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
    places = parameters_of(model)
    rules = _Rules(model, config, places)
    return [
        Route(place.name, place.parameter, *rules.decide(place)) for place in places if place.parameter.requires_grad
    ]


class _Rules:
    """The rules, with what they need to know of the model found once."""

    def __init__(self, model: nn.Module, config: MuonConfig, places: Sequence[ModelParameter]) -> None:
        self.config = config
        self.muon_patterns = compile_patterns(config.muon_patterns)
        self.adamw_patterns = compile_patterns(config.adamw_patterns)
        self._check_patterns(places)
        self.embeddings = reported_embeddings(model)
        reported = "output embeddings" in self.embeddings.values()
        self.unreported_head = None if reported else last_like_vocabulary(places)
        self.heads = outside_base_model(model)
        self.vocabularies = vocabulary_sizes(model)
        own = [place for place in places if not is_lora(place.name)]
        self.outputs = Outputs(model, own, self.vocabularies, target_sizes(model))
        # What something takes in is a hidden size, and no vocabulary's, unless it is that large.
        self.inputs = {widths.reads for place in own if (widths := widths_of(place.owner)) is not None}

    def _check_patterns(self, places: Sequence[ModelParameter]) -> None:
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
                if option == "muon_patterns" and not any(is_matrix(place.folded) for place in found):
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

    def decide(self, place: ModelParameter) -> tuple[bool, bool, str, str]:
        """(use_muon, decay, reason, view)"""
        against = self._reason_against(place)
        if against is not None:
            return False, _decays(place), against, ""
        if is_lora(place.name):
            view, what = "", "LoRA factor, lora=muon"
        else:
            view, what = self._view_of_kernel(place) if place.is_kernel else self._view(place)
        for pattern in self.muon_patterns:
            if pattern.search(place.name):
                what = f"muon_patterns {pattern.pattern!r}"
                break
        return True, True, what, view

    def _view_of_kernel(self, place: ModelParameter) -> tuple[str, str]:
        view, fused = view_of_kernel(place), layout_at(place).fused
        if fused is None or view != "flat":
            return view, "convolution"
        return f"{view}, rows {fused.sizes(False)}" if self.config.split_fused else view, f"convolution: {fused.names}"

    def _view(self, place: ModelParameter) -> tuple[str, str]:
        """How a weight is seen as matrices, and what it is, in words."""
        layout = layout_at(place)
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

    def _reason_against(self, place: ModelParameter) -> str | None:
        for pattern in self.adamw_patterns:
            if pattern.search(place.name):
                return f"adamw_patterns {pattern.pattern!r}"
        if len(place.shape) < 2:
            return norm_or_bias(place) or "vector"
        if len(place.shape) == 2 and not is_matrix(place.shape):
            return "single row or column"
        if is_matrix(place.folded) and any(pattern.search(place.name) for pattern in self.muon_patterns):
            return None
        targets = self.config.optim_target_modules
        if targets is not None and not _is_target(targets, place):
            return "outside optim_target_modules"
        return self._named(place) or self._structural(place)

    def _named(self, place: ModelParameter) -> str | None:
        if is_lora(place.name) and self.config.lora != "muon":
            return "name contains 'lora' (lora=muon opts in)"
        excluded = self._excluded(place)
        proven = id(place.parameter) not in self.embeddings and self.outputs.is_projection(place)
        if excluded and (excluded == "lm_head" or not proven):
            return f"name contains {excluded!r}"
        if _ADAPTER.search(place.name):
            return "adapter factor (muon_patterns opts in)"
        return None

    def _excluded(self, place: ModelParameter) -> str | None:
        """The excluded word that its name contains, unless outside of the layer, or of the model, that this is in."""
        for part, module in place.outward():
            if hasattr(module, "get_input_embeddings"):
                return None
            for excluded in EXCLUDED_NAMES:
                if excluded in part.lower():
                    return excluded
            if part.isdigit() and module is not None and matrices_of(module) > 1 and self.outputs.is_layer(module):
                return None
        return None

    def _structural(self, place: ModelParameter) -> str | None:
        if id(place.parameter) in self.embeddings:
            return f"the model's {self.embeddings[id(place.parameter)]}"
        if isinstance(place.owner, EMBEDDING_TYPES):
            return "embedding"
        if reason := norm_or_bias(place):
            return reason
        if place.own_name == MAGNITUDE:
            return "magnitudes of a weight norm"
        if isinstance(place.owner, CONV_TYPES) and is_depthwise(place.owner):
            return "depthwise convolution"
        if place.is_kernel and any(min(shape) == 1 for shape in parse(view_of_kernel(place)).shapes(place.shape)):
            return "convolution of a single row or column"
        if place.own_name in STATE_SPACE:
            return "state space parameter"
        if place.own_name != "weight" and not is_lora(place.name) and TABLE.search(place.own_name):
            return "table of learned vectors"
        if is_router(place):
            return "router of a mixture of experts"
        if self._is_table(place):
            return "table: a column for each token"
        if self._is_head(place):
            return "head"
        if not is_lora(place.name) and self.outputs.is_output(place):
            return "output"
        if place.parameter is self.unreported_head:
            return "output head: the last matrix, of the vocabulary's shape"
        return not_hidden_matrices(place)

    def _is_table(self, place: ModelParameter) -> bool:
        """Whether it reads as many numbers as there are tokens, and is no layer of its own: it holds their vectors."""
        widths = widths_of(place.owner)
        if widths is None or any(part.isdigit() for part, _ in place.steps):
            return False
        return widths.reads in self.vocabularies and widths.reads > MANY * widths.puts_out

    def _is_head(self, place: ModelParameter) -> bool:
        """Outside the base model, by name or with a row per label; or anywhere, with a row for each token or label."""
        rows = place.shape[0]
        if place.home[0] == "final_layer" and isinstance(place.owner, nn.Linear):
            return not self.outputs.is_projection(place)
        layered = any(part.isdigit() for part, _ in place.steps)
        linear = isinstance(place.owner, nn.Linear) or (place.is_kernel and place.folded == place.shape[:2])
        per_token = linear and rows in self.vocabularies
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
            if per_token or not (inside or attends(module)):
                return True
        return len(place.shape) == 2 and rows == labels


def _decays(place: ModelParameter) -> bool:
    """transformers' rule: no decay in LayerNorm modules and where the name says bias or norm."""
    return not (isinstance(place.owner, nn.LayerNorm) or _NO_DECAY.search(place.name.lower()))


def _is_target(targets: str | Sequence[str], place: ModelParameter) -> bool:
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
