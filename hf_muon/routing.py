"""Which parameter goes to Muon, which to AdamW, and the reason, in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_muon.config import MuonConfig
from hf_muon.distributed.base import shape_of

# Besides LoRA factors, which have an option of their own.
EXCLUDED_NAMES = ("embed", "wte", "wpe", "lm_head")

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_NORM = re.compile(r"(^|_|layer|rms|group|batch)norm(_?\d+)?$", re.IGNORECASE)
_HEAD = re.compile(
    r"^(score|classifier|qa_outputs|logits_proj|summary|seq_relationship|output_projection"
    r"|((classification|cls|v|value|reward|regression)_)?head)$"
)
_GATE = re.compile(r"^(.*_)?(gate|gating)$", re.IGNORECASE)
_STATE_SPACE = ("A_log", "D", "dt_bias")
# Names of learned vectors that stand in a table, where the parameter is not a module's `weight`.
_TABLE = re.compile(r"(^|_)(pos|position|positions|latents?|query|queries|tokens?|scale|table)(_|$)", re.IGNORECASE)
# peft's other factors of weights.
_ADAPTER = re.compile(r"(^|\.)(hada|lokr|oft|boft|hra|vera|ia3|loha|fourierft|randlora)_", re.IGNORECASE)
_LORA = re.compile(r"(^|[._])lora", re.IGNORECASE)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_experts", "moe_num_experts", "n_routed_experts")
_NORM_TYPES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_WRAPPER_TYPES = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_CONV_TYPES = (nn.modules.conv._ConvNd,)
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
    """

    name: str
    parameter: nn.Parameter
    use_muon: bool
    decay: bool
    reason: str

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
        config: the options; `muon_patterns`, `adamw_patterns`, `optim_target_modules` and `lora` matter here.
        **options: options that replace those of `config`.

    Raises:
        ValueError: a pattern that matches nothing, or an option that is not valid.
    """
    config = (config or MuonConfig()).replace(options)
    places = _places(model)
    rules = _Rules(model, config, places)
    return [
        Route(place.name, place.parameter, *rules.decide(place)) for place in places if place.parameter.requires_grad
    ]


@dataclass(frozen=True)
class _Place:
    """A parameter, the module that holds it, and the modules around it from the inside out."""

    name: str
    parameter: nn.Parameter
    owner: nn.Module
    around: tuple[nn.Module, ...]

    @property
    def own_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def module_name(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.parameter)


def _places(model: nn.Module) -> list[_Place]:
    modules = dict(model.named_modules())
    places = []
    for full_name, parameter in model.named_parameters():
        parts = full_name.split(".")
        chain = [modules[".".join(parts[:i])] for i in range(len(parts))]  # from the model to the parameter's owner
        kept = [part for part, parent in zip(parts, chain, strict=True) if not _of_wrapper(part, parent)]
        places.append(_Place(".".join(kept), parameter, chain[-1], tuple(chain[-2::-1])))
    return places


def _of_wrapper(part: str, parent: nn.Module) -> bool:
    """Whether a component of a name was put there by a wrapper. `module` may be a model's own name, too."""
    return part in _WRAPPERS or (part == "module" and isinstance(parent, _WRAPPER_TYPES))


