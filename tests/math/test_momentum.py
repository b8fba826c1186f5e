"""Momentum stored in fp32, bf16 and 8 bits: beside plain arithmetic, across saves and conversions, and in pieces."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import math
from typing import NamedTuple

import pytest
import torch
from torch import nn

from hf_muon import Muon, orthogonalize
from hf_muon.math.codes import BLOCK, Quantized, scale_shape
from hf_muon.math.elementwise import Elementwise
from hf_muon.math.moments import MOMENT_DTYPES, moment_dtype
from hf_muon.math.momentum import MomentumBuffers
from tests.accelerated import accelerated
from tests.math.test_rounding import rounded

# Several blocks in a row, part of a block, a stack, and rows that are too short for a scale.
SHAPES = [(24, 150), (16, 40), (3, 10, 70), (20, 8)]
DTYPES = ("fp32", "bf16", "int8")


def weights(seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def build(momentum_dtype, dtype=torch.float32, **options):
    return Muon(weights(dtype=dtype), lr=0.02, ns_dtype="fp32", momentum_dtype=momentum_dtype, **options)


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def stepped(optimizer, steps=2, seed=2):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params_of(optimizer):
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return optimizer


def decoded(state):
    """Return the momentum of a parameter's state in fp32."""
    if "momentum_scale" in state:
        return Quantized(state["momentum_buffer"], state["momentum_scale"]).values()
    return state["momentum_buffer"].float()


def assert_states_equal(one, other):
    for a, b in zip(params_of(one), params_of(other), strict=True):
        assert torch.equal(a, b)
        assert one.state[a].keys() == other.state[b].keys()
        for key, value in one.state[a].items():
            assert value.dtype == other.state[b][key].dtype
            assert torch.equal(value, other.state[b][key])


@pytest.mark.parametrize("nesterov", [True, False])
def test_bf16_is_an_fp32_step_from_a_rounded_buffer(nesterov):
    optimizer = build("bf16", nesterov=nesterov, weight_decay=0.1)
    expected = [p.detach().clone() for p in params_of(optimizer)]
    buffers = [torch.zeros_like(p) for p in expected]
    for step in range(1, 6):
        stepped(optimizer, 1, seed=step)
        for i, (param, weight) in enumerate(zip(params_of(optimizer), expected, strict=True)):
            exact = buffers[i].lerp(param.grad, 1 - 0.95)
            direction = orthogonalize(param.grad.lerp(exact, 0.95) if nesterov else exact, ns_dtype="fp32")
            weight.mul_(1 - 0.02 * 0.1).add_(direction * (-0.02 * 0.2 * math.sqrt(max(weight.shape[-2:]))))
            buffers[i] = rounded(exact, step)
            assert torch.equal(optimizer.state[param]["momentum_buffer"], buffers[i].bfloat16())
            assert torch.equal(param, weight)


def test_an_int8_step_is_computed_from_what_is_stored():
    optimizer = stepped(build("int8"), 3)
    params = params_of(optimizer)
    before = [decoded(copy.deepcopy(optimizer.state[p])) for p in params]
    expected = [p.detach().clone() for p in params]
    stepped(optimizer, 1, seed=5)
    for param, weight, momentum in zip(params, expected, before, strict=True):
        exact, buffer = momentum.lerp(param.grad, 1 - 0.95), decoded(optimizer.state[param])
        assert (buffer - exact).norm() < 0.01 * exact.norm()
        if "momentum_scale" in optimizer.state[param]:
            update = buffer - (buffer - param.grad) * (1 - 0.95)
        else:
            update = param.grad.lerp(exact, 0.95)
        weight.add_(orthogonalize(update, ns_dtype="fp32") * (-0.02 * 0.2 * math.sqrt(max(weight.shape[-2:]))))
        assert torch.equal(param, weight)


