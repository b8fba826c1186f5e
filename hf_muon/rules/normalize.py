"""`normalize: rows`, NorMuon: each row of a direction is divided by the root of its second moment over the steps.

Source: Li et al., https://arxiv.org/abs/2510.05491. As in the authors' code, https://github.com/zichongli5/NorMuon, a
direction keeps its Frobenius norm, so that every `adjust_lr_fn` holds; the paper fixes the norm to that of
`match_rms_adamw`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_muon.config import OPTIONS
from hf_muon.rules.rule import Options, Orthogonalize, Rule, States

_EPS = 1e-10
_BETA = 0.95
SECOND_MOMENT = "row_second_moment"


def normalized_rows(
    updates: Tensor, orthogonalize: Orthogonalize, state: States, options: Options, step: int
) -> Tensor:
    """Return directions ``(B, out, in)`` whose rows are normalized; each keeps its Frobenius norm."""
    directions = orthogonalize(updates)
    moment = state[SECOND_MOMENT]  # (B, out, 1)
    moment.lerp_(directions.square().mean(dim=-1, keepdim=True), 1 - _BETA)
    normalized = directions / moment.sqrt().add_(_EPS)
    before, after = (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) for x in (directions, normalized))
    return normalized.mul_(before / after.add_(_EPS))


RULE = Rule(
    name="normalize",
    options={"normalize": OPTIONS["normalize"]},
    is_on=lambda options: options["normalize"] == "rows",
    state={SECOND_MOMENT: "row"},
    direction=normalized_rows,
)
