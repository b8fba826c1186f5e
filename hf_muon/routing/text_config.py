"""The part of a model's configuration that is about text."""

from __future__ import annotations

from typing import Any


def text_config_of(config: Any) -> Any:
    """Return the part that describes the text model; the decoder's of several; the configuration itself if it has none.

    Args:
        config: of the model, as transformers' AutoConfig reads it.
    """
    if not hasattr(config, "get_text_config"):
        return config
    for side in ({}, {"decoder": True}):
        try:
            return config.get_text_config(**side)
        except ValueError:  # MusicGen has a text encoder and a decoder, and transformers does not choose
            continue
    return config
