"""The warning that rounding to nearest loses most updates of bf16 or fp16 weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics import log
from hf_muon.math.rounding import Observer
from hf_muon.storage.tensors import has_data, local_of


class LostUpdates:
    """Counts, in one step, the weights that `weight_rounding=nearest` leaves as they are, and warns once if most are.

    The step is the first with at least half of the highest learning rate that the group knows of: a warmup begins with
    updates that are smaller than a run's typical ones. Rank 0 counts what it stores; nothing is sent.
    """

    def __init__(self) -> None:
        self._counts: list[tuple[float, torch.dtype, Tensor, int]] = []
        self._is_over = False

    def observer(self, group: Mapping[str, Any]) -> Observer | None:
        """Return what counts in a step of this group; None where nothing is to be counted."""
        if self._is_over or group["weight_rounding"] != "nearest" or not log.is_rank_zero():
            return None
        if not all(has_data(local_of(param)) for param in group["params"][:1]):
            return None
        lr = float(group["lr"])
        highest = max(lr, *(float(group.get(key, 0)) for key in ("initial_lr", "max_lr")))
        if lr <= 0 or lr < highest / 2:
            return None

        def count(weights: Tensor, exact: Tensor) -> None:
            lost = (exact != weights) & (exact.to(weights.dtype) == weights)
            self._counts.append((lr, weights.dtype, lost.sum(), weights.numel()))

        return count

    def log(self) -> None:
        """End the step: warn if more than half of the weights were left as they are."""
        counts, self._counts = self._counts, []
        total = sum(numel for *_, numel in counts)
        if not total:
            return
        self._is_over = True
        share = sum(int(lost) for _, _, lost, _ in counts) / total
        if share > 0.5:
            rates = "|".join(f"{lr:.3g}" for lr in sorted({lr for lr, *_ in counts}))
            dtypes = " and ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype, *_ in counts}))
            log.logger().warning(
                "weight_rounding=nearest: at a learning rate of %s, %.0f%% of the %s weights cannot move, because "
                "their updates are smaller than half a unit in the last place. Use weight_rounding=stochastic, or "
                "train fp32 weights [weights-cannot-move]",
                rates,
                100 * share,
                dtypes,
            )
