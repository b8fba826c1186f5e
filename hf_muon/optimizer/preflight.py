"""Before a step: how parameters are stored, and what speaks against stepping them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_muon.config import GROUP_OPTIONS, check_option
from hf_muon.distributed.executor import Executor
from hf_muon.distributed.select import compute_device, model_device, select_executors, shared
from hf_muon.math.coefficients import resolve
from hf_muon.math.momentum import update_dtype
from hf_muon.math.newton_schulz import compute_dtype
from hf_muon.optimizer import state as checkpoint
from hf_muon.storage import views
from hf_muon.storage.partitions import Partition, Partitions
from hf_muon.storage.regions import Stored
from hf_muon.storage.shared import Shared, alone
from hf_muon.storage.tensors import is_dtensor, local_of, shape_of, storage_complaint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = Mapping[str, Any]

REFUSED = "Muon refuses this step; weights and moments are as they were"
REFUSED_PARTITION = "Muon refuses this step; what ZeRO had stepped before it has moved, the rest is as it was"


class Matrix(NamedTuple):
    """A matrix ``(m, n)`` or a stack ``(B, m, n)`` of a Muon group.

    Attributes:
        param: the position in the group of what stores it.
        shape: of the whole, as it is stored.
        transposed: whether it is stored as ``(in, out)``.
        elements: those of its parameter in a flat partition; None where a parameter is no part of one.
        name: of its parameter in a flat partition.
    """

    param: int
    shape: tuple[int, ...]
    transposed: bool = False
    elements: slice | None = None
    name: str = ""

    @property
    def out_in(self) -> tuple[int, int]:
        """Fan-out and fan-in."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    def of(self, local: Tensor) -> Tensor:
        """What of a tensor that is stored like the param group's belongs to this one's parameter; a view."""
        return local if self.elements is None else local[self.elements]


