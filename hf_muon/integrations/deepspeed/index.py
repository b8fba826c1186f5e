"""Where the parameters of a DeepSpeed checkpoint lie, written into its files so that any other layout can read them.

DeepSpeed stores flat partitions, and not how they divide the parameters: that follows from the stage, the number of
ranks and options (`round_robin_gradients`, `parameter_alignment`, `sub_group_size`), and from DeepSpeed's version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_muon.optimizer.muon import Muon
from hf_muon.routing.parameters import unwrapped
from hf_muon.storage.partitions import Division

INDEX = "hf_muon_index"


class StoredParameter(NamedTuple):
    """A parameter in a partition: its shape, the dtype of the model's weight, and how ranks divide it."""

    shape: tuple[int, ...]
    dtype: str
    division: Division


@dataclass(frozen=True)
class StoredPartition:
    """One flat tensor of every rank, whose elements differ from rank to rank.

    Attributes:
        group: number of the param group.
        numel: elements on each rank.
        parameters: by name.
    """

    group: int
    numel: int
    parameters: Mapping[str, StoredParameter]

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's weights."""
        (name,) = {one.dtype for one in self.parameters.values()}
        dtype: torch.dtype = getattr(torch, name)
        return dtype


@dataclass(frozen=True)
class Index:
    """Where all ranks store the master weights and moments of all parameters.

    Attributes:
        stage: of ZeRO. In ZeRO-0 each parameter is a partition, and there is one file.
        ranks: the number of files.
        precision: "fp32", "bf16" or "fp16".
        is_swapped: whether partitions are on NVMe, and not in these files.
        partitions: in the order of the master weights; none on NVMe.
    """

    stage: int
    ranks: int
    precision: str
    is_swapped: bool
    partitions: tuple[StoredPartition, ...]

    @property
    def parameters(self) -> dict[str, tuple[int, StoredParameter]]:
        """By name, the number of the partition and the parameter in it."""
        return {name: (k, one) for k, part in enumerate(self.partitions) for name, one in part.parameters.items()}

    def fits(self, other: Index) -> bool:
        """Return whether files of the other layout can be loaded as they are. ZeRO-1 and 2 write the same ones."""

        def layout(one: Index) -> tuple[Any, ...]:
            return max(one.stage, 2) if one.stage else 0, one.ranks, one.is_swapped, one.partitions

        return layout(self) == layout(other)

    def __str__(self) -> str:
        """Return the layout in words."""
        return f"ZeRO-{self.stage}" + (f" on {self.ranks} ranks" if self.stage else "")

    def plain(self) -> dict[str, Any]:
        """Return the index as what a file holds: numbers, texts, lists and dicts."""
        partitions = [
            {
                "group": part.group,
                "numel": part.numel,
                "parameters": {
                    name: {"shape": list(one.shape), "dtype": one.dtype, **one.division._asdict()}
                    for name, one in part.parameters.items()
                },
            }
            for part in self.partitions
        ]
        about = {"stage": self.stage, "ranks": self.ranks, "precision": self.precision, "is_swapped": self.is_swapped}
        return {"version": 1, **about, "partitions": partitions}

    @staticmethod
    def read(plain: Mapping[str, Any]) -> Index:
        """Return the index that `plain` made; what newer versions may add is left out."""
        partitions = [
            StoredPartition(
                part["group"],
                part["numel"],
                {
                    name: StoredParameter(
                        tuple(one["shape"]), one["dtype"], Division(*(one[field] for field in Division._fields))
                    )
                    for name, one in part["parameters"].items()
                },
            )
            for part in plain["partitions"]
        ]
        return Index(plain["stage"], plain["ranks"], plain["precision"], plain["is_swapped"], tuple(partitions))


def index_of(engine: Any, optimizer: Muon) -> Index | None:
    """Return where this run stores its parameters; None where that cannot be said by their names in the model.

    None also if DeepSpeed does not number its files by the ranks of the partitions.

    Args:
        engine: DeepSpeed's.
        optimizer: that the engine steps with.
    """
    zero, stage = engine.optimizer, int(engine.zero_optimization_stage())
    names = {param: unwrapped(name) for name, param in engine.module.named_parameters()}
    dtypes = {param: str(param.dtype).removeprefix("torch.") for param in names}
    precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    partitions = optimizer.partitioned.partitions
    if partitions is None:
        if stage != 0:
            return None
        groups = [group["params"] for group in zero.param_groups] if isinstance(zero, Muon) else zero.fp16_groups
        if any(param not in names for params in groups for param in params):
            return None
        whole = [
            StoredPartition(
                group,
                param.numel(),
                {
                    names[param]: StoredParameter(
                        tuple(param.shape), dtypes[param], Division(param.numel(), param.numel())
                    )
                },
            )
            for group, params in enumerate(groups)
            for param in params
        ]
        return Index(stage, 1, precision, False, tuple(whole))
    rank, ranks = dist.get_rank(zero.dp_process_group), dist.get_world_size(zero.dp_process_group)
    if stage == 0 or any((one.rank, one.group.size()) != (rank, ranks) for one in partitions.values()):
        return None
    if getattr(zero, "swap_optimizer", False):
        return Index(stage, ranks, precision, True, ())
    dtype_of = {name: dtypes[param] for param, name in names.items()}
    if any(unwrapped(part.name) not in dtype_of for one in partitions.values() for part in one.slices):
        return None
    group_of = getattr(zero, "sub_group_to_group_id", {})
    stored = [
        StoredPartition(
            group_of.get(i, i),
            flat.numel(),
            {
                (name := unwrapped(part.name)): StoredParameter(tuple(part.shape), dtype_of[name], part.division)
                for part in partition.slices
                if part.division is not None
            },
        )
        for i, (flat, partition) in enumerate(partitions.items())
    ]
    return Index(stage, ranks, precision, False, tuple(stored))


class Copy(NamedTuple):
    """Consecutive elements of one parameter: where they lie in a file, and where in this rank's partitions."""

    source: int
    begin: int
    target: int
    at: int
    numel: int


def copies_of(source: Index, target: Index, rank: int) -> dict[int, list[Copy]]:
    """Return, for each rank that wrote the source, what a rank of the target takes from its file."""
    stored, copies = source.parameters, defaultdict(list)
    for k, partition in enumerate(target.partitions):
        for name, parameter in partition.parameters.items():
            if name not in stored:
                continue
            number, there = stored[name]
            first, last, at = parameter.division.held(rank)
            for source_rank, begin, end, where in there.division.overlaps(first, last):
                copies[source_rank].append(Copy(number, where, k, at + begin - first, end - begin))
    return dict(copies)


def whole(parameters: Mapping[str, tuple[int, StoredParameter]]) -> Index:
    """Return the layout in which one rank stores whole parameters."""
    partitions = []
    for name, (_, one) in parameters.items():
        whole = one._replace(division=Division(one.division.numel, one.division.numel))
        partitions.append(StoredPartition(0, whole.division.numel, {name: whole}))
    return Index(0, 1, "", False, tuple(partitions))