class _Rules:
    """The rules, with what they need to know of the model found once."""

    def __init__(self, model: nn.Module, config: MuonConfig, places: Sequence[_Place]) -> None:
        self.config = config
        self.muon_patterns = _compile(config.muon_patterns)
        self.adamw_patterns = _compile(config.adamw_patterns)
        self._check_patterns(places)
        self.embeddings = _reported_embeddings(model)
        reported = "output embeddings" in self.embeddings.values()
        self.unreported_head = None if reported else _last_like_vocabulary(places)
        self.heads = _outside_base_model(model)

    def _check_patterns(self, places: Sequence[_Place]) -> None:
        names = [place.name for place in places]
        for option, patterns in (("muon_patterns", self.muon_patterns), ("adamw_patterns", self.adamw_patterns)):
            for pattern in patterns:
                found = [place for place in places if pattern.search(place.name)]
                if not found:
                    raise ValueError(
                        f"{option}: {pattern.pattern!r} matches no parameter. Names look like {_examples(names)}"
                    )
                if not any(place.parameter.requires_grad for place in found):
                    raise ValueError(
                        f"{option}: {pattern.pattern!r} matches nothing that is trained, only "
                        f"{_examples([place.name for place in found])}"
                    )
                if option == "muon_patterns" and not any(_is_matrix(place.shape) for place in found):
                    raise ValueError(
                        f"muon_patterns: {pattern.pattern!r} matches no matrix, only "
                        f"{_examples([p.name for p in found])}"
                    )
        if self.config.lora == "muon" and not any(is_lora(p.name) and p.parameter.requires_grad for p in places):
            raise ValueError("lora=muon: no LoRA factor is trained. Remove the option, or check the peft configuration")
        targets = self.config.optim_target_modules
        if targets is not None and not any(_is_target(targets, place) for place in places):
            raise ValueError(
                f"optim_target_modules={targets!r} matches no module. Names look like "
                f"{_examples([place.module_name for place in places])}"
            )

    def decide(self, place: _Place) -> tuple[bool, bool, str]:
        """(use_muon, decay, reason)"""
        against = self._reason_against(place)
        if against is None:
            return True, True, self._reason_for(place)
        return False, _decays(place), against

    def _reason_for(self, place: _Place) -> str:
        for pattern in self.muon_patterns:
            if pattern.search(place.name):
                return f"muon_patterns {pattern.pattern!r}"
        if is_lora(place.name):
            return "LoRA factor, lora=muon"
        return "hidden matrix" if len(place.shape) == 2 else "stack of hidden matrices"

    def _reason_against(self, place: _Place) -> str | None:
        for pattern in self.adamw_patterns:
            if pattern.search(place.name):
                return f"adamw_patterns {pattern.pattern!r}"
        if len(place.shape) < 2:
            return _norm_or_bias(place) or "vector"
        if len(place.shape) == 2 and not _is_matrix(place.shape):
            return "single row or column"
        if _is_matrix(place.shape) and any(pattern.search(place.name) for pattern in self.muon_patterns):
            return None
        targets = self.config.optim_target_modules
        if targets is not None and not _is_target(targets, place):
            return "outside optim_target_modules"
        return self._named(place) or self._structural(place)

    def _named(self, place: _Place) -> str | None:
        if is_lora(place.name) and self.config.lora != "muon":
            return "name contains 'lora' (lora=muon opts in)"
        for excluded in EXCLUDED_NAMES:
            if excluded in place.name.lower():
                return f"name contains {excluded!r}"
        if _ADAPTER.search(place.name):
            return "adapter factor (muon_patterns opts in)"
        return None

    def _structural(self, place: _Place) -> str | None:
        if id(place.parameter) in self.embeddings:
            return f"the model's {self.embeddings[id(place.parameter)]}"
        if isinstance(place.owner, _EMBEDDING_TYPES):
            return "embedding"
        if reason := _norm_or_bias(place):
            return reason
        if isinstance(place.owner, _CONV_TYPES):
            groups = place.owner.groups
            depthwise = groups > 1 and groups == place.owner.in_channels
            return "depthwise convolution" if depthwise else "convolution"
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

    def _is_head(self, place: _Place) -> bool:
        """Outside the base model, by name or with a row per label."""
        if id(place.parameter) not in self.heads:
            return False
        labels = self.heads[id(place.parameter)]
        parts = place.module_name.split(".")
        if any(_HEAD.match(part) or (labels is not None and part.endswith("_head")) for part in parts):
            return True
        return len(place.shape) == 2 and place.shape[0] == labels


def _not_hidden_matrices(place: _Place) -> str | None:
    """Shapes that are no matrix, and stacks that are none, or none that can be told apart."""
    counts = [count for name in _EXPERT_COUNTS if isinstance(count := getattr(place.owner, name, None), int)]
    if len(place.shape) == 3 and _is_matrix(place.shape):
        if place.shape[0] in counts or "expert" in place.module_name.lower():
            return None
        return "three dims, not known as a stack of matrices (muon_patterns opts in)"
    if not _is_matrix(place.shape):
        return "not a matrix"
    if place.own_name != "weight" and any(n > 1 and place.shape[0] % n == 0 for n in counts):
        return "experts flattened into one matrix"
    return None


