"""The warning about a step in which no parameter has a gradient on any rank: it trains nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_muon.diagnostics import log


def warn_of_empty_step(params: Sequence[Tensor]) -> None:
    """Log on rank 0 that a step has changed nothing, and the likely cause."""
    if log.is_rank_zero():
        log.logger().warning(
            "no parameter of this optimizer has a gradient, so that the step changes nothing: %s [no-gradients]",
            likely_cause(params),
        )


def likely_cause(params: Sequence[Tensor]) -> str:
    """Return why parameters most likely have no gradients, judging by what has become of them."""
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