@pytest.mark.parametrize(("momentum_dtype", "bound"), [("bf16", 0.01), ("int8", 0.03)])
def test_it_follows_fp32(momentum_dtype, bound, tmp_path):
    """Also in the metrics, which see what codes stand for."""
    runs, rms = [], []
    for dtype in ("fp32", momentum_dtype):
        file = tmp_path / dtype
        runs.append(stepped(build(dtype, diagnostics_every=30, diagnostics_file=file), 30))
        rms.append(json.loads(file.read_text().splitlines()[-1])["momentum_rms"])
    for exact, param in zip(*map(params_of, runs), strict=True):
        expected = runs[0].state[exact]["momentum_buffer"]
        assert (decoded(runs[1].state[param]) - expected).norm() < bound * expected.norm()
    assert rms[0] == pytest.approx(rms[1], rel=0.01)


def test_bytes():
    nbytes = {
        name: sum(v.nbytes for state in stepped(build(name)).state.values() for v in state.values())
        for name in MOMENT_DTYPES
    }
    numels = [math.prod(shape) for shape in SHAPES]
    scales = 24 * 3 + 16 + 3 * 10 * 2
    assert nbytes["auto"] == nbytes["fp32"] == 4 * sum(numels)
    assert nbytes["bf16"] == 2 * sum(numels)
    assert nbytes["int8"] == sum(numels[:3]) + 4 * scales + 4 * numels[3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum_dtype", DTYPES)
def test_resume_is_bit_exact(momentum_dtype, dtype):
    optimizer = stepped(build(momentum_dtype, dtype), 3)
    file = io.BytesIO()
    torch.save({"weights": params_of(optimizer), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = build(momentum_dtype, dtype)
    for param, weight in zip(params_of(resumed), saved["weights"], strict=True):
        param.data.copy_(weight)
    resumed.load_state_dict(saved["optimizer"])
    assert_states_equal(stepped(optimizer, 3, seed=3), stepped(resumed, 3, seed=3))


@pytest.mark.parametrize(
    ("there", "here", "says_its_dtype"),
    [*itertools.product(DTYPES, DTYPES, [True]), *itertools.product(["fp32"], DTYPES, [False])],
)
def test_a_checkpoint_of_another_dtype_is_converted_and_that_is_logged(there, here, says_its_dtype, caplog):
    """Older versions had fp32 alone, and did not save the option."""
    source, optimizer = stepped(build(there)), build(here)
    saved = source.state_dict()
    if not says_its_dtype:
        del saved["param_groups"][0]["momentum_dtype"]
    with caplog.at_level("INFO"):
        optimizer.load_state_dict(saved)
    line = f"moments are converted: momentum_dtype {there} in the checkpoint, {here} here"
    assert (line in caplog.text) is (there != here)
    assert optimizer.param_groups[0]["momentum_dtype"] == here
    for param, original in zip(params_of(optimizer), params_of(source), strict=True):
        state, values = optimizer.state[param], decoded(source.state[original])
        assert state["momentum_buffer"].dtype is moment_dtype(param, "momentum_buffer", here)
        if "momentum_scale" in state:
            expected = Quantized(torch.zeros_like(state["momentum_buffer"]), torch.zeros_like(state["momentum_scale"]))
            expected.store_(values)
            assert torch.equal(state["momentum_buffer"], expected.codes)
            assert torch.equal(state["momentum_scale"], expected.scales)
        else:
            assert torch.equal(state["momentum_buffer"], values.to(state["momentum_buffer"].dtype))
    stepped(optimizer, 1)


def test_a_dtype_that_is_changed_on_the_way_is_converted():
    optimizer = stepped(build("int8"))
    twin = copy.deepcopy(optimizer)
    for momentum_dtype in ("bf16", "int8", "fp32"):
        optimizer.param_groups[0]["momentum_dtype"] = momentum_dtype
        stepped(optimizer, 1)
        for param in params_of(optimizer):
            expected = moment_dtype(param, "momentum_buffer", momentum_dtype)
            assert optimizer.state[param]["momentum_buffer"].dtype is expected
    assert twin.state[params_of(twin)[0]]["momentum_buffer"].dtype is torch.int8


def test_groups_may_differ():
    groups = [{"params": weights(), "momentum_dtype": "int8"}, {"params": weights(3)}]
    optimizer = stepped(Muon(groups, ns_dtype="fp32"), 1)
    dtypes = [optimizer.state[group["params"][0]]["momentum_buffer"].dtype for group in optimizer.param_groups]
    assert dtypes == [torch.int8, torch.float32]


class Columns(NamedTuple):
    start: int
    size: int
    dim: int = 1

    def of(self, stored):
        return stored.narrow(self.dim, self.start, self.size)


class Piece(NamedTuple):
    matrix: int
    local: slice | None = None
    cut: Columns | None = None

    def of(self, local):
        part = local if self.local is None else local[self.local]
        return part if self.cut is None else self.cut.of(part)


@pytest.mark.parametrize("path", [contextlib.nullcontext, accelerated], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_pieces_move_as_whole_matrices_do(nesterov, path):
    # A flat fp32 partition of two matrices, a bf16 matrix, and an int8 parameter of two, cut through its blocks.
    shapes = [(100,), (8, 20), (6, 150)]
    pieces = [Piece(0, slice(0, 25)), Piece(2), Piece(3, cut=Columns(0, 70)), Piece(0, slice(25, 60)), Piece(1)]
    pieces += [Piece(4, cut=Columns(70, 80))]

    def start():
        buffers = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
        blocks = Quantized(torch.zeros(shapes[2], dtype=torch.int8), torch.zeros(scale_shape(shapes[2])))
        blocks.store_(buffers[2])
        quantized = {"momentum_buffer": blocks.codes, "momentum_scale": blocks.scales}
        stored = [buffers[0][:60], buffers[0][60:], buffers[1].bfloat16()]
        state = {**{k: {"momentum_buffer": buffer} for k, buffer in enumerate(stored)}, 3: quantized, 4: quantized}
        flat, *whole = (torch.randn(shape, generator=torch.Generator().manual_seed(9)) for shape in shapes)
        grads = dict(enumerate([flat[:60], flat[60:], *whole, whole[-1]]))
        return state, MomentumBuffers(state, grads, momentum=0.9, nesterov=nesterov, step=3)

    (whole_state, whole), (cut_state, cut) = start(), start()
    with path():
        expected = dict(zip(whole_state, whole.updates([Piece(k) for k in whole_state]), strict=True))
        updates = cut.updates(pieces[:2]) + cut.updates(pieces[2:])
    for part, update in zip(pieces, updates, strict=True):
        assert torch.equal(update, part.of(expected[part.matrix]))
    for k, tensors in whole_state.items():
        assert all(torch.equal(tensors[key], cut_state[k][key]) for key in tensors)


def test_blocks_of_pieces_with_gaps_move_where_they_lie(monkeypatch):
    moved = []

    def noted(self, *tensors, **options):
        moved.append((tensors[0].shape, tensors[0].untyped_storage()._cdata))
        self.plain(*tensors, **options)

    monkeypatch.setattr(Elementwise, "__call__", noted)
    shape = (3, 24, 128)
    state = {"momentum_buffer": torch.zeros(shape, dtype=torch.int8), "momentum_scale": torch.zeros(scale_shape(shape))}
    grad = torch.randn(shape)
    pieces = [Piece(0, cut=Columns(0, 10)), Piece(0, cut=Columns(10, 14))]  # rows of each matrix of a stack
    with accelerated():
        updates = MomentumBuffers({0: state}, {0: grad}, momentum=0.0, nesterov=False).updates(pieces)
    own = state["momentum_buffer"].untyped_storage()._cdata
    assert moved == [((3, 20, BLOCK), own), ((3, 28, BLOCK), own)]
    assert torch.equal(decoded(state), torch.cat(updates, 1))
    assert (torch.cat(updates, 1) - grad).abs().max() < 0.05
