"""The options of hf_muon's own rules as fields of a dataclass, for `MuonConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from hf_muon.options.declaration import declared
from hf_muon.rules.registry import BUILT_IN_OPTIONS


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """A field for each option of a rule, with the type that it has in Python."""

    momentum_warmup: int = declared(BUILT_IN_OPTIONS["momentum_warmup"])
    normalize: str = declared(BUILT_IN_OPTIONS["normalize"])
    weight_decay_mode: str = declared(BUILT_IN_OPTIONS["weight_decay_mode"])
    qk_clip: float | None = declared(BUILT_IN_OPTIONS["qk_clip"])
