"""Steps on flat partitions, with which a framework (ZeRO) replaces parameters and which it steps one by one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from hf_muon.optimizer.state import describe
from hf_muon.storage.factors import factors_of
from hf_muon.storage.partitions import Partition, Partitions
from hf_muon.storage.tensors import local_of
from hf_muon.storage.views import View, parse, views_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = Mapping[str, Any]

REFUSED = "Muon refuses this step; weights and moments are as they were"


@dataclass(frozen=True)
class PartitionedStep:
    """The protocol between a `Muon` and a framework that replaces its parameters by flat partitions.

    1. `expect_partitions`, before the framework takes the optimizer. Until step 2 it may only take steps with zero
       gradients, to make the optimizer create its state.
    2. `attach_partitions`, when the framework has replaced the parameters: which slices of which parameters each flat
       tensor holds. Nothing is attached if it left them whole.
    3. `Muon.step`, for all partitions at once or for one after the other: the framework puts those to step into the
       param groups, and leaves the other groups empty.

    Every `Muon` has one; 1 and 2 replace it. Without a framework it does nothing.

    Attributes:
        framework: the name of the framework, for errors.
        views: how the parameters were seen when the framework took them; flat tensors have no views.
        factors: the factor of the learning rate of each of them.
        is_expected: whether partitions are still to be attached.
        partitions: what each flat tensor in the param groups holds; None where parameters are stepped as they are.
    """

    framework: str = ""
    views: Mapping[Tensor, View] = field(default_factory=dict)
    factors: Mapping[Tensor, float] = field(default_factory=dict)
    is_expected: bool = False
    partitions: Partitions | None = None
    # Ids of the partitions that this step has stepped.
    _stepped: set[int] = field(default_factory=set)

    @property
    def refusal(self) -> str:
        """The beginning of the error of a refused step."""
        if not self.partitions:
            return REFUSED
        return "Muon refuses this step; partitions stepped before it have moved, the rest is as it was"

    def check_creates_state_only(self, groups: Sequence[Group]) -> None:
        """Raise if the framework takes a step with gradients before partitions are attached.

        Raises:
            RuntimeError: a gradient that is not zero.
        """
        for group in groups:
            for i, param in enumerate(group["params"]):
                if param.grad is not None and bool(local_of(param.grad).any()):
                    raise RuntimeError(
                        f"{describe(group, i)} is stepped before it is known how {self.framework} stores it. The "
                        f"attempt to start {self.framework} has failed; start it again [not-started]"
                    )

    def clear_stale_gradients(self, groups: Sequence[Group]) -> None:
        """Write zeros where a partition has no gradient in this step: its memory holds something else."""
        for param, partition in self._in(groups):
            if partition.without_gradient is not None and param.grad is not None:
                for elements in partition.without_gradient():
                    param.grad[elements].zero_()

    def begins_step(self, groups: Sequence[Group]) -> bool:
        """Return whether the partitions in the groups are the first of a step; the last one may have been refused."""
        return not self._stepped or any(id(param) in self._stepped for param, _ in self._in(groups))

    def completes_group(self, group: Group) -> bool:
        """Return whether a whole group has been stepped when its partitions that are in it now have been."""
        if not self.partitions:
            return True
        # Empty in a group whose turn it is not.
        present = self._in([group])
        return bool(present) and all(partition.last for _, partition in present)

    def count(self, groups: Sequence[Group]) -> bool:
        """Count the partitions in the groups as stepped, and return whether now all of this step's are."""
        if self.begins_step(groups):
            self._stepped.clear()
        self._stepped.update(id(param) for param, _ in self._in(groups))
        is_complete = self._stepped.issuperset(map(id, self.partitions or ()))
        if is_complete:
            self._stepped.clear()
        return is_complete

    def _in(self, groups: Sequence[Group]) -> list[tuple[Tensor, Partition]]:
        """Return the partitions that are in the groups now."""
        partitions = self.partitions or {}
        # A group may have lost its parameters, of which `check_params` complains.
        params = itertools.chain.from_iterable(group.get("params", ()) for group in groups)
        return [(param, partitions[param]) for param in params if param in partitions]


class TakesPartitions(Protocol):
    """An optimizer, a `Muon`, as frameworks know it that replace its parameters."""

    param_groups: list[dict[str, Any]]
    partitioned: PartitionedStep
    replicate_group: ProcessGroup | None


def expect_partitions(optimizer: TakesPartitions, framework: str) -> None:
    """Allow an optimizer only steps that create state, until `attach_partitions`.

    If the framework fails to start in between, later steps report it.

    Args:
        optimizer: a `Muon` over the model's parameters.
        framework: the name of the framework, for errors.
    """
    views: dict[Tensor, View] = {}
    factors: dict[Tensor, float] = {}
    for group in optimizer.param_groups:
        views.update(zip(group["params"], map(parse, views_of(group)), strict=True))
        factors.update(zip(group["params"], factors_of(group), strict=True))
    optimizer.partitioned = PartitionedStep(framework, views, factors, is_expected=True)


def attach_partitions(
    optimizer: TakesPartitions, partitions: Partitions | None, replicate_group: ProcessGroup | None = None
) -> None:
    """Make an optimizer step the flat partitions with which a framework replaced its parameters.

    Args:
        optimizer: a `Muon` that the framework steps with.
        partitions: by the flat tensors in its param groups; None if parameters are whole.
        replicate_group: the ranks that store whole parameters alike; not used for partitions.
    """
    optimizer.partitioned = dataclasses.replace(
        optimizer.partitioned, is_expected=False, partitions=partitions, _stepped=set()
    )
    if partitions is None:
        optimizer.replicate_group = replicate_group
