"""Fused, transposed and folded weights, compared with the same matrices as separate parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_muon import Muon
from hf_muon.distributed.executor import Piece
from hf_muon.distributed.holdings import BatchBox
from hf_muon.storage.blocks import Blocks, Cut
from hf_muon.storage.partitions import partition_bounds
from hf_muon.storage.regions import FlatRegion, part_regions
from hf_muon.storage.views import parse
from tests.distributed.cases import VIEWS, given_gradients, make
from tests.distributed.test_layouts import assert_equal

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


LAYOUTS = {
    "ddp": (2,),
    "fsdp": (2, 3, 4),
    "last": (2, 4),
    "middle": (3,),
    "replicate": (2,),
    "hsdp": (4,),
    "hsdp-last": (4,),
    "fsdp-tp": (4,),
    "fsdp-tp-row": (4,),
    "experts": (4,),
    "odd": (4,),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layout", "ranks"), [(layout, n) for layout, sizes in LAYOUTS.items() for n in sizes])
def test_every_layout_gives_the_bits_of_one_process(pools, layout, ranks, dtype):
    expected = given_gradients(0, "single", dtype=dtype, viewed=VIEWS)
    plain = tuple(range(len(SHAPES), len(SHAPES) + 3)) if layout == "middle" else ()
    assert_equal(pools[ranks].run(given_gradients, layout=layout, dtype=dtype, viewed=VIEWS, plain=plain), expected)


def test_buckets_of_any_size(pools):
    options = {"viewed": VIEWS, "max_batch_bytes": 282}
    expected = given_gradients(0, "single", **options)
    assert_equal(pools[3].run(given_gradients, layout="fsdp", **options), expected)


def test_views_are_text():
    assert parse("").shapes((3, 4)) == [(3, 4)]
    assert parse("transposed, columns 2*(1+1)").shapes((5, 3, 4)) == [(5, 3, 2), (5, 3, 2)]
    assert parse("rows 2x(2+1)").shapes((6, 4)) == [(2, 4), (1, 4), (2, 4), (1, 4)]
    assert parse("flat, rows 3x2").shapes((6, 5, 2)) == [(2, 10)] * 3
    assert parse("rows 4*(2)").parts == (Blocks(0, 2, 4, 2),)


@pytest.mark.parametrize(
    "text",
    [
        *("rows", "rows 3+", "rows +3", "rows 3++4", "rows 0", "rows 0x3", "rows 3, columns 4", "flat, columns 3"),
        *("row 3", "transposed 3", "rows 2x", "rows 3 ", "transposed, transposed", "rows 2*3*4", "columns (3"),
    ],
)
def test_texts_that_are_no_view(text):
    with pytest.raises(ValueError, match=r"is not a view\. Valid: 'transposed', 'flat' and one of 'rows SIZES'"):
        parse(text)


@pytest.mark.parametrize(
    ("shape", "view", "message"),
    [
        ((6, 4), "rows 3+2", r"parameter 0 \(6, 4\) has the view 'rows 3\+2', which makes 5 rows of 6"),
        ((6, 4), "rows", "has a view that cannot be read: 'rows' is not a view"),
        ((6, 4, 2, 2), "rows 6", "is not a matrix, and neither by its view 'rows 6'"),
    ],
)
def test_views_that_do_not_fit(shape, view, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [nn.Parameter(torch.zeros(shape))], "views": [view]}])


def test_one_view_for_each_parameter():
    with pytest.raises(ValueError, match="views: 2 of 1 parameters; give each one, '' for none"):
        Muon([{"params": [nn.Parameter(torch.zeros(2, 2))], "views": ["", ""]}])


class TestCheckpoints:
    def trained(self, views, state=None):
        params = [nn.Parameter(w) for w in make([(6, 4), (4, 5)], 0)]
        optimizer = Muon([{"params": params, **({"views": views} if views else {})}], lr=0.1)
        if state is not None:
            optimizer.load_state_dict(state)
        for param, grad in zip(params, make([(6, 4), (4, 5)], 1), strict=True):
            param.grad = grad
        optimizer.step()
        return optimizer

    def saved(self, optimizer, tmp_path):
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        return torch.load(tmp_path / "state.pt", weights_only=True)

    def test_views_are_saved_and_the_runs_own_ones_stay(self, tmp_path, caplog):
        state = self.saved(self.trained(["rows 3+3", ""]), tmp_path)
        assert state["param_groups"][0]["views"] == ["rows 3+3", ""]
        self.trained(["rows 3+3", ""], state)
        assert not caplog.records
        optimizer = self.trained(["rows 2+4", "columns 3+2"], state)
        assert optimizer.param_groups[0]["views"] == ["rows 2+4", "columns 3+2"]
        (record,) = caplog.records
        assert record.getMessage() == (
            "from here on, other matrices than before are orthogonalized: parameter 0 (6, 4) 'rows 2+4', there "
            "'rows 3+3', parameter 1 (4, 5) 'columns 3+2', there 'as it is stored' [views-of-run]"
        )

    def test_states_without_views_load(self, tmp_path, caplog):
        state = self.saved(self.trained(None), tmp_path)
        assert "views" not in state["param_groups"][0]
        optimizer = self.trained(["rows 3+3", ""], state)
        assert optimizer.param_groups[0]["views"] == ["rows 3+3", ""]
        assert "parameter 0 (6, 4) 'rows 3+3', there 'as it is stored'" in caplog.text


def test_cuts_of_flat_slices():
    cut = Cut(Blocks(1, 1, 3, 2), 2, (2, 2, 7))
    flat = torch.arange(28)
    assert torch.equal(cut.of(flat), flat.view(2, 2, 7)[:, :, 1:6:2].unsqueeze(-1))
    assert cut.shape_of((28,)) == (2, 2, 3, 1)


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
