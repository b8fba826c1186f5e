"""Read facts from a model and its configuration: embeddings, the base model, experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_muon.routing.parameters import ModelParameter

# Names of the number of experts of a layer, in modules and configs.
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts", "moe_num_experts")


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
