"""`sinkhorn`: momentum whose rows and columns are balanced in turns, and which is not orthogonalized.

DeepSeek-V4.1 steps its embedding and its head so, in place of AdamW: technical report, section 2.5, Algorithm 1
(https://huggingface.co/deepseek-ai/DeepSeek-V4.1-Flash). Rows of the vocabulary that gradients have hardly reached stay
where they are. A table then has one moment in place of two. Give it a param group of Muon with `sinkhorn: true` and
`weight_decay: 0`.
"""

import math

import torch

from hf_muon.rules import Option, Rule, types

TURNS = 11  # rows first and last
LEAST_SHARE = 1e-3  # of the mean norm of rows, under which a row does not move
RMS = 0.18  # of an update in which all rows move
_LEAST = 1e-30


def balanced(updates, orthogonalize, state, options, step):
    """Return directions ``(B, out, in)`` that a step with `adjust_lr_fn: match_rms_adamw` brings to `RMS`."""
    largest = torch.linalg.vector_norm(updates, ord=math.inf, dim=(-2, -1), keepdim=True)
    updates = updates / largest.clamp_min(_LEAST)  # squares of very small or large ones would be zero or infinite
    norms = torch.linalg.vector_norm(updates, dim=-1, keepdim=True)
    updates = updates.masked_fill(norms <= LEAST_SHARE * norms.mean(dim=-2, keepdim=True), 0)
    for turn in range(TURNS):
        norms = torch.linalg.vector_norm(updates, dim=-2 if turn % 2 else -1, keepdim=True)
        updates = updates / norms.clamp_min(_LEAST)
    # Rows have norm one, thus elements an RMS of 1 / sqrt(in).
    return updates * (RMS * math.sqrt(updates.size(-1)) / (options["update_rms"] * math.sqrt(max(updates.shape[-2:]))))


RULE = Rule(
    name="sinkhorn",
    options={"sinkhorn": Option(types.flag(), False, "Balance updates in place of orthogonalizing them.")},
    is_on=lambda options: options["sinkhorn"],
    direction=balanced,
)
