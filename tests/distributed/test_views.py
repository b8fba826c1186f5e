"""Fused, transposed and folded weights, compared with the same matrices as separate parameters."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from hf_muon import Muon
from hf_muon.storage.boxes import shards_of
from hf_muon.storage.partitions import Division
from hf_muon.storage.regions import FlatRegion, regions
from hf_muon.storage.views import parse
from tests.distributed.cases import make
from tests.equality.cells import VIEWS
from tests.rules.settings import TOGETHER

SHAPES = [shape for shape, _ in VIEWS]


def index(sizes, size):
    """Return the indices of each part that a text of sizes describes, computed by a loop."""
    parts, at = [], 0
    for times, turns, inner in terms_of(sizes):
        results = [[] for _ in range(len(inner) * (1 if turns else times))]
        for turn in range(times):
            for k, length in enumerate(inner):
                results[k if turns else turn * len(inner) + k] += range(at, at + length)
                at += length
        parts += results
    assert at == size
    return parts


def terms_of(sizes):
    """Yield for each term how often it repeats, whether its parts take turns, and their sizes."""
    depth, term = 0, ""
    for c in sizes + "+":
        depth += (c == "(") - (c == ")")
        if c == "+" and not depth:
            times, kind, inner = term.rpartition("*" if "*" in term else "x")
            yield int(times or 1), kind == "*", [int(n) for n in inner.strip("()").split("+")]
            term = ""
        else:
            term += c


def apart(tensor, view):
    """Copy the matrices ``(out, in)``, or stacks of them, out of a tensor one by one."""
    fields = view.split(", ")
    if "flat" in fields:
        tensor = tensor.reshape(len(tensor), -1)
    results = [tensor]
    for field in fields:
        axis, _, sizes = field.partition(" ")
        if sizes:
            dim = {"rows": -2, "columns": -1}[axis]
            results = [tensor.index_select(dim, torch.tensor(i)) for i in index(sizes, tensor.shape[dim])]
    return [(part.mT if "transposed" in fields else part).contiguous() for part in results]


SCALES = [{"adjust_lr_fn": name} for name in ("match_rms_adamw", "original", "spectral_unclamped")]


@pytest.mark.parametrize("own", [*SCALES, {"nesterov": False}, *({name: TOGETHER[name]} for name in TOGETHER)], ids=str)
def test_a_view_gives_what_its_matrices_give_as_separate_parameters(own):
    """Rules have state of their own for each part; its rows are outputs."""
    options = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32", **own}
    views = [view for _, view in VIEWS]
    stored = [nn.Parameter(w) for w in make(SHAPES, 0)]
    # A kernel in channels_last order cannot be viewed as one matrix.
    stored[7] = nn.Parameter(stored[7].detach().to(memory_format=torch.channels_last))
    separate = [[nn.Parameter(w) for w in apart(p.detach(), v)] for p, v in zip(stored, views, strict=True)]
    one = Muon([{"params": stored, "views": views}], **options)
    other = Muon([p for some in separate for p in some], **options)
    for step in range(3):
        for param, parts, view, grad in zip(stored, separate, views, make(SHAPES, step + 1), strict=True):
            param.grad = grad
            for part, piece in zip(parts, apart(grad, view), strict=True):
                part.grad = piece
        one.step()
        other.step()
    for param, parts, view, before in zip(stored, separate, views, make(SHAPES, 0), strict=True):
        moved = (param.detach() - before).norm()
        # Newton-Schulz multiplies a matrix as it is stored; its transpose rounds differently.
        tolerance = 1e-5 if "transposed" in view.split(", ") else 1e-6
        for mine, part in zip(apart(param.detach(), view), parts, strict=True):
            assert (mine - part).norm() < tolerance * moved
        buffer = one.state[param]["momentum_buffer"]
        assert buffer.shape == param.shape
        for mine, part in zip(apart(buffer, view), parts, strict=True):
            assert torch.equal(mine, other.state[part]["momentum_buffer"])


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        (["rows 3+3", ""], ["rows 3+3", ""], ""),
        (["rows 3+3", ""], ["rows 2+4", "columns 3+2"], "parameter 1 (4, 5) 'columns 3+2', there 'as it is stored'"),
        (None, ["rows 3+3", ""], "parameter 0 (6, 4) 'rows 3+3', there 'as it is stored'"),
    ],
)
def test_views_are_saved_and_the_runs_own_ones_stay(there, here, says, tmp_path, caplog):
    def over(views):
        params = [nn.Parameter(w) for w in make([(6, 4), (4, 5)], 0)]
        return Muon([{"params": params, **({"views": views} if views else {})}])

    torch.save(over(there).state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["param_groups"][0].get("views") == there
    optimizer = over(here)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["views"] == here
    assert says in caplog.text and "[views-of-run]" in caplog.text if says else not caplog.records


def stored_by(shape, folded, draw):
    """Return what each rank stores of a tensor of elements' numbers: shards of a mesh, or slices as those of ZeRO."""
    elements = torch.arange(math.prod(shape)).view(shape)
    if draw(st.booleans()):
        ranks = draw(st.integers(1, 5))
        bounds = Division(elements.numel(), -(-(elements.numel() + 3) // ranks), offset=3).bounds(ranks)
        slices = [elements.reshape(-1)[first:last] for first, last in bounds]
        return elements, [FlatRegion(folded[-2:], first, last) for first, last in bounds], slices
    axes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=2))
    placements = [
        Replicate() if dim > 7 else _StridedShard(dim % len(shape), split_factor=factor) for _, dim, factor in axes
    ]
    held, locals_ = regions(shape, [size for size, *_ in axes], placements), []
    for region in held:
        local = elements
        for dim, ranges in enumerate(region.dims):
            local = local.index_select(
                dim, torch.tensor([i for pair in ranges for i in range(*pair)], dtype=torch.long)
            )
        # In whatever order the framework has them in memory.
        locals_.append(local.contiguous() if draw(st.booleans()) else local.mT.contiguous().mT)
    return elements, held, locals_


@pytest.mark.first_tier("transposed|2x4")
@pytest.mark.parametrize(("shape", "text"), [*VIEWS, ((8, 5), "columns 2+3"), ((9, 4, 7), "rows 1+3")])
@given(data=st.data())
def test_boxes_hold_the_matrices_of_every_view(shape, text, data):
    """Put together each matrix from the boxes that ranks store of it."""
    view = parse(text)
    elements, held, locals_ = stored_by(shape, view.folded(shape), data.draw)
    parts = zip(apart(elements, text), view.shapes(shape), shards_of(view, shape, tuple(held)), strict=True)
    for expected, part_shape, of_ranks in parts:
        count = math.prod(part_shape[:-2])
        start = data.draw(st.integers(0, count - 1))
        results = torch.full((count - start, *part_shape[-2:]), -1)  # (B, m, n)
        for own, local in zip(of_ranks.held, locals_, strict=True):
            boxes = own.boxes(start, count)
            assert len(boxes) <= 5 or text or local.ndim > 1
            for box in boxes:
                piece = box.of(local)
                assert piece.shape == box.stored
                box.write(piece.reshape(box.shape), results)
                assert torch.equal(box.in_batch(results), piece.reshape(-1))
                if not box.has_whole_rows and local.ndim > 1:
                    assert torch.equal(box.columns_of(box.rows_of(local).clone()), piece)
        expected = expected.mT if view.transposed else expected
        assert torch.equal(results, expected.reshape(count, *part_shape[-2:])[start:])
