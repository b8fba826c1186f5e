"""The storage of an optimizer's parameters, and the work of each param group's step that follows from it."""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_muon.config import COMM_DTYPES, check_option
from hf_muon.diagnostics.log import first_few
from hf_muon.distributed.exchange import Exchange, exchanges_of
from hf_muon.distributed.units import Matrix
from hf_muon.math.momentum import update_dtype
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.math.torch_private import shard_orders
from hf_muon.optimizer.groups import list_complaints
from hf_muon.optimizer.state import DTYPE_OPTIONS, blocks_complaint, check_params, describe, dtype_of
from hf_muon.routing.live_models import holder_of
from hf_muon.storage import views
from hf_muon.storage.boxes import SharedStorage, replicated
from hf_muon.storage.factors import KEY, FactorRuns, factor_runs, factors_of, has_factors
from hf_muon.storage.partitions import Partition, Partitions
from hf_muon.storage.tensors import (
    is_dtensor,
    local_of,
    model_device,
    shape_of,
    storage_complaint,
    unattached_complaint,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = Mapping[str, Any]


@dataclass(frozen=True)
class GroupWork:
    """The work of a step of one param group.

    Positions of matrices are those in `matrices`; `Matrix.param` leads from there to the parameters.

    Attributes:
        shared: for each parameter, the ranks that store it together; None if only this process stores it.
        matrices: all matrices of a Muon group; empty for an AdamW group.
        exchanges: orthogonalize the matrices, which they know by position; empty for an AdamW group.
        factors: the factors of each parameter's elements in an AdamW group; empty where all are 1.
        max_batch_bytes: the option of `Muon`.
    """

    shared: list[SharedStorage | None]
    matrices: list[Matrix] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    factors: list[FactorRuns] = field(default_factory=list)
    max_batch_bytes: int = MAX_BATCH_BYTES

    @property
    def devices(self) -> list[torch.device]:
        """The devices on which matrices are orthogonalized."""
        return sorted({exchange.device for exchange in self.exchanges}, key=str)


class StepLayout:
    """The storage of the parameters of all groups, and the work of a step that follows from it.

    Making a layout sends no tensors, but may create process groups, once for a set of ranks, for which these ranks must
    be together: one for each device mesh of two or more axes, and, when `root` is first read, one for all ranks of a
    step if no existing group has just these. For that, the ranks gather their lists unless one group spans the world.

    Attributes:
        process_groups: over which parameters are stored; none if no other process stores them.
        is_whole: whether each rank stores all parameters whole.
        devices: where this rank stores parameters.
        trained: the ids of parameters that required gradients when the layout was made.
        first_device: the device of the first parameter that has one.
        works: for each group, the work of its step. Empty if `complaints` came too early.
        complaints: why parameters cannot be stepped as they are stored.
        lines: what must be the same on all ranks, in words.
        digest: a hash of `lines`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        replicate_group: ProcessGroup | None,
        partitions: Partitions | None,
        comm_dtype: str,
        max_batch_bytes: int,
        model: nn.Module | None,
    ) -> None:
        # First the process groups, which are made together: whatever fails after that, all ranks learn from the step.
        self.process_groups = process_groups_of(groups, replicate_group, partitions)
        self.is_whole = set(self.process_groups) <= {replicate_group}
        self.first_device = first_device_of(groups)
        self.devices: list[torch.device] = []
        self.trained: set[int] = set()
        self.works: list[GroupWork] = []
        self.complaints: list[str] = []
        self.lines: list[str] = []
        with self.guarded(self.complaints):
            check_params(groups)
            # They may be written between steps, too.
            max_batch_bytes = check_option("max_batch_bytes", max_batch_bytes)
            dtype = COMM_DTYPES[check_option("comm_dtype", comm_dtype)]
            partitions = partitions or {}
            self.trained = {id(param) for param in params_of(groups) if param.requires_grad}
            self.devices = list(dict.fromkeys(param.device for group in groups for param in group["params"]))
            stored = list(_who_stores(groups, replicate_group, partitions, self.complaints))
            for group, ranks in zip(groups, stored, strict=True):
                work = GroupWork(ranks)
                if group["use_muon"] and not self.complaints:
                    matrices = list(_matrices(group, ranks, partitions))
                    exchanges = exchanges_of(matrices, dtype, max_batch_bytes)
                    work = GroupWork(ranks, matrices, exchanges, max_batch_bytes=max_batch_bytes)
                elif has_factors(group) and not self.complaints:
                    work = GroupWork(ranks, factors=factor_runs(group, partitions))
                self.works.append(work)
            if not self.complaints:
                self.lines = [f"max_batch_bytes={max_batch_bytes}, comm_dtype={comm_dtype}", *lines_of(groups)]
                if not partitions:
                    self.lines += _place_lines(groups, self.works, model, self.complaints)
        self.digest = hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).hexdigest()

    @property
    def root(self) -> ProcessGroup | None:
        """The group of all ranks that take part in a step; None if no other process stores these parameters."""
        if not self.process_groups:
            return None
        from hf_muon.distributed.groups import root_group

        return root_group(self.process_groups)

    @contextlib.contextmanager
    def guarded(self, complaints: list[str]) -> Iterator[None]:
        """Turn an error into a complaint if other ranks wait for this one."""
        try:
            yield
        except Exception as error:
            if not self.process_groups:
                raise
            complaints.append(f"{type(error).__name__}: {error}")


def storage_of(groups: Sequence[Group]) -> list[Any]:
    """Return the storage of parameters on which a `StepLayout` depends, to compare."""
    # As text: values that are wrong become complaints of all ranks later, and must not raise here on one of them.
    texts = [(dtype_of(group), *(str(group.get(key)) for key in ("use_muon", "views", KEY))) for group in groups]
    return [*texts, *map(_storage, params_of(groups))]


_OF_TENSOR = operator.attrgetter("shape", "dtype", "device")
# Private names of torch, because every step asks for each parameter: the public ones take 30 times as long.
_OF_DTENSOR = operator.attrgetter("_local_tensor.dtype", "_local_tensor.device", "_local_tensor", "_spec")


def _storage(param: Tensor) -> tuple[Any, ...]:
    """Return a value that changes with the storage of a parameter. Fast: every step calls it for each parameter."""
    if not is_dtensor(param):
        return id(param), type(param), *_OF_TENSOR(param)  # `torch.utils.swap_tensors` changes only the class
    dtype, device, local, spec = _OF_DTENSOR(param)
    return id(param), dtype, device, id(local), spec


def params_of(groups: Sequence[Group]) -> list[Tensor]:
    """Return all parameters, also of groups of which one has lost its own."""
    return [param for group in groups for param in group.get("params", ())]


def first_device_of(groups: Sequence[Group]) -> torch.device:
    """Return the device of the first parameter that has one; the CPU where none has."""
    for param in params_of(groups):
        with contextlib.suppress(Exception):
            return local_of(param).device
    return torch.device("cpu")


def process_groups_of(
    groups: Sequence[Group], replicate_group: ProcessGroup | None = None, partitions: Partitions | None = None
) -> list[ProcessGroup]:
    """Return the process groups over which parameters are stored, each once, in the same order on all ranks.

    A rank of which all parameters are gone has those of replicas.
    """
    params, partitions = params_of(groups), partitions or {}
    process_groups = [partitions[param].group for param in params if param in partitions]
    if any(map(is_dtensor, params)):
        from hf_muon.distributed.groups import mesh_groups

        process_groups += mesh_groups([param.device_mesh for param in params if is_dtensor(param)])  # type: ignore[attr-defined]
    has_plain = not params or any(param not in partitions and not is_dtensor(param) for param in params)
    if has_plain and replicate_group is not None and replicate_group.size() > 1:
        process_groups.append(replicate_group)
    return list(dict.fromkeys(process_groups))


# --- who stores a parameter


def _who_stores(
    groups: Sequence[Group], replicate_group: ProcessGroup | None, partitions: Partitions, complaints: list[str]
) -> Iterator[list[SharedStorage | None]]:
    """Yield who stores each parameter of each group, and add to `complaints` why some cannot be stepped."""
    # By kind: a model has thousands of parameters that are stored in a few ways.
    cache: dict[Hashable, tuple[str | None, SharedStorage | None]] = {}
    for group in groups:
        storages: list[SharedStorage | None] = []
        for i, (param, view) in enumerate(zip(group["params"], views.views_of(group), strict=True)):
            storage: SharedStorage | None = None
            partition = partitions.get(param)
            complaint = storage_complaint(param)
            if partition is not None:
                complaint = complaint or _partition_complaint(group)
                storage = SharedStorage(partition.group, ())
            else:
                complaint = (
                    complaint
                    or unattached_complaint(param, is_matrix=group["use_muon"])
                    or blocks_complaint(group, param)
                    or (group["use_muon"] and views.complaint(view, shape_of(param)))
                )
                if not complaint:
                    kind = _storage_kind(param)
                    if kind not in cache:
                        cache[kind] = _shared_storage(param, replicate_group)
                    complaint, storage = cache[kind]
            if complaint:
                complaints.append(f"{describe(group, i)} {complaint}")
            storages.append(storage)
        yield storages
    # Partitions replace parameters, and empty the groups that are not stepped: lists do not fit there.
    if not (partitions or complaints):
        for k, group in enumerate(groups):
            complaints += [f"param group {k} has {text}" for text in list_complaints(group)]


def _partition_complaint(group: Group) -> str | None:
    """Return why a flat partition cannot be stepped with the options of its group; None if it can."""
    if dtype_of(group) == "int8":
        return (
            "is a flat ZeRO partition, which cuts matrices anywhere, and "
            f"{DTYPE_OPTIONS[bool(group['use_muon'])]}=int8 keeps a scale for every 64 elements of a row. Use bf16 "
            "[int8-partition]"
        )
    return None


def _storage_kind(param: Tensor) -> Hashable:
    """Return what parameters have in common for which `_shared_storage` need be asked once."""
    if not is_dtensor(param):
        return tuple(param.shape)
    local = local_of(param)
    orders = tuple(shard_orders(param).items())  # type: ignore[arg-type]
    placed = tuple(param.placements), id(param.device_mesh)  # type: ignore[attr-defined]
    return tuple(param.shape), tuple(local.shape), local.device.type, orders, *placed


def _shared_storage(param: Tensor, replicate_group: ProcessGroup | None) -> tuple[str | None, SharedStorage | None]:
    """Return why a parameter cannot be stepped, or None; and who stores it, None for only this process."""
    shape = tuple(param.shape)
    if not is_dtensor(param):
        is_shared = replicate_group is not None and replicate_group.size() > 1
        return None, replicated(shape, replicate_group) if is_shared else None
    from torch.distributed import get_process_group_ranks

    from hf_muon.distributed.groups import backend_complaint, mesh_group
    from hf_muon.storage.dtensor import mesh_complaint, mesh_regions

    if complaint := mesh_complaint(param) or backend_complaint(param):  # type: ignore[arg-type]
        return complaint, None
    group = mesh_group(param.device_mesh)  # type: ignore[attr-defined]
    return None, SharedStorage(group, shape, mesh_regions(param, get_process_group_ranks(group)))  # type: ignore[arg-type]


# --- where matrices lie


def _matrices(group: Group, storages: Sequence[SharedStorage | None], partitions: Partitions) -> Iterator[Matrix]:
    """Yield the matrices of a Muon group, in the order of its parameters."""
    factors = factors_of(group)
    for i, (param, storage, text) in enumerate(zip(group["params"], storages, views.views_of(group), strict=True)):
        dtype = update_dtype(param, dtype_of(group))
        partition = partitions.get(param)
        if partition is not None:
            yield from _matrices_of_partition(i, partition, dtype)
            continue
        view, device = views.parse(text), model_device(param)
        storage = storage or replicated(shape_of(param), None)
        for shape, shards in zip(view.shapes(storage.shape), storage.shards(view), strict=True):
            yield Matrix(i, shape, shards, storage.group, device, dtype, view.transposed, factor=factors[i])


def _matrices_of_partition(index: int, partition: Partition, dtype: torch.dtype) -> Iterator[Matrix]:
    """Yield the matrices of the parameters in a flat partition, in the order of its slices."""
    for slice_ in partition.slices:
        elements = slice_.elements(partition.rank)
        for shape, shards in zip(slice_.view.shapes(slice_.shape), slice_.shards(), strict=True):
            yield Matrix(
                index,
                shape,
                shards,
                partition.group,
                partition.device,
                dtype,
                slice_.view.transposed,
                elements,
                slice_.name,
                slice_.factor,
            )


# --- texts that must be equal on all ranks


def lines_of(groups: Sequence[Group]) -> Iterator[str]:
    """Yield texts about param groups that must be equal on all ranks: numbers of parameters, their storage, factors."""
    sizes = [len(group["params"]) for group in groups]
    yield f"{sum(sizes)} parameters, in param groups of {' and '.join(map(str, sizes))}"
    for group in groups:
        for i, view in enumerate(views.views_of(group)):
            yield _parameter_line(group, i, view)
    for k, group in enumerate(groups):
        if has_factors(group):
            names = group.get("param_names") or []
            for i, factor in enumerate(factors_of(group)):
                name = names[i] if i < len(names) else f"parameter {i} of param group {k}"
                if factor != 1:
                    yield f"{name} with the learning rate times {factor}"


def _place_lines(
    groups: Sequence[Group], works: Sequence[GroupWork], model: nn.Module | None, complaints: list[str]
) -> Iterator[str]:
    """Yield where shared parameters without a name stand in their model: by shape and position they look alike."""
    nameless = {
        param: describe(group, i)
        for group, work in zip(groups, works, strict=True)
        for i, (param, place) in enumerate(zip(group["params"], work.shared, strict=True))
        if place is not None and not group.get("param_names")
    }
    places = {param: k for k, param in enumerate(holder_of(nameless, model).parameters())} if nameless else {}
    if nameless.keys() <= places.keys():
        yield from (f"{text}, number {places[param]} of its model" for param, text in nameless.items())
        return
    # That plain ones are replicas is said by DDP, whose model is known, or by `replicate_group`.
    shapes = Counter(param.shape for param in filter(is_dtensor, nameless))
    if alike := [text for param, text in nameless.items() if is_dtensor(param) and shapes[param.shape] > 1]:
        complaints.append(
            f"ranks store a part each of {first_few(alike)}, and cannot know that they mean the same ones: these have "
            "no names, and no live model has them all. Give (name, parameter) pairs, as model.named_parameters() "
            "yields them [no-names]"
        )


def _parameter_line(group: Group, index: int, view: str) -> str:
    param = group["params"][index]
    # The mesh by its shape, not by its ranks: those differ between the submeshes of one mesh.
    stored = f"{param.placements} on a mesh of {tuple(param.device_mesh.shape)}" if is_dtensor(param) else "plain"
    route = "Muon" if group["use_muon"] else "AdamW"
    matrices = f", seen as {view!r}" if view else ""
    return f"{describe(group, index)} {param.dtype} {param.device.type} {stored} {route}{matrices}"
