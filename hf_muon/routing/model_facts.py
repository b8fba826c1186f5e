"""Read facts from a model and its configuration: embeddings, the base model, vocabulary sizes, experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from hf_muon.routing.parameters import EMBEDDING_TYPES, ModelParameter

# Names of the number of experts of a layer, in modules and configs.
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts", "moe_num_experts")
# Names of the sizes of vocabularies and of sets of labels, in configs.
_VOCABULARY = re.compile(r"(^|_)(vocab_size|num_labels|num_classes|num_embeddings|codebook_size|n_vocab)$")
# Names of the number of outputs for a token, a frame or a step, in configs.
_TARGETS = re.compile(r"(^|_)(num_labels|num_classes|num_mel_bins|n_mels|mel_dim|state_dim|act_dim|action_dim)$")


def reported_embeddings(model: nn.Module) -> dict[int, str]:
    """Return ids of the parameters that a model, or a model inside it, reports as embeddings, each with its role."""
    roles: dict[int, str] = {}
    for module in model.modules():
        for role in ("output embeddings", "input embeddings"):
            # transformers raises NotImplementedError for models without embeddings; others may have such a name for
            # something else, which takes arguments or is not a function.
            try:
                embeddings = getattr(module, f"get_{role.replace(' ', '_')}")()
            except (AttributeError, NotImplementedError, TypeError):
                continue
            if isinstance(embeddings, nn.Module):
                roles.update((id(parameter), role) for parameter in embeddings.parameters())
    return roles


def last_like_vocabulary(params: Sequence[ModelParameter]) -> nn.Parameter | None:
    """Return the last matrix if it has the shape of the largest embedding: the head of a model that reports no head."""
    vocabularies = [param.shape for param in params if isinstance(param.owner, EMBEDDING_TYPES)]
    matrices = [param for param in params if len(param.shape) == 2 and isinstance(param.owner, nn.Linear)]
    if vocabularies and matrices and matrices[-1].shape == max(vocabularies):
        return matrices[-1].parameter
    return None


def outside_base_model(model: nn.Module) -> dict[int, int | None]:
    """Return ids of the parameters outside the base model, each with the number of labels, if the model has one.

    transformers names the base model in `base_model_prefix`, and heads are outside of it. Without a base model, heads
    may be anywhere.
    """
    inside: set[int] = set()
    labels: int | None = None
    for module in model.modules():
        # Ask the class, and the module's own children: peft's wrappers forward attributes of the model inside.
        base = dict(module.named_children()).get(getattr(type(module), "base_model_prefix", "") or "")
        if base is not None:
            inside.update(id(parameter) for parameter in base.parameters())
            labels = getattr(getattr(module, "config", None), "num_labels", labels)
    return {id(p): labels if inside else None for p in model.parameters() if id(p) not in inside}


def vocabulary_sizes(model: nn.Module) -> set[int]:
    """Return the numbers of tokens and labels in the configurations of a model and of its parts."""
    return {number for name, number in _numbers(model) if _VOCABULARY.search(name)}


def target_sizes(model: nn.Module) -> set[int]:
    """Return the numbers of outputs per position in the configurations; for labels also one more, for "no label"."""
    sizes = {(name, number) for name, number in _numbers(model) if _TARGETS.search(name)}
    more = {number + 1 for name, number in sizes if name.endswith(("labels", "classes"))}
    # Some models predict several frames at a time.
    factors = {number for name, number in _numbers(model) if name == "reduction_factor"}
    return {number for _, number in sizes} | more | {n * factor for _, n in sizes for factor in factors}


def _numbers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield names and integers above 1 in the configurations of a model and its parts, nested ones included."""
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    visited: set[int] = set()
    while waiting:
        config = waiting.pop()
        if id(config) in visited:
            continue
        visited.add(id(config))
        # `num_labels` is a property in transformers, and not in `__dict__`.
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
        config: the model's configuration, as transformers' AutoConfig reads it.
    """
    if not hasattr(config, "get_text_config"):
        return config
    for options in ({}, {"decoder": True}):
        try:
            return config.get_text_config(**options)
        except ValueError:  # MusicGen has a text encoder and a decoder, and transformers does not choose
            continue
    return config