class StepLayout:
    """How the parameters of all groups are stored, and what follows from it. Made anew when storage changes.

    Attributes:
        places: for each group, who shares each parameter.
        matrices: for each group, what its executors know as parameters; empty for AdamW groups.
        executors: for each group, what orthogonalizes its matrices; empty for AdamW groups.
        devices: for each group, where its matrices are orthogonalized.
        complaints: why parameters cannot be stepped as they are stored.
        talking: process groups over which parameters are stored; none where this process is alone with its parameters.
        lines: what must be the same on all ranks, in words.
        head: how an error of a step begins. ZeRO steps one partition after the other.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        replicate_group: ProcessGroup | None,
        max_bucket_bytes: int,
        comm_dtype: torch.dtype | None,
        partitions: Partitions | None = None,
        offload_compute: str = "auto",
    ) -> None:
        self.key = storage_key(groups)
        self.head = REFUSED_PARTITION if partitions else REFUSED
        self.complaints: list[str] = []
        self.places: list[list[Shared | None]] = []
        self.matrices: list[list[Matrix]] = []
        self.executors: list[list[Executor]] = []
        self.devices: list[list[torch.device]] = []
        self.lines: list[str] = []
        self.talking = _talking(groups, replicate_group, partitions or {})
        with self.guarded(self.complaints):
            self._place(groups, replicate_group, partitions or {})
            self._plan(groups, max_bucket_bytes, comm_dtype, partitions or {}, offload_compute)
            sizes = [len(group["params"]) for group in groups]
            self.lines = [
                f"{sum(sizes)} parameters, in param groups of {' and '.join(map(str, sizes))}",
                f"max_bucket_bytes={max_bucket_bytes}, comm_dtype={comm_dtype}, offload_compute={offload_compute}",
                *(_line(group, i, view) for group in groups for i, view in enumerate(views.views_of(group))),
            ]
        self.digest = hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).hexdigest()

    @property
    def root(self) -> ProcessGroup | None:
        """The group of all ranks that take part in a step; None where this process is alone with its parameters."""
        if not self.talking:
            return None
        from hf_muon.distributed.groups import root_group

        return root_group(self.talking)

    @contextmanager
    def guarded(self, complaints: list[str]) -> Iterator[None]:
        """Turn an error into a complaint where other ranks wait for this one."""
        try:
            yield
        except Exception as error:
            if not self.talking:
                raise
            complaints.append(f"{type(error).__name__}: {error}")

    def _place(self, groups: Sequence[Group], replicate_group: ProcessGroup | None, partitions: Partitions) -> None:
        """See who shares each parameter."""
        for group in groups:
            places: list[Shared | None] = []
            for i, param in enumerate(group["params"]):
                partition = partitions.get(param)
                complaint = storage_complaint(param) or _zero_complaint(group, param, partition)
                complaint = complaint or checkpoint.blocks_complaint(group, param)
                if partition is None and is_dtensor(param):
                    from hf_muon.distributed.groups import backend_complaint
                    from hf_muon.storage.dtensor import mesh_complaint

                    complaint = complaint or mesh_complaint(param) or backend_complaint(param)
                if complaint:
                    self.complaints.append(f"{checkpoint.describe(group, i)} {complaint}")
                if partition is not None:
                    places.append(Shared(partition.group, ()))
                else:
                    places.append(None if complaint else shared(param, replicate_group))
            self.places.append(places)

    def _plan(
        self,
        groups: Sequence[Group],
        max_bucket_bytes: int,
        comm_dtype: torch.dtype | None,
        partitions: Partitions,
        offload_compute: str,
    ) -> None:
        """Choose what orthogonalizes each matrix, and where."""
        for group, places in zip(groups, self.places, strict=True):
            matrices: list[Matrix] = []
            executors: list[Executor] = []
            devices: list[torch.device] = []
            if group["use_muon"] and not self.complaints:
                params = group["params"]
                stored: list[Shared | Stored] = []
                homes: list[torch.device] = []
                for i, (param, place, text) in enumerate(zip(params, places, views.views_of(group), strict=True)):
                    partition = partitions.get(param)
                    if partition is None:
                        shape, view = shape_of(param), views.parse(text)
                        found = [Matrix(i, part, view.transposed) for part in view.shapes(shape)]
                        stored += place.seen_as(view, shape) if place else alone(view, shape)
                        matrices += found
                        home = model_device(param)
                        homes += [home] * len(found)
                        devices += [compute_device(local_of(param).device, home, offload_compute)] * len(found)
                        continue
                    for part in partition.slices:
                        elements = part.elements(partition.rank)
                        found = [
                            Matrix(i, shape, part.view.transposed, elements, part.name)
                            for shape in part.view.shapes(part.shape)
                        ]
                        stored += part.shared(partition.group)
                        matrices += found
                        homes += [partition.device] * len(found)
                        devices += [compute_device(param.device, partition.device, offload_compute)] * len(found)
                executors = select_executors(
                    [matrix.shape for matrix in matrices],
                    stored,
                    [update_dtype(params[matrix.param], group.get("momentum_dtype", "auto")) for matrix in matrices],
                    devices,
                    homes,
                    max_bucket_bytes=max_bucket_bytes,
                    comm_dtype=comm_dtype,
                )
            self.matrices.append(matrices)
            self.executors.append(executors)
            self.devices.append(sorted(set(devices), key=str))


def _talking(
    groups: Sequence[Group], replicate_group: ProcessGroup | None, partitions: Partitions
) -> list[ProcessGroup]:
    """Return the process groups over which parameters are stored, each once, in an order that is fixed."""
    params = [param for group in groups for param in group["params"]]
    talking = [partitions[param].group for param in params if param in partitions]
    if any(map(is_dtensor, params)):
        from hf_muon.distributed.groups import mesh_groups

        talking += mesh_groups(param.device_mesh for param in params if is_dtensor(param))
    plain = any(param not in partitions and not is_dtensor(param) for param in params)
    if plain and replicate_group is not None and replicate_group.size() > 1:
        talking.append(replicate_group)
    return list(dict.fromkeys(talking))


def _zero_complaint(group: Group, param: Tensor, partition: Partition | None) -> str | None:
    """Why a parameter that DeepSpeed has a hand in cannot be stepped."""
    if partition is not None:
        if not (group["use_muon"] and group.get("momentum_dtype") == "int8"):
            return None
        return (
            "is a partition of DeepSpeed ZeRO, which cuts matrices anywhere, and momentum_dtype=int8 keeps a scale for "
            "every 64 elements of a row. Use bf16"
        )
    if hasattr(param, "ds_id"):
        return "is partitioned by DeepSpeed ZeRO-3, and stepped without it. Step the engine: engine.step()"
    if group["use_muon"] and len(shape_of(param)) < 2:
        return (
            f"has been replaced by a tensor of shape {shape_of(param)}, in which nothing tells the matrices apart. "
            "DeepSpeed does so: start it with hf_muon.integrations.deepspeed.initialize, or with Accelerator.prepare"
        )
    return None


def storage_key(groups: Sequence[Group]) -> list[Any]:
    """What a `StepLayout` depends on."""
    # As text, so that what is wrong with them is said by all ranks, and not raised by this one here.
    seen: list[Any] = [(str(group.get("views")), str(group.get("momentum_dtype"))) for group in groups]
    return seen + [
        (
            id(param),
            param.shape,
            param.dtype,
            param.device,
            (param.placements, id(param.device_mesh)) if is_dtensor(param) else None,
        )
        for group in groups
        for param in group["params"]
    ]


def _line(group: Group, index: int, view: str) -> str:
    param = group["params"][index]
    # Not by its ranks, which differ between the submeshes of one mesh.
    stored = f"{param.placements} on a mesh of {tuple(param.device_mesh.mesh.shape)}" if is_dtensor(param) else "plain"
    route = "Muon" if group["use_muon"] else "AdamW"
    seen = f", seen as {view!r}" if view else ""
    return f"{checkpoint.describe(group, index)} {param.dtype} {param.device.type} {stored} {route}{seen}"


def hyperparameter_complaint(group: Group, devices: Sequence[torch.device] | None = None) -> str | None:
    """Why the options of a group cannot work, each by itself, with one another, or on the device.

    Schedulers, hooks and users write into a group between steps, so that every step looks again.

    Args:
        group: the param group.
        devices: where its matrices are orthogonalized; None before that is known.
    """
    if devices is None:
        # Not held against a model on the CPU that an accelerator is there for: it may be on its way.
        on_way = torch.accelerator.is_available()
        devices = [d for d in {param.device for param in group["params"]} if d.type != "cpu" or not on_way]
    try:
        for name in GROUP_OPTIONS:
            check_option(name, group.get(name))
        resolve(group["ns_coefficients"], group["ns_steps"])
        if group["use_muon"]:
            for device in devices:
                compute_dtype(group["ns_dtype"], device.type, device.index)
    except ValueError as error:
        return str(error)
    return None
