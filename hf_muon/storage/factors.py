"""Factors of the learning rate and of the weight decay, one of each for every parameter of a param group.

A group may have lists `lr_factors` and `wd_factors`; without one, every factor is 1. State dicts have text in their
place: torch.distributed.checkpoint loads no full state with keys that the optimizer lacks, and lists have a key for
each element.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

KEYS = ("lr_factors", "wd_factors")
"""The keys of the lists in param groups."""

NONE = dict.fromkeys(KEYS)
"""What stands in groups without lists."""


class Factors(NamedTuple):
    """By what the learning rate and the weight decay of a param group are multiplied for one parameter."""

    lr: float = 1.0
    wd: float = 1.0


ONE = Factors()


def lists_complaint(values: Any, count: int | None = None) -> str | None:
    """Return why a value is neither None nor a list of factors, one for each of `count` parameters; None if it is.

    Without `count`, the text of a state dict is valid, too.
    """
    if values is None:
        return None
    if isinstance(values, str) and count is None:
        with contextlib.suppress(ValueError):
            values = _of_text(values)
    if not isinstance(values, (list, tuple)) or not all(map(_is_factor, values)):
        return f"{values!r:.200} is not a list of numbers of at least 0"
    return None if count in (None, len(values)) else f"{len(values)} of {count} parameters"


def _is_factor(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and 0 <= float(value) < math.inf


def _of_text(text: str) -> list[float]:
    return [float(number) for number in text.split("|")]


def with_texts(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with texts in place of the lists of its groups."""
    groups = []
    for group in state_dict["param_groups"]:
        lists = {key: group[key] for key in KEYS if group.get(key) is not None}
        groups.append({**group, **{key: "|".join(repr(float(one)) for one in own) for key, own in lists.items()}})
    return {**state_dict, "param_groups": groups}


def has_factors(group: Mapping[str, Any]) -> bool:
    """Return whether some parameter of a group may have a factor that is not 1."""
    return any(group.get(key) is not None for key in KEYS)


def factors_of(group: Mapping[str, Any]) -> list[Factors]:
    """Return the factors of each parameter that the group had before ZeRO's partitions replaced them."""
    lists = [_of_text(own) if isinstance(own := group.get(key), str) else own for key in KEYS]
    count = next((len(values) for values in lists if values is not None), len(group["params"]))
    columns = [[1.0] * count if values is None else list(map(float, values)) for values in lists]
    return [Factors(*pair) for pair in itertools.zip_longest(*columns, fillvalue=1.0)]  # saved lists may be damaged
