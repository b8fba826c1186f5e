"""What Muon refuses of a run with sequence parallelism: models and arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def refuse_arguments(args: Any) -> None:
    """Raise where a Trainer would silently ignore what its arguments ask for.

    Raises:
        RuntimeError: label smoothing.
    """
    if getattr(args, "label_smoothing_factor", 0):
        raise RuntimeError(
            "label_smoothing_factor is ignored under sequence parallel: transformers computes the loss of the model "
            "there. Leave it out"
        )


def model_complaints(config: Any, size: int, implementation: str | None) -> Iterator[str]:
    """Yield what of a model's configuration does not work with sequence parallelism, and what to do.

    Args:
        config: of the model, as transformers' AutoConfig reads it.
        size: ranks that share a sequence.
        implementation: of attention.
    """
    from hf_muon.routing.model_facts import text_config_of  # imports torch, which a launch finds missing later

    text = text_config_of(config)
    heads = int(getattr(text, "num_attention_heads", None) or 0)
    shared = int(getattr(text, "num_key_value_heads", None) or heads)
    if not heads:
        yield f"{type(config).__name__} has no num_attention_heads: it is not known to attend"
    elif heads % size:
        yield f"{heads} attention heads are not divisible by SP_SIZE={size}. Use one of {_divisors(heads)}"
    elif shared % size and size % shared:
        yield f"{shared} key and value heads neither divide SP_SIZE={size} nor are divisible by it"
    if not (
        implementation == "sdpa" or str(implementation).startswith("flash_attention") or "/" in str(implementation)
    ):
        yield f"attention {implementation!r} needs a mask, which is dropped. Use sdpa or flash_attention_2"
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds and getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    for kind in sorted(kinds - {"full_attention"}):
        if kind != "sliding_attention":
            yield f"layers of {kind}, which would start anew on every rank or see what they must not"
        elif implementation == "sdpa":
            yield "layers of sliding_attention under sdpa, whose mask is dropped. Use flash_attention_2"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(2, number + 1) if number % n == 0)
