"""The Muon optimizer for Hugging Face training: `optim: muon`.

Importing this package installs lazy import hooks: they register `optim: muon` with transformers and LLaMA-Factory when
these are imported. The package imports neither of them, and torch only when a name below or a submodule is used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from hf_muon._autoload import install

if TYPE_CHECKING:
    from hf_muon.build import build_optimizer
    from hf_muon.config import MuonConfig
    from hf_muon.math.newton_schulz import orthogonalize
    from hf_muon.optimizer.muon import Muon
    from hf_muon.ready_groups import MuonOfGroups
    from hf_muon.routing.route import route_parameters

__version__ = "0.1.0rc1"
__all__ = [
    "Muon",
    "MuonConfig",
    "MuonOfGroups",
    "build_optimizer",
    "install",
    "orthogonalize",
    "route_parameters",
]

_MODULES = {
    "Muon": "hf_muon.optimizer.muon",
    "MuonConfig": "hf_muon.config",
    "MuonOfGroups": "hf_muon.ready_groups",
    "build_optimizer": "hf_muon.build",
    "orthogonalize": "hf_muon.math.newton_schulz",
    "route_parameters": "hf_muon.routing.route",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r} [unknown-name]")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
if os.environ.get("HF_MUON_DRY_RUN"):
    from hf_muon.diagnostics.log import is_on

    if is_on("HF_MUON_DRY_RUN"):
        from hf_muon.dry_run.hooks import begin

        begin()
