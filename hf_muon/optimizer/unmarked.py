"""The warning about embeddings and heads in a group that does not say `use_muon`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_muon.config import MuonConfig
from hf_muon.diagnostics import log
from hf_muon.routing.live_models import held_routes
from hf_muon.routing.rules import is_adapter

# Looking through all live objects takes a tenth of a second, which models of fewer weights are not worth.
SMALLEST = 100_000


def warn_of_tables(group: Mapping[str, Any]) -> None:
    """Log on rank 0 which matrices of a Muon group are embeddings, heads or the like in the model that holds them.

    Parameters alone do not say what they are: those of no live module, and groups of fewer than `SMALLEST` weights, are
    taken for hidden matrices, as in torch.optim.Muon.
    """
    matrices = [param for param in group["params"] if isinstance(param, nn.Parameter) and param.ndim == 2]
    if sum(param.numel() for param in matrices) < SMALLEST or not log.is_rank_zero():
        return
    try:
        routes = held_routes(matrices, MuonConfig()).values()
    except Exception:  # noqa: BLE001  somebody's module, which this optimizer does not need to know
        return
    others = [f"{route.name} ({route.reason})" for route in routes if not (route.use_muon or is_adapter(route.name))]
    if others:
        log.logger().warning(
            "Muon orthogonalizes every matrix of a group without use_muon, and among these are %s. Use "
            "hf_muon.build_optimizer(model), or hf_muon.MuonOfGroups where a program passes parameters alone: both "
            "give these to AdamW. To keep them here, write use_muon: True into their group [unmarked-groups]",
            log.first_few(others, 3),
        )