def _is_matrix(shape: Sequence[int]) -> bool:
    """``(m, n)``, or a stack ``(B, m, n)`` of at least two; neither with a single row or column."""
    if len(shape) == 2:
        return min(shape) > 1
    return len(shape) == 3 and min(shape) > 1


def _decays(place: _Place) -> bool:
    """transformers' rule: no decay in LayerNorm modules and where the name says bias or norm."""
    return not (isinstance(place.owner, nn.LayerNorm) or _NO_DECAY.search(place.name.lower()))


def _norm_or_bias(place: _Place) -> str | None:
    component = place.module_name.rpartition(".")[2]
    if "bias" in place.own_name or component.endswith("bias"):
        return "bias"
    if isinstance(place.owner, _NORM_TYPES) or _NORM.search(component) or _NORM.search(place.own_name):
        return "norm"
    return None


def _is_router(place: _Place) -> bool:
    """Something called router; a gate beside experts, or inside one; a matrix with a row per expert beside them."""
    parts = place.module_name.split(".")
    if any("router" in part.lower() for part in parts):
        return True
    # `around` starts at the parent of the owner: the module in which the last component was looked up.
    for depth, (part, parent) in enumerate(zip(reversed(parts), place.around, strict=False)):
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


def _last_like_vocabulary(places: Sequence[_Place]) -> nn.Parameter | None:
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


def _is_target(targets: str | Sequence[str], place: _Place) -> bool:
    """transformers' meaning of `optim_target_modules`: one regular expression, or a list of names and expressions."""
    module = place.module_name
    if isinstance(targets, str):
        if targets.replace("_", "-") == "all-linear":
            return isinstance(place.owner, nn.Linear)
        return re.fullmatch(targets, module) is not None
    return any(target in module or re.fullmatch(target, module) for target in targets)


def _compile(patterns: str | Sequence[str] | None) -> list[re.Pattern[str]]:
    if patterns is None:
        return []
    pieces = list(patterns)
    if isinstance(patterns, str):
        flags = re.match(r"(\(\?[aiLmsux]+\))?", patterns)
        prefix = flags[0] if flags else ""
        pieces = [piece and prefix + piece for piece in _alternatives(patterns[len(prefix) :])]
    compiled = []
    for piece in pieces:
        try:
            compiled.append(re.compile(piece))
        except re.error as error:
            raise ValueError(f"{piece!r} is not a regular expression: {error}") from None
        if not piece:
            raise ValueError(f"{patterns!r} has an empty alternative, which would match every parameter")
    return compiled


def _alternatives(pattern: str) -> list[str]:
    """Split at each ``|`` outside of brackets, so that each alternative is known to match something."""
    pieces, depth, in_class, current = [], 0, False, ""
    escaped = False
    for character in pattern:
        if escaped or character == "\\":
            escaped = not escaped
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            pieces.append(current)
            current = ""
            continue
        current += character
    return [*pieces, current]


def _examples(names: Iterable[str], limit: int = 4) -> str:
    distinct = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))
    step = max(1, len(distinct) // limit)
    return ", ".join(distinct[::step][:limit]) or "nothing"


def table(routes: Sequence[Route]) -> str:
    """The routes as text: layers folded into one row each, the totals below."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for route in routes:
        folded = re.sub(r"(?<=\.)\d+(?=\.)", "*", route.name)
        key = (folded, "x".join(map(str, route.shape)) or "scalar", "muon" if route.use_muon else "adamw", route.reason)
        rows.setdefault(key, []).append(math.prod(route.shape))
    cells = [("parameter", "shape", "count", "optimizer", "reason")]
    cells += [(name, shape, str(len(sizes)), to, reason) for (name, shape, to, reason), sizes in rows.items()]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in cells]
    lines.insert(1, "  ".join("-" * w for w in (*widths, max(len(row[4]) for row in cells))))
    return "\n".join([*lines, *totals(routes)])


def totals(routes: Sequence[Route]) -> list[str]:
    """Two lines: how many parameters and weights go to Muon and to AdamW."""
    weights = sum(math.prod(route.shape) for route in routes) or 1
    lines = []
    for name, use_muon in (("muon", True), ("adamw", False)):
        chosen = [math.prod(route.shape) for route in routes if route.use_muon == use_muon]
        lines.append(f"{name}: {len(chosen)} parameters, {sum(chosen):,} weights ({sum(chosen) / weights:.1%})")
    return lines
