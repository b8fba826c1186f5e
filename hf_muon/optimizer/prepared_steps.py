"""The steps of all param groups, prepared before all ranks agree on them, so that they agree on errors of that, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from hf_muon.math.rounding import Observer
from hf_muon.optimizer.layout import GroupWork, StepLayout
from hf_muon.optimizer.state import complete_state_
from hf_muon.optimizer.step import MuonStep, adamw_step, hyperparameters
from hf_muon.optimizer.watching import GroupWatch

Group = dict[str, Any]
Take = Callable[[GroupWatch | None, Observer | None], None]


class PreparedSteps:
    """What a step can do before anything moves: allocate missing state, and read options.

    Args:
        groups: param groups.
        layout: of these groups.
        state: of their parameters, an empty dict for those without.
        max_batch_bytes: as of `Muon`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        layout: StepLayout,
        state: MutableMapping[Tensor, dict[str, Any]],
        max_batch_bytes: int,
    ) -> None:
        self._groups = groups
        self._layout = layout
        self._state = state
        self._max_batch_bytes = max_batch_bytes
        self._without: list[Tensor] = []
        self._steps: dict[int, tuple[Sequence[int], Take]] = {}

    def prepare(self, indices_of_groups: Sequence[Sequence[int]], *, completes: bool = True) -> None:
        """Prepare the steps of these parameters of each group, as far as they are not prepared yet.

        All groups get their state with the first step that is taken, so that moments which are missing later are lost.

        Args:
            indices_of_groups: of the parameters of each group.
            completes: whether state may be missing, or in another form than steps need.
        """
        if not any(indices_of_groups) and not self._state:
            return
        for k, (group, work) in enumerate(zip(self._groups, self._layout.works, strict=True)):
            indices = indices_of_groups[k]
            if completes:
                self._without += [param for param in group["params"] if param not in self._state]
                complete_state_(group, self._state)
            if indices and (k not in self._steps or self._steps[k][0] != indices):
                self._steps[k] = indices, self._step(group, work, indices)

    def _step(self, group: Group, work: GroupWork, indices: Sequence[int]) -> Take:
        number = group["step"] + 1  # the same for all partitions of a group
        if group["use_muon"]:
            return MuonStep(group, work, indices, self._state, number, self._max_batch_bytes).take
        options = hyperparameters(group, number)
        return functools.partial(adamw_step, group, indices, self._state, number, work=work, options=options)

    def take(self, k: int, watch: GroupWatch | None, observer: Observer | None) -> None:
        """Take the step of a group, by its position; all ranks have agreed that they do."""
        self._steps[k][1](watch, observer)

    def undo(self) -> None:
        """Take back the state that was allocated for a step that is refused."""
        for param in self._without:
            self._state.pop(param, None)
