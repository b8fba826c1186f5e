"""The options that scale rates and decay of single parameters, as fields of a dataclass, for `MuonConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_muon.options import types
from hf_muon.options.declaration import option


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Factors of the learning rate and of the weight decay, by name and by depth."""

    lr_scales: str | Mapping[str, float] | None = option(
        None,
        types.factors(),
        "Factors of the learning rate by name: `{embed: 0.3, head: 0.5}` in YAML and Python, `embed:0.3|head:0.5` in "
        "`optim_args`. Names are searched for regular expressions; the first that matches counts.",
    )
    wd_scales: str | Mapping[str, float] | None = option(
        None, types.factors(), "Factors of the weight decay by name, written like `lr_scales`."
    )
    layer_decay: float = option(
        1.0,
        types.number("a number from 0 to 1", 0, 1 + 1e-15),
        "Factor of the learning rate from each layer to the one below it: 1 for head and last norm, `layer_decay` for "
        "the last layer, and so on down to embeddings. It multiplies those of `lr_scales`.",
        source="[2106.08254](https://arxiv.org/abs/2106.08254), timm",
    )
