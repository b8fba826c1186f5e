"""Before a step: how parameters are stored, what speaks against stepping them, and what all ranks make of it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_muon import checkpoint, gradients, views
from hf_muon.coefficients import resolve
from hf_muon.config import GROUP_OPTIONS, check_option
from hf_muon.distributed import (
    Executor,
    Partition,
    Partitions,
    Shared,
    alone,
    compute_device,
    home_of,
    is_dtensor,
    local_of,
    select_executors,
    shape_of,
    shared,
    storage_complaint,
)
from hf_muon.distributed.layout import Stored
from hf_muon.momentum import update_dtype
from hf_muon.newton_schulz import compute_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = Mapping[str, Any]

PARTING = (
    "{name} has a gradient on rank {having} and none on rank {lacking}, which store the same part of it: replicas "
    "would part. Let every rank use it, or reduce gradients over all ranks (DDP: find_unused_parameters=True)"
)


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


class Layout:
    """How the parameters of all groups are stored, and what follows from it. Made anew when storage changes.

    Attributes:
        places: for each group, who shares each parameter.
        matrices: for each group, what its executors know as parameters; empty for AdamW groups.
        executors: for each group, what orthogonalizes its matrices; empty for AdamW groups.
        devices: for each group, where its matrices are orthogonalized.
        complaints: why parameters cannot be stepped as they are stored.
        root: the group of all ranks that take part in a step; None where this process is alone with its parameters.
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
        talking: list[ProcessGroup] = []
        for group in groups:
            places: list[Shared | None] = []
            for i, param in enumerate(group["params"]):
                partition = (partitions or {}).get(param)
                complaint = storage_complaint(param) or _zero_complaint(group, param, partition)
                complaint = complaint or checkpoint.blocks_complaint(group, param)
                if partition is not None:
                    if complaint:
                        self.complaints.append(f"{checkpoint.describe(group, i)} {complaint}")
                    talking.append(partition.group)
                    places.append(Shared(partition.group, ()))
                    continue
                if is_dtensor(param):
                    from hf_muon.distributed.dtensor import mesh_complaint, mesh_group

                    if param.device_mesh.get_coordinate() is not None:
                        talking.append(mesh_group(param.device_mesh))
                    complaint = complaint or mesh_complaint(param)
                if complaint:
                    self.complaints.append(f"{checkpoint.describe(group, i)} {complaint}")
                places.append(None if complaint else shared(param, replicate_group))
            self.places.append(places)
            talking += [place.group for place in places if place]
        self.root = None
        if talking:
            from hf_muon.distributed.agreement import root_group

            self.root = root_group(talking)
        for group, places in zip(groups, self.places, strict=True):
            matrices: list[Matrix] = []
            executors: list[Executor] = []
            devices: list[torch.device] = []
            if group["use_muon"] and not self.complaints:
                params = group["params"]
                stored: list[Shared | Stored] = []
                homes: list[torch.device] = []
                for i, (param, place, text) in enumerate(zip(params, places, views.views_of(group), strict=True)):
                    partition = (partitions or {}).get(param)
                    if partition is None:
                        shape, view = shape_of(param), views.parse(text)
                        found = [Matrix(i, part, view.transposed) for part in view.shapes(shape)]
                        stored += place.seen_as(view, shape) if place else alone(view, shape)
                        matrices += found
                        home = home_of(param)
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
        self.lines = [_line(group, i, view) for group in groups for i, view in enumerate(views.views_of(group))]
        self.lines.append(
            f"max_bucket_bytes={max_bucket_bytes}, comm_dtype={comm_dtype}, offload_compute={offload_compute}"
        )
        self.digest = hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).hexdigest()


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
    """What a `Layout` depends on."""
    seen: list[Any] = [(tuple(group.get("views") or ()), group.get("momentum_dtype")) for group in groups]
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


def agree(
    groups: Sequence[Group], layout: Layout, complaints: Sequence[str], *, may_be_idle: bool = False
) -> list[list[int]] | None:
    """Which parameters of each group to step, the same on all ranks, or the same error on all of them.

    A sharded parameter is stepped where any rank has a gradient for it; a rank without one has a part that is zero.

    Args:
        groups: param groups.
        layout: of these groups.
        complaints: what speaks against the step, on this rank.
        may_be_idle: whether to look for gradients that are all zero.

    Returns:
        Indices for each group, or None for an idle step.

    Raises:
        RuntimeError: every complaint of every rank.
    """
    stop = functools.partial(refuse, head=layout.head)
    bits = [param.grad is not None for group in groups for param in group["params"]]
    flags = gradients.flags([] if complaints else groups, may_be_idle=may_be_idle)
    if layout.root is None:
        stop(complaints)
        bad, moves = flags.tolist()
        if bad:
            stop(gradients.bad_names(groups), gradients.NOT_FINITE)
        return _by_group(groups, bits) if moves else None

    from hf_muon.distributed import agreement

    options = _option_lines(groups, layout)
    fingerprint = hashlib.blake2b("\n".join([layout.digest, *options]).encode(), digest_size=7).digest()
    heard = agreement.exchange_words(layout.root, int.from_bytes(fingerprint, "big"), bool(complaints), flags, bits)
    if any(said.complains for said in heard):
        stop(together(agreement.exchange_texts(layout.root, complaints)))
    if len({said.fingerprint for said in heard}) > 1:
        stop(_differences(agreement.exchange_texts(layout.root, [*options, *layout.lines])))
    if any(said.bits != heard[0].bits for said in heard):
        bits, parting = _reconciled(groups, layout, [said.bits for said in heard])
        stop(together(agreement.exchange_texts(layout.root, parting)))
    if any(said.flags[0] for said in heard):
        names = gradients.bad_names(groups) if flags[0].item() else []
        stop(together(agreement.exchange_texts(layout.root, names)), gradients.NOT_FINITE)
    return _by_group(groups, bits) if any(said.flags[1] for said in heard) else None


