"""Factors of the learning rate of each parameter, by its name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from hf_muon.config import MuonConfig
from hf_muon.routing.parameters import ModelParameter, examples


def factors_by_name(config: MuonConfig, params: Sequence[ModelParameter]) -> dict[str, float]:
    """Return the factors of those parameters that a pattern of `lr_scales` matches.

    Args:
        config: the options.
        params: of the model, frozen ones among them, in its order.

    Raises:
        ValueError: a pattern matches no trained parameter.
    """
    factors: dict[str, float] = {}
    for pattern, factor in cast(Sequence[tuple[str, float]], config.lr_scales or ()):
        matches = [param for param in params if re.search(pattern, param.name)]
        if not matches:
            names = examples(param.name for param in params)
            raise ValueError(f"lr_scales: {pattern!r} matches no parameter. Names look like {names}")
        if not any(param.parameter.requires_grad for param in matches):
            names = examples(param.name for param in matches)
            raise ValueError(f"lr_scales: {pattern!r} matches no trained parameter, only {names}")
        if all(param.name in factors for param in matches):
            names = examples(param.name for param in matches)
            raise ValueError(f"lr_scales: patterns before {pattern!r} match all that it matches, {names}: put it first")
        for param in matches:
            factors.setdefault(param.name, factor)
    return factors
