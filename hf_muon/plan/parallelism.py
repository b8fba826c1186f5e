"""How tensor and expert parallelism cut a model's parameters: by transformers' own code, on tensors without memory.

`DistributedConfig` of transformers names the sizes, and the model brings the plans: `tp_plan` says which projection is
cut by rows, by columns, in packed halves or not at all, `ep_plan` which experts go to other ranks. In a fake process
group, transformers applies them to a copy of the model on the meta device, and FSDP2 shards what they leave. Here the
result is read off: for each parameter the axes of its mesh, and a placement for each.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from logging import ERROR
from typing import Any

import torch
from torch import Tensor, nn

from hf_muon.storage.regions import regions
from hf_muon.storage.tensors import is_dtensor

LAYOUTS = ("tp", "fsdp", "hsdp")
"""Layouts that have tensor or expert parallelism."""
DENSE = ("dp_replicate", "fsdp", "tp")
EXPERT = ("dp_replicate", "efsdp", "ep")
"""Axes of the mesh of all ranks, on which parameters lie, and experts where they are distributed."""
_FSDP = ("fsdp", "efsdp")
_OLD = (
    "this version of transformers has no DistributedConfig, or one that does not shard into DTensors: a plan with "
    "tp_size or ep_size needs one that does (5.23)"
)


def all_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Return all axes of the ranks, among which are these."""
    return EXPERT if set(axes) & set(EXPERT[1:]) else DENSE