def complaints_of_all(groups: Sequence[Group], complaints: Sequence[str]) -> list[str]:
    """The complaints of all ranks that store parameters together as DTensors; otherwise this rank's own."""
    meshes = [param.device_mesh for group in groups for param in group["params"] if is_dtensor(param)]
    if not meshes:
        return list(complaints)
    from hf_muon.distributed.agreement import exchange_texts, root_group
    from hf_muon.distributed.dtensor import mesh_group

    return together(exchange_texts(root_group([mesh_group(mesh) for mesh in meshes]), complaints))


def refuse(complaints: Sequence[str], advice: str = "", head: str = REFUSED) -> None:
    """Raise if there are complaints."""
    if complaints:
        lines = [*complaints[:10], *([f"and {len(complaints) - 10} more"] if len(complaints) > 10 else [])]
        raise RuntimeError(head + ":\n  - " + "\n  - ".join(lines) + advice)


def _by_group(groups: Sequence[Group], bits: Sequence[bool]) -> list[list[int]]:
    rest = iter(bits)
    return [
        [i for i, (param, bit) in enumerate(zip(group["params"], rest, strict=False)) if bit and param.numel()]
        for group in groups
    ]


def _option_lines(groups: Sequence[Group], layout: Layout) -> list[str]:
    lines = []
    for k, (group, devices) in enumerate(zip(groups, layout.devices, strict=True)):
        values = {name: float(group[name]) if name == "lr" else group[name] for name in GROUP_OPTIONS}
        lines += [f"{name}={values[name]!r} in param group {k}" for name in GROUP_OPTIONS]
        if group["use_muon"]:
            types = sorted({device.type for device in devices})
            lines += [f"Newton-Schulz in {compute_dtype(group['ns_dtype'], type_)} on {type_}" for type_ in types]
    return lines


def together(texts: Sequence[Sequence[str]]) -> list[str]:
    """What ranks say, once each, with the ranks that say it where not all do."""
    ranks: dict[str, list[int]] = {}
    for rank, lines in enumerate(texts):
        for line in lines:
            ranks.setdefault(line, []).append(rank)
    return [
        line if len(who) == len(texts) else f"{line} [rank {', '.join(map(str, who))}]" for line, who in ranks.items()
    ]


def _differences(texts: Sequence[Sequence[str]]) -> list[str]:
    for lines in zip(*texts, strict=False):
        if len(set(lines)) > 1:
            other = next(rank for rank, line in enumerate(lines) if line != lines[0])
            return [f"the ranks disagree: rank 0 has {lines[0]}, rank {other} has {lines[other]}"]
    return [f"the ranks disagree on the number of parameters or param groups: {[len(lines) for lines in texts]}"]


def _reconciled(
    groups: Sequence[Group], layout: Layout, said: Sequence[Sequence[bool]]
) -> tuple[list[bool], list[str]]:
    """Where some ranks have a gradient and others none: which parameters to step, and whose replicas would part."""
    import torch.distributed as dist

    root = layout.root
    assert root is not None
    position = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(root))}
    mine = said[dist.get_rank(root)]
    bits: list[bool] = []
    parting: list[str] = []
    for group, places in zip(groups, layout.places, strict=True):
        for i, place in enumerate(places):
            k = len(bits)
            if place is None:
                bits.append(mine[k])
                continue
            has = [said[position[rank]][k] for rank in dist.get_process_group_ranks(place.group)]
            bits.append(any(has))
            for region in dict.fromkeys(place.regions):
                alike = [r for r, other in enumerate(place.regions) if other == region and region.numel]
                if len({has[r] for r in alike}) > 1:
                    having, lacking = ([r for r in alike if has[r] is wanted] for wanted in (True, False))
                    name = checkpoint.describe(group, i)
                    parting.append(
                        PARTING.format(
                            name=name, having=", ".join(map(str, having)), lacking=", ".join(map(str, lacking))
                        )
                    )
                    break
    return bits, parting
