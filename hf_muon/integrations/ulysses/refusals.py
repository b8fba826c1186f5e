"""Refuse runs with sequence parallelism for their models, arguments, or sizes of groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from hf_muon.integrations.names import is_set


def refuse_arguments(args: Any) -> None:
    """Raise if a Trainer would silently ignore an argument.

    Raises:
        RuntimeError: label smoothing.
    """
    if getattr(args, "label_smoothing_factor", 0):
        raise RuntimeError(
            "label_smoothing_factor is ignored under sequence parallel: transformers computes the loss of the model "
            "there. Leave it out [label-smoothing]"
        )


def refuse_ignored_size() -> None:
    """Raise if the environment asks accelerate for sequence parallelism and its configuration does not.

    Raises:
        RuntimeError: the variable.
    """
    size = os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1")
    if is_set("accelerate", "ACCELERATE_USE_PARALLELISM_CONFIG") and size not in ("", "1"):
        raise RuntimeError(
            f"PARALLELISM_CONFIG_SP_SIZE={size} is ignored, by an accelerate that knows no sequence parallel or "
            'because parallelism_config says something else. Run: pip install "accelerate>=1.12", or remove one of '
            "the two [ignored-sp-size]"
        )


def refuse_groups_of_gloo(device: Any, ranks: int, size: int) -> None:
    """Raise if several groups of CPU ranks would share sequences, because they would wait for each other.

    Raises:
        RuntimeError: the numbers of ranks.
    """
    if device.type == "cpu" and ranks != size:
        raise RuntimeError(
            f"on the CPU sp_size must be the number of ranks, and these are {size} and {ranks}: with several groups of "
            "ranks DeepSpeed's sequence parallel hangs under gloo [groups-of-gloo]"
        )


def model_complaints(config: Any, implementation: str) -> Iterator[str]:
    """Yield why a model's configuration does not work with sequence parallelism, where DeepSpeed does not refuse it.

    Args:
        config: the model's configuration, as transformers' AutoConfig reads it.
        implementation: the implementation of attention.
    """
    from hf_muon.routing.model_facts import text_config_of

    text = text_config_of(config)
    # A name with a slash is a kernel of the Hub, for flash attention.
    if implementation != "sdpa" and not implementation.startswith("flash_attention") and "/" not in implementation:
        yield (
            f"attention {implementation!r} needs a mask, which is dropped. Use sdpa or flash_attention_2 [dropped-mask]"
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds and getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    for kind in sorted(kinds - {"full_attention"}):
        if kind != "sliding_attention":
            yield (
                f"layers of {kind}, which would start anew on every rank or see what they must not "
                "[layers-across-ranks]"
            )
        elif implementation == "sdpa":
            yield (
                "layers of sliding_attention under sdpa, whose mask is dropped. Use flash_attention_2 [sliding-window]"
            )
