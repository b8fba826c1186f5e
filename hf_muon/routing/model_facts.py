"""What a model says of itself: its embeddings, its base, and how many tokens, labels or other numbers it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from hf_muon.routing.parameters import EMBEDDING_TYPES, ModelParameter

# What modules and configs call the number of experts of a layer.
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts", "moe_num_experts")
# What configs call the sizes of vocabularies and of sets of labels.
_VOCABULARY = re.compile(r"(^|_)(vocab_size|num_labels|num_classes|num_embeddings|codebook_size|n_vocab)$")
# What they call the numbers that are predicted for a token, a frame or a step.
_TARGETS = re.compile(r"(^|_)(num_labels|num_classes|num_mel_bins|n_mels|mel_dim|state_dim|act_dim|action_dim)$")


def reported_embeddings(model: nn.Module) -> dict[int, str]:
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


def last_like_vocabulary(places: Sequence[ModelParameter]) -> nn.Parameter | None:
    """The last matrix, if it has the shape of the largest embedding: the output head of a model that reports none."""
    vocabularies = [place.shape for place in places if isinstance(place.owner, EMBEDDING_TYPES)]
    matrices = [place for place in places if len(place.shape) == 2 and isinstance(place.owner, nn.Linear)]
    if vocabularies and matrices and matrices[-1].shape == max(vocabularies):
        return matrices[-1].parameter
    return None


def outside_base_model(model: nn.Module) -> dict[int, int | None]:
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


def vocabulary_sizes(model: nn.Module) -> set[int]:
    """How many tokens or labels a configuration of the model, or of a part of it, knows."""
    return {number for name, number in _numbers(model) if _VOCABULARY.search(name)}


def target_sizes(model: nn.Module) -> set[int]:
    """How many numbers a configuration has predicted at once: of labels one more, too, for none of them."""
    sizes = {(name, number) for name, number in _numbers(model) if _TARGETS.search(name)}
    more = {number + 1 for name, number in sizes if name.endswith(("labels", "classes"))}
    # Several frames at once.
    factors = {number for name, number in _numbers(model) if name == "reduction_factor"}
    return {number for _, number in sizes} | more | {n * factor for _, n in sizes for factor in factors}


def _numbers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """The names and numbers, of at least two, in the configurations of a model, of its parts, and inside of those."""
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    seen: set[int] = set()
    while waiting:
        config = waiting.pop()
        if id(config) in seen:
            continue
        seen.add(id(config))
        values = {**getattr(config, "__dict__", {}), "num_labels": getattr(config, "num_labels", None)}
        yield from ((name, n) for name, n in values.items() if isinstance(n, int) and n > 1)
        waiting += [value for value in values.values() if hasattr(value, "model_type")]


def expert_counts(owner: Any) -> list[int]:
    """Return the numbers of experts that a module or a configuration names, the usual name first."""
    return [count for name in _EXPERT_COUNTS if isinstance(count := getattr(owner, name, None), int)]


def text_config_of(config: Any) -> Any:
    """Return the part of a configuration that describes the text model, or the configuration itself if it has none.

    If several parts describe text models, return that of the decoder.

    Args:
        config: of the model, as transformers' AutoConfig reads it.
    """
    if not hasattr(config, "get_text_config"):
        return config
    for options in ({}, {"decoder": True}):
        try:
            return config.get_text_config(**options)
        except ValueError:  # MusicGen has a text encoder and a decoder, and transformers does not choose
            continue
    return config