@dataclass(frozen=True)
class Sizes:
    """The ranks along each axis of a run, in the words of transformers' `DistributedConfig`.

    Ranks are numbered along the last axis first. Parameters lie on the axes `dp_replicate`, `fsdp` and `tp`, experts of
    expert parallelism on `dp_replicate`, `efsdp` and `ep`.
    """

    dp_replicate: int
    fsdp: int
    tp: int
    ep: int

    @property
    def efsdp(self) -> int:
        """Ranks that shard the same experts among them."""
        return self.fsdp * self.tp // self.ep

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.fsdp * self.tp

    def shape(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the sizes of some axes."""
        return tuple(getattr(self, axis) for axis in axes)

    def places(self, axes: Sequence[str]) -> list[int]:
        """Return each rank's place in its mesh of some axes, in row-major order."""
        order = all_axes(axes)
        places = torch.zeros(self.ranks, dtype=torch.int64)
        coordinates = torch.unravel_index(torch.arange(self.ranks), self.shape(order))
        for axis, coordinate in zip(order, coordinates, strict=True):
            if axis in axes:
                places = places * getattr(self, axis) + coordinate
        return [int(place) for place in places.tolist()]

    def members(self, axes: Sequence[str], rank: int) -> list[int]:
        """Return the ranks of the mesh of some axes that a rank is in, in ascending order."""
        order = all_axes(axes)
        mesh = torch.arange(self.ranks).reshape(self.shape(order))
        here = torch.unravel_index(torch.tensor(rank), mesh.shape)
        own = tuple(slice(None) if axis in axes else int(at) for axis, at in zip(order, here, strict=True))
        return [int(other) for other in mesh[own].flatten().tolist()]


@dataclass(frozen=True)
class Cut:
    """How the ranks store a parameter.

    Attributes:
        axes: of its mesh; none where every rank has all of it.
        placements: of torch, one for each axis.
    """

    axes: tuple[str, ...] = ()
    placements: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Cuts:
    """How the ranks store all parameters of a model.

    Attributes:
        sizes: of the axes.
        of_param: by the identity of the parameter.
        whole_gradients: identities of the parameters whose gradients every rank has whole: without FSDP2, torch's
            DTensor replicates that of an embedding, unless a head that is tied to it brings it into shards.
    """

    sizes: Sizes
    of_param: Mapping[int, Cut] = field(repr=False)
    whole_gradients: frozenset[int] = frozenset()

    def of(self, param: Tensor) -> Cut:
        """Return how a parameter is cut."""
        return self.of_param[id(param)]

    def stored(self, params: Iterable[Tensor]) -> list[int]:
        """Return how many elements of some parameters each rank stores."""
        total = torch.zeros(self.sizes.ranks, dtype=torch.int64)
        for param in params:
            cut = self.of(param)
            total += _numels(self.sizes, tuple(param.shape), cut)
        return [int(numel) for numel in total.tolist()]

    def gradients(self, params: Iterable[Tensor]) -> list[int]:
        """Return how many elements of some parameters' gradients each rank has after the backward pass."""
        params = list(params)
        whole = sum(param.numel() for param in params if id(param) in self.whole_gradients)
        cut = self.stored(param for param in params if id(param) not in self.whole_gradients)
        return [numel + whole for numel in cut]

    def gathered(self, param: Tensor) -> int:
        """Return the elements of a parameter that a rank has while the model computes with it, at most.

        FSDP2 gathers what it has cut; what tensor or expert parallelism has cut stays so.
        """
        cut = self.of(param)
        remaining = [(axis, own) for axis, own in zip(cut.axes, cut.placements, strict=True) if axis not in _FSDP]
        inner = Cut(tuple(axis for axis, _ in remaining), tuple(own for _, own in remaining))
        return int(_numels(self.sizes, tuple(param.shape), inner).max())

    def places(self, ranks: Sequence[int]) -> list[int]:
        """Return each rank's place in its own group, of those groups of which one consists of some ranks.

        Args:
            ranks: of a process group over which parameters are stored, in ascending order.
        """
        if len(ranks) == self.sizes.ranks:
            return list(range(self.sizes.ranks))
        for axes in dict.fromkeys(cut.axes for cut in self.of_param.values()):
            if axes and self.sizes.members(axes, ranks[0]) == list(ranks):
                return self.sizes.places(axes)
        raise AssertionError(f"no mesh has the ranks {ranks}")


@lru_cache(maxsize=1024)
def _numels(sizes: Sizes, shape: tuple[int, ...], cut: Cut) -> Tensor:
    """Return the elements of a tensor that each rank stores, ``(ranks,)``."""
    stored = [region.numel for region in regions(shape, sizes.shape(cut.axes), cut.placements)]
    return torch.tensor(stored)[torch.tensor(sizes.places(cut.axes))]


def sizes_of(layout: str, ranks: int, replicas: int, tp_size: int | None, ep_size: int) -> Sizes | None:
    """Return the sizes of a layout's axes; None where the layout has neither tensor nor expert parallelism.

    Args:
        layout: one of `step_plan.LAYOUTS`.
        ranks: number of ranks.
        replicas: copies of the model under `hsdp`.
        tp_size: ranks that cut a matrix; None for all of them under `tp`, and for one in other layouts.
        ep_size: ranks among which experts are distributed.

    Raises:
        ValueError: the layout has no such axis, or the sizes do not divide one another.
    """
    tp = tp_size if tp_size is not None else ranks if layout == "tp" else 1
    for name, size in (("tp_size", tp), ("ep_size", ep_size)):
        if size < 1:
            raise ValueError(f"{name}={size} is not valid: expected an integer of at least 1")
        if size > 1 and layout not in LAYOUTS:
            raise ValueError(f"{name}={size} needs layout {', '.join(LAYOUTS)}, and layout={layout}")
    if layout == "tp" and tp != ranks:
        raise ValueError(
            f"tp_size={tp} is not valid with layout=tp, where all of ranks={ranks} cut each matrix. For tensor "
            "parallelism within FSDP2 use layout=fsdp"
        )
    if layout not in LAYOUTS or (layout != "tp" and tp == ep_size == 1):
        return None
    copies = replicas if layout == "hsdp" else 1
    if ranks % (copies * tp):
        raise ValueError(
            f"tp_size={tp} does not divide the {ranks // copies} ranks of {'a replica' if copies > 1 else 'the run'}"
        )
    within = ranks // copies
    if ep_size > 1 and (ep_size % tp or within % ep_size):
        raise ValueError(
            f"ep_size={ep_size} is not valid: expected a multiple of tp_size={tp} that divides the {within} ranks of "
            f"{'a replica' if copies > 1 else 'the run'}"
        )
    return Sizes(copies, within // tp, tp, ep_size)


def cuts_of(model: nn.Module, sizes: Sizes) -> Cuts:
    """Return how transformers and FSDP2 cut a model's parameters. Call it in a fake process group of as many ranks.

    Args:
        model: of transformers, on any device. It is not changed.
        sizes: of the axes.

    Raises:
        ValueError: the sizes do not fit the model.
        RuntimeError: the model has no such plan, or transformers cannot apply it.
    """
    sharded = _sharded_copy(model, sizes)
    stored = dict(sharded.named_parameters(remove_duplicate=False))
    cuts = {id(param): _cut(stored[name]) for name, param in model.named_parameters()}
    if sizes.ep > 1 and not any("ep" in cut.axes for cut in cuts.values()):
        raise RuntimeError(
            f"ep_size={sizes.ep}: {type(model).__name__} has no experts that its ep_plan distributes. Leave ep_size out"
        )
    users = Counter(id(param) for module in model.modules() for param in module.parameters(recurse=False))
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and users[id(m.weight)] == 1]
    whole = frozenset(id(weight) for weight in embeddings if cuts[id(weight)].axes == ("tp",))
    return Cuts(sizes, cuts, whole)


def _cut(param: Tensor) -> Cut:
    if not is_dtensor(param):
        return Cut()
    return Cut(tuple(param.device_mesh.mesh_dim_names), tuple(param.placements))  # type: ignore[attr-defined]


def _sharded_copy(model: nn.Module, sizes: Sizes) -> nn.Module:
    """Return a copy of a model on the meta device, whose parameters transformers has replaced by DTensors."""
    from torch.distributed.device_mesh import init_device_mesh

    name = type(model).__name__
    sized = ", ".join(f"{axis}_size={size}" for axis, size in (("tp", sizes.tp), ("ep", sizes.ep)) if size > 1)
    try:
        from transformers import PreTrainedModel
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.utils import TransformersDeviceMesh
    except ImportError as error:
        raise RuntimeError(_OLD) from error
    if not isinstance(model, PreTrainedModel):
        raise RuntimeError(
            f"{sized} needs a model of transformers, whose plans say how it is cut, and {name} is none"
            f"{': plan the model without its adapter' if hasattr(model, 'peft_config') else ''}"
        )
    if not hasattr(model, "maybe_distribute_model"):
        raise RuntimeError(_OLD)
    for plan, size in (("tp_plan", sizes.tp), ("ep_plan", sizes.ep)):
        if size > 1 and not getattr(model, plan):
            raise RuntimeError(f"{sized}: {name} of transformers has no {plan}, so it is not known how it is cut")
    try:
        config = DistributedConfig(
            tp_size=sizes.tp, fsdp_size=sizes.fsdp, dp_replicate_size=sizes.dp_replicate, ep_size=sizes.ep
        )
        meshes = (
            init_device_mesh("cpu", (1, *sizes.shape(axes)), mesh_dim_names=("pp", *axes)) for axes in (DENSE, EXPERT)
        )
        with _quiet():
            sharded: nn.Module = model.maybe_distribute_model(
                _empty_copy(model), config, TransformersDeviceMesh(*meshes)
            )
    except ValueError as error:
        raise ValueError(f"{sized} does not fit {name}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"{sized}: transformers cannot shard {name}: {type(error).__name__}: {error}") from error
    return sharded


def _empty_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, without ties, as transformers has it while it loads a checkpoint."""
    empty: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    empty |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    copied = copy.deepcopy(model, empty)
    known = set()
    for module in copied.modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) in known:
                module.register_parameter(name, nn.Parameter(param.detach(), param.requires_grad))
            known.add(id(param))
    return copied


@contextmanager
def _quiet() -> Iterator[None]:
    """Mute transformers, which warns of rules of the model's own plans that match nothing."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
