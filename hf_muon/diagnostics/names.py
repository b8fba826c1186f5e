"""Names of parameters and matrices in metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence

MOST_PARTS = 8
"""Matrices of one weight that get numbers of their own. If it has more, as with `per_head`, one mean covers them."""


def layers_and_kinds(names: Sequence[str]) -> list[tuple[int | None, str]]:
    """Return the layer and the kind of each parameter: `model.layers.3.mlp.up_proj.weight` is `mlp.up_proj` in layer 3.

    If a model has several stacks of layers, the kind begins with the stack.
    """
    split: list[tuple[int | None, str, str]] = []
    for name in names:
        name = re.sub(r"(\.default)?\.weight(?=$|\[)", "", name)
        match = re.match(r"(?:(.*?)\.)?(\d+)\.(.+)$", name)
        if match is None:
            split.append((None, "", name))
        else:
            split.append((int(match[2]), match[1] or "", re.sub(r"(?<=\.)\d+(?=\.|$)", "*", match[3])))
    stacks = {stack for layer, stack, _ in split if layer is not None}
    return [
        (layer, f"{stack.rpartition('model.')[2]} {kind}" if layer is not None and len(stacks) > 1 else kind)
        for layer, stack, kind in split
    ]
