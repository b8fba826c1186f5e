"""Factors of the learning rate and of the weight decay of each parameter, by its name and by its depth."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from hf_muon.config import MuonConfig
from hf_muon.diagnostics.log import first_few
from hf_muon.routing.parameters import ModelParameter, examples, matching
from hf_muon.storage.factors import ONE, Factors

_LAYER = re.compile(r"^(?P<stack>(?:.*?\.)??)(?P<index>\d+)\.")
_OUTPUT = re.compile(r"final|head|(?:^|[._])out")
_RIVAL = 0.1
"""A second stack of layers with this share of the weights of the largest makes depth ambiguous."""


def factors_by_name(config: MuonConfig, params: Sequence[ModelParameter]) -> dict[str, Factors]:
    """Return the factors of those parameters for which they are not 1.

    Args:
        config: the options; `lr_scales`, `wd_scales` and `layer_decay` matter here.
        params: of the model, frozen ones among them, in its order.

    Raises:
        ValueError: a pattern matches no trained parameter, or `layer_decay` does not know what the layers are.
    """
    by_lr, by_wd = (_by_pattern(name, _pairs(config, name), params) for name in ("lr_scales", "wd_scales"))
    by_depth = depth_factors(config.layer_decay, params) if config.layer_decay != 1 else {}
    factors = {
        param.name: Factors(by_lr.get(param.name, 1.0) * by_depth.get(param.name, 1.0), by_wd.get(param.name, 1.0))
        for param in params
    }
    return {name: own for name, own in factors.items() if own != ONE}


def _pairs(config: MuonConfig, option: str) -> Sequence[tuple[str, float]]:
    """Return patterns and factors, in the form to which `MuonConfig` brings them."""
    return getattr(config, option) or ()


def _by_pattern(option: str, pairs: Sequence[tuple[str, float]], params: Sequence[ModelParameter]) -> dict[str, float]:
    factors: dict[str, float] = {}
    for pattern, factor in pairs:
        matches = matching(option, pattern, params)
        if all(param.name in factors for param in matches):
            names = examples(param.name for param in matches)
            raise ValueError(f"{option}: patterns before {pattern!r} match all that it matches, {names}: put it first")
        for param in matches:
            factors.setdefault(param.name, factor)
    return factors


def depth_factors(decay: float, params: Sequence[ModelParameter]) -> dict[str, float]:
    """Return `decay` to the power of the number of layers above each parameter.

    As in BEiT and timm, what stands before the layers (embeddings) is one layer more, and what stands after them (the
    last norm, the head) has 1. The layers are numbered modules; where a model has several lists of them, the largest.

    Raises:
        ValueError: there are none, or two lists of similar size.
    """
    stacks: dict[str, dict[int, int]] = {}  # numbers of weights, by list and index
    indices: dict[str, tuple[str, int]] = {}
    for param in params:
        if layer := _LAYER.match(param.name):
            indices[param.name] = stack, index = layer["stack"], int(layer["index"])
            sizes = stacks.setdefault(stack, {})
            sizes[index] = sizes.get(index, 0) + math.prod(param.shape)
    weights = sorted(((sum(sizes.values()), name) for name, sizes in stacks.items() if len(sizes) > 1), reverse=True)
    if not weights:
        names = examples(param.name for param in params)
        raise ValueError(f"layer_decay: this model has no numbered layers. Names look like {names}. Use lr_scales")
    if len(weights) > 1 and weights[1][0] > _RIVAL * weights[0][0]:
        lists = first_few([f"{name.rstrip('.')} ({len(stacks[name])})" for _, name in weights])
        raise ValueError(f"layer_decay: this model has several lists of layers, {lists}. Use lr_scales with patterns")
    (_, stack), *_ = weights
    depth = {index: k for k, index in enumerate(sorted(stacks[stack]))}
    first = next(i for i, param in enumerate(params) if indices.get(param.name, ("", 0))[0] == stack)
    factors: dict[str, float] = {}
    for i, param in enumerate(params):
        name, index = indices.get(param.name, ("", -1))
        if name == stack and index in depth:
            factors[param.name] = decay ** (len(depth) - depth[index])
        elif i < first and not _OUTPUT.search(param.name):
            factors[param.name] = decay ** (len(depth) + 1)
    return factors


def require_decay(config: MuonConfig, decays: Mapping[str, bool]) -> None:
    """Raise if a pattern of `wd_scales` scales nothing but parameters without weight decay.

    Args:
        config: the options.
        decays: for each trained parameter, by name, whether it has weight decay.

    Raises:
        ValueError: there is such a pattern.
    """
    for pattern, factor in _pairs(config, "wd_scales"):
        matches = [name for name in decays if re.search(pattern, name)]
        if factor and matches and not any(decays[name] for name in matches):
            raise ValueError(
                f"wd_scales: {pattern!r} matches only norms and biases, which have no weight decay to scale: "
                f"{examples(matches)}"
            )
