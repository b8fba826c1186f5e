"""Fused, transposed and folded weights, compared with the same matrices as separate parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_muon import Muon
from hf_muon.distributed.executor import Piece
from hf_muon.distributed.holdings import BatchBox
from hf_muon.storage.partitions import partition_bounds
from hf_muon.storage.regions import FlatRegion, part_regions
from hf_muon.storage.views import parse
from tests.distributed.cases import make
from tests.equality.cells import VIEWS

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


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_adamw", "original", "spectral_unclamped"])
def test_a_view_gives_what_its_matrices_give_as_separate_parameters(adjust_lr_fn, nesterov):
    options = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32", "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
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


def test_flat_slices_hold_their_parts():
    """Assemble each matrix of a view from the flat slices of all ranks, as ZeRO partitions them."""
    for shape, text in VIEWS:
        view, weight = parse(text), torch.arange(math.prod(shape)).view(shape)
        for ranks in (2, 3, 5):
            size = -(-(weight.numel() + 3) // ranks)
            bounds = partition_bounds(weight.numel(), size, ranks, offset=3)
            slices = [weight.reshape(-1)[first:last] for first, last in bounds]
            rows, columns = view.folded(shape)[-2:]
            regions = tuple(FlatRegion((rows, columns), first, last) for first, last in bounds)
            for expected, part_shape, stored in zip(
                apart(weight, text), view.shapes(shape), part_regions(view, shape, regions), strict=True
            ):
                results = torch.full((math.prod(part_shape[:-2]), *part_shape[-2:]), -1)  # (B, m, n)
                for region, local in zip(stored, slices, strict=True):
                    for box in region.boxes(0, len(results)):
                        piece = Piece(0, box.local, box.cut).of(local)
                        assert piece.shape == box.stored
                        matrices = slice(box.first, box.first + box.count)
                        target = BatchBox(Piece(0), box.stored, box.shape, matrices, box.rows, box.columns)
                        target.write(piece.reshape(box.shape), results)
                expected = expected.mT if view.transposed else expected
                assert torch.equal(results, expected.reshape(results.shape)), (shape, text, ranks)
