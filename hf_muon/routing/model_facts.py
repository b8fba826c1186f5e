"""Read facts from a model and its configuration: embeddings, the base model, experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from hf_muon.routing.parameters import ModelParameter

# Names of the number of classes or tokens that a head has rows for, in modules and configs.
_CLASS_COUNTS = ("num_classes", "num_labels", "n_classes", "vocab_size", "n_vocab")
# Names of the number of experts of a layer, in modules and configs.
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts", "moe_num_experts")


def reported_embeddings(model: nn.Module) -> dict[int, str]:
    """Return ids of the parameters that a model, or a model inside it, reports as embeddings, each with its role.

    timm's models report their `classifier`, some of them several.
    """
    roles: dict[int, str] = {}
    for module in model.modules():
        for role in ("output embeddings", "input embeddings", "classifier"):
            # transformers raises NotImplementedError for models without embeddings; others may have such a name for
            # something else, which takes arguments or is not a function.
            try:
                embeddings = getattr(module, f"get_{role.replace(' ', '_')}")()
            except (AttributeError, NotImplementedError, TypeError):
                continue
            for reported in embeddings if isinstance(embeddings, (tuple, list)) else (embeddings,):
                if isinstance(reported, nn.Module):
                    roles.update((id(parameter), role) for parameter in reported.parameters())
    return roles


def is_outside_base_model(param: ModelParameter) -> bool:
    """Return whether a parameter is outside of the base model of the model that holds it, as heads are.

    transformers names the base model in `base_model_prefix`. Another model next to it has its own heads.
    """
    outside = False
    for part, module in param.steps:
        # Ask the class, and the module's own children: peft's wrappers forward attributes of the model inside.
        base = getattr(type(module), "base_model_prefix", None)
        if base is not None:
            outside = part != base and base in dict(module.named_children())
    return outside


def is_of_base_model(param: ModelParameter) -> bool:
    """Return whether a model that holds a parameter has a base model, and so its heads outside of it."""
    return any(getattr(type(module), "base_model_prefix", None) for _, module in param.steps)


def class_counts(modules: Iterable[Any]) -> set[int]:
    """Return the numbers of classes and tokens that modules, or their configurations, name."""
    return {
        count
        for module in modules
        for source in (module, getattr(module, "config", None), getattr(module, "hparams", None))
        for count in _named(source, _CLASS_COUNTS)
        if count > 1
    }


def _named(source: Any, names: Iterable[str]) -> Iterator[int]:
    """Yield the integers that a module, a configuration or a mapping has under these names."""
    for name in names:
        value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
        if isinstance(value, int):
            yield value


def expert_counts(owner: Any) -> list[int]:
    """Return the numbers of experts that a module or a configuration names, the usual name first."""
    return [*_named(owner, _EXPERT_COUNTS)]


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
