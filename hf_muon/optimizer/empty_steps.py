"""What is said about a step in which no parameter has a gradient on any rank: it trains nothing."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from hf_muon.diagnostics import log as diagnostics

_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def warn_once(optimizer: Optimizer) -> None:
    """Log on rank 0, once for an optimizer, that a step has changed nothing, and why that may be."""
    if optimizer in _told:
        return
    _told.add(optimizer)
    if diagnostics.is_rank_zero():
        params = [param for group in optimizer.param_groups for param in group["params"]]
        diagnostics.logger().warning(
            "no parameter of this optimizer has a gradient, so that the step changes nothing: %s", likely_cause(params)
        )


def likely_cause(params: Sequence[Tensor]) -> str:
    """Say what has most likely left parameters without gradients, judging by what they have become."""
    if not any(param.requires_grad for param in params):
        return "none of them requires a gradient"
    if any(param.device.type == "meta" for param in params):
        return (
            "they are on the meta device. Build the optimizer after the model was materialized (to_empty), not before"
        )
    return (
        "either there was no backward pass since zero_grad(), or the model has other parameters by now (fully_shard, "
        "parallelize_module, to_empty and peft replace them). In the latter case, build the optimizer after that"
    )
