"""`qk_clip`, MuonClip: query and key rows of heads whose logits grow too large are rescaled after the step.

Source: Kimi Team, https://arxiv.org/abs/2507.20534, section 2.1, Algorithm 1. Of keys that heads share the paper says
only what multi-head latent attention does: the shared rotary key stays as it is, and its queries get the whole factor.
The same holds here for grouped queries, if one of the heads that share a key needs no rescaling.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hf_muon.config import OPTIONS
from hf_muon.rules.heads import Heads
from hf_muon.rules.rule import Options, Rule


def rescaling(logits: Tensor, heads: Heads, options: Options) -> Mapping[str, Tensor]:
    """Return the factors of query and key heads that bring the largest logits ``(H,)`` down to the threshold.

    No factor is above 1, and a head within the threshold keeps its queries and its key as they are.
    """
    gamma = (options["qk_clip"] / logits).where(logits > options["qk_clip"], 1.0)  # (H,)
    # A key gets the square root of the largest factor among its heads: 1 if one of them needs no rescaling.
    key = gamma.view(heads.keys, -1).amax(dim=1).sqrt()
    query = gamma / key.repeat_interleave(heads.queries // heads.keys)
    return {"query": query, "key": key, "query_rotary": gamma}


def complaint(heads: Heads, options: Options) -> str | None:
    """Return why the heads of an attention never need rescaling; None if they may."""
    if not heads.normalized or options["qk_clip"] == float("inf"):
        return None
    return (
        f"normalizes queries and keys ({heads.normalized}), which bounds its logits: qk_clip={options['qk_clip']:g} is "
        "not needed, and rescaling rows before they are normalized does not change logits. Remove the option, or "
        "set qk_clip=inf to measure logits alone [normalized-attention]"
    )


RULE = Rule(
    name="qk_clip",
    options={"qk_clip": OPTIONS["qk_clip"]},
    is_on=lambda options: options["qk_clip"] is not None,
    head_factors=rescaling,
    head_complaint=complaint,
)
