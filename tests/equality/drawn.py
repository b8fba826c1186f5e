"""Models of any shapes, views and dtypes, stored in any placements; pools import `compare` by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_muon import Muon
from hf_muon.storage.regions import regions
from hf_muon.storage.tensors import local_of
from tests.equality.placed import stored

STEPS = 2


@dataclass(frozen=True)
class Parameter:
    """A parameter, where it is stored, and its gradients.

    Attributes:
        shape: of the whole.
        view: as of `Muon`; None for AdamW.
        dtype: of weight and gradients.
        axes: the number of axes of the mesh that stores it; 0 for a plain tensor.
        placements: texts for `placement`, one for each axis.
        grads: for each step, whether all of it has a gradient ("all"), none of it ("none"), or the second half of it,
            as where some experts saw no token ("half").
    """

    shape: tuple[int, ...]
    view: str | None
    dtype: str
    axes: int
    placements: tuple[str, ...]
    grads: tuple[str, ...]


@dataclass(frozen=True)
class Drawn:
    """A model and the options of its optimizer, `decays` of which are the weight decays of one or two Muon groups."""

    params: tuple[Parameter, ...]
    options: tuple[tuple[str, Any], ...]
    decays: tuple[float, ...]

    def tensors(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(param.shape, generator=generator) for param in self.params]
        for tensor, param in zip(drawn, self.params, strict=True):
            if seed and param.grads[seed - 1] == "half" and tensor.ndim:
                tensor[: tensor.shape[0] // 2] = 0
        return [tensor.to(getattr(torch, param.dtype)) for tensor, param in zip(drawn, self.params, strict=True)]

    def optimizer(self, params: Sequence[Tensor], **options: Any) -> Muon:
        # named, since ranks that store parts of nameless parameters of one shape are refused
        named = [(str(i), param) for i, param in enumerate(params)]
        muon = [i for i, param in enumerate(self.params) if param.view is not None]
        cut = len(muon) // len(self.decays)
        groups: list[dict[str, Any]] = [
            {"params": [named[i] for i in some], "views": [self.params[i].view for i in some], "weight_decay": decay}
            for some, decay in zip((muon[:cut], muon[cut:]), self.decays, strict=False)
        ]
        groups.append({"params": [named[i] for i in range(len(params)) if i not in muon], "use_muon": False})
        return Muon([group for group in groups if group["params"]], **{"lr": 0.02, **dict(self.options), **options})


def placement(text: str, ndim: int) -> Any:
    """Return a placement: "-" for replicas, "1" for shards along dim 1, "1/3" for strided ones; dims wrap around."""
    dim, _, factor = text.partition("/")
    if dim == "-" or not ndim:
        return Replicate()
    return _StridedShard(int(dim) % ndim, split_factor=int(factor)) if factor else Shard(int(dim) % ndim)


@functools.cache
def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape)


def place_of(param: Parameter) -> tuple[Any, list[Any]] | None:
    if not param.axes:
        return None
    world = dist.get_world_size()
    mesh = mesh_of(world) if param.axes == 1 else mesh_of(world // 2, 2)
    return mesh, [placement(text, len(param.shape)) for text in param.placements]


def cuts_blocks(param: Parameter) -> bool:
    """Return whether a rank stores a part of a row, which 8-bit momentum refuses where rows have blocks."""
    place = place_of(param)
    if place is None or param.view is None or param.shape[-1] < 16:
        return False
    dims = [region.dims[-1] for region in regions(param.shape, tuple(place[0].mesh.shape), place[1])]
    return any(ranges != ((0, param.shape[-1]),) for ranges in dims)


def compare(rank: int, drawn: Drawn) -> list[str]:
    """Return what differs, on this rank, from the steps of one process."""
    options = {}
    if dict(drawn.options)["momentum_dtype"] == "int8" and any(map(cuts_blocks, drawn.params)):
        options["momentum_dtype"] = "bf16"
    places = [place_of(param) for param in drawn.params]

    def part(tensor: Tensor, i: int) -> Tensor:
        return tensor.clone() if places[i] is None else stored(tensor, *places[i])

    expected = _stepped(drawn, lambda tensor, i: tensor.clone(), options)
    results = _stepped(drawn, part, {**options, "replicate_group": dist.group.WORLD})
    differences = []
    for i, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            own = local_of(part(theirs[key], i)) if isinstance(value, DTensor) else theirs[key]
            if own.dtype != value.dtype or not torch.equal(local_of(value), own):
                differences.append(f"{drawn.params[i]} {key}")
    return differences


def _stepped(drawn: Drawn, put: Callable[[Tensor, int], Tensor], options: Any) -> list[dict[str, Tensor]]:
    params = [nn.Parameter(put(tensor, i)) for i, tensor in enumerate(drawn.tensors(0))]
    optimizer = drawn.optimizer(params, **options)
    for step in range(STEPS):
        for i, (param, grad) in enumerate(zip(params, drawn.tensors(step + 1), strict=True)):
            of_step = drawn.params[i].grads[step]
            param.grad = None if of_step == "none" else put(grad, i)
            if of_step == "half" and isinstance(param.grad, DTensor) and not local_of(param.grad).any():
                param.grad = None  # the experts of this rank saw no token, those of others did
        optimizer.step()
    return [{"weight": param.detach(), **optimizer.state[param]} for param in params]


# --- strategies

_SIZES = st.tuples(st.integers(1, 18), st.integers(1, 24)) | st.sampled_from([(65, 130), (130, 66), (7, 130)])


@st.composite
def stored_matrices(draw: Any, m: int, n: int) -> tuple[tuple[int, ...], str]:
    """Draw a way to store matrices ``(m, n)``: alone, stacked, transposed, fused with others, as a convolution."""
    stack, more = draw(st.integers(1, 9 if m * n < 4000 else 2)), draw(st.integers(1, 6))
    ways: list[tuple[tuple[int, ...], str]] = [
        ((m, n), ""),
        ((stack, m, n), ""),
        ((n, m), "transposed"),
        ((stack, n, m), "transposed"),
        ((m + more, n), f"rows {m}+{more}"),
        ((2 * m, n), f"rows 2x{m}"),
        ((stack, m + more, n), f"rows {more}+{m}"),
        ((m, n + more), f"columns {n}+{more}"),
        ((2 * m, n), f"rows {m}*(1+1)"),
        ((n, 2 * m), f"transposed, columns {m}*(1+1)"),
        ((n, m + more), f"transposed, columns {m}+{more}"),
        ((m, n, 1), "flat"),
        ((2 * m, n, 2), f"flat, rows 2x{m}"),
    ]
    return draw(st.sampled_from(ways))


@st.composite
def models(draw: Any, ranks: int) -> Drawn:
    """Draw a model; its parameters share few shapes, so that they share batches, and one place or have their own."""
    bases = draw(st.lists(_SIZES, min_size=1, max_size=3))
    kinds = [draw(stored_matrices(*draw(st.sampled_from(bases)))) for _ in range(draw(st.integers(1, 7)))]
    others = draw(st.lists(st.sampled_from([(), (1,), (17,), (5, 7), (9, 40)]), max_size=3))
    if ranks == 2 and draw(st.booleans()):
        place = st.just((0, ()))  # replicas without a mesh
    else:
        axis = st.sampled_from(["0", "0", "-", "1", "2", "0/2", "1/3"])
        place = st.tuples(st.just(1), st.tuples(axis))
        if ranks == 4:
            place = place | st.tuples(st.just(2), st.tuples(axis, axis))
        place = place | st.just((0, ()))
        if draw(st.booleans()):
            place = st.just(draw(place))
    rounding = draw(st.sampled_from(["auto", "nearest"]))
    dtypes = ["float32", "bfloat16", *(["float16"] if rounding == "nearest" else [])]
    params = []
    for shape, view in [*kinds, *((shape, None) for shape in others)]:
        grads = draw(st.tuples(*[st.sampled_from(["all", "all", "half", "none"])] * STEPS))
        axes, placements = draw(place)
        params.append(Parameter(shape, view, draw(st.sampled_from(dtypes)), axes, placements, grads))
    options = {
        "ns_dtype": draw(st.sampled_from(["fp32", "bf16"])),
        "momentum_dtype": draw(st.sampled_from(["auto", "fp32", "bf16", "int8"])),
        "nesterov": draw(st.booleans()),
        "ns_steps": draw(st.sampled_from([2, 5])),
        "weight_rounding": rounding,
        "ns_coefficients": draw(st.sampled_from(["polar_express", "original"])),
        "adjust_lr_fn": draw(st.sampled_from(["match_rms_adamw", "original", "spectral_unclamped"])),
        "max_batch_bytes": draw(st.sampled_from([1, 150, 2000, 2**24])),
    }
    decays = draw(st.sampled_from([(0.1,), (0.0, 0.1)] if len(kinds) > 1 else [(0.1,)]))
    return Drawn(tuple(params), tuple(options.items()), decays)
