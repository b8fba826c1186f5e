"""Copy and pickle a `Muon`: attributes that torch does not copy, and optimizers that cannot be copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from hf_muon.config import OPTIMIZER_OPTIONS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GROUP, _PARTED = "replicate_group", "_have_parted"


class _OfThisProcess:
    """A process group, which copies share and pickles cannot hold."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _OfThisProcess:
        return self

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "A Muon with a replicate_group cannot be pickled: process groups live in their process. Save its "
            "state_dict(), and build the optimizer again with the process group of the process that loads it "
            "[not-copyable]"
        )


def carried(optimizer: Any) -> dict[str, Any]:
    """Return the attributes that a copy takes over: options, `replicate_group`, and whether moments are a rank's own.

    Raises:
        RuntimeError: a framework steps this optimizer on flat partitions, and would not step the copy.
    """
    if optimizer.partitioned.partitions is not None:
        raise RuntimeError(
            f"A Muon that {optimizer.partitioned.framework} steps with cannot be copied or pickled: its parameters are "
            "flat partitions of the engine. Save with engine.save_checkpoint [not-copyable]"
        )
    group = optimizer.replicate_group
    options = {name: getattr(optimizer, name) for name in OPTIMIZER_OPTIONS}
    own = {_GROUP: None if group is None else _OfThisProcess(group), _PARTED: optimizer.replicas.have_parted}
    return {**options, **own}


def complete_(optimizer: Any) -> None:
    """Set the attributes of a copy."""
    group = optimizer.__dict__.get(_GROUP)
    optimizer.replicate_group = group.group if isinstance(group, _OfThisProcess) else group
    optimizer.replicas.have_parted = optimizer.__dict__.pop(_PARTED, False)
