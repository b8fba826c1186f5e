"""The options that scale rates of single parameters, as fields of a dataclass, for `MuonConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_muon.options import types
from hf_muon.options.declaration import option


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Factors of the learning rate, by name."""

    lr_scales: str | Mapping[str, float] | None = option(
        None,
        types.factors(),
        "Factors of the learning rate by name: `{embed: 0.3, head: 0.5}` in YAML and Python, `embed:0.3|head:0.5` in "
        "`optim_args`. Names are searched for regular expressions; the first that matches counts.",
    )
