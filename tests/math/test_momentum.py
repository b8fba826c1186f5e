from __future__ import annotations

import contextlib
import copy
import io
import json
import math
from typing import NamedTuple

import pytest
import torch
from torch import nn

from hf_muon import Muon, MuonConfig, orthogonalize
from hf_muon.math.codes import BLOCK, Quantized, scale_shape
from hf_muon.math.elementwise import Elementwise
from hf_muon.math.moments import MOMENT_DTYPES, moment_dtype
from hf_muon.math.momentum import MomentumBuffers
from tests.accelerated import accelerated
from tests.math.test_rounding import rounded

# Several blocks in a row, part of a block, a stack, and rows that are too short for a scale.
SHAPES = [(24, 150), (16, 40), (3, 10, 70), (20, 8)]
DTYPES = ("fp32", "bf16", "int8")


def weights(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def stepped(optimizer, params, steps, seed=2):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def build(momentum_dtype, **options):
    params = weights()
    return Muon(params, lr=0.02, ns_dtype="fp32", momentum_dtype=momentum_dtype, **options), params


@pytest.mark.parametrize("nesterov", [True, False])
def test_bf16_is_an_fp32_step_from_a_rounded_buffer(nesterov):
    optimizer, params = build("bf16", nesterov=nesterov, weight_decay=0.1)
    expected = [p.detach().clone() for p in params]
    buffers = [torch.zeros_like(p) for p in expected]
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 6):
        for i, weight in enumerate(expected):
            grad = torch.randn(weight.shape, generator=generator)
            exact = buffers[i].lerp(grad, 1 - 0.95)
            direction = orthogonalize(grad.lerp(exact, 0.95) if nesterov else exact, ns_dtype="fp32")
            weight.mul_(1 - 0.02 * 0.1).add_(direction * (-0.02 * 0.2 * math.sqrt(max(weight.shape[-2:]))))
            buffers[i] = rounded(exact, step)
    stepped(optimizer, params, 5)
    for param, weight, buffer in zip(params, expected, buffers, strict=True):
        stored = optimizer.state[param]["momentum_buffer"]
        assert stored.dtype is torch.bfloat16
        assert torch.equal(stored.float(), buffer)
        assert torch.equal(param, weight)


class TestInt8:
    @pytest.mark.parametrize("shape", [(4, 64), (5, 150), (3, 20), (2, 3, 70)])
    def test_codes_are_the_nearest(self, shape):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) ** 3
        values[0] = 0
        blocks = Quantized(torch.zeros(shape, dtype=torch.int8), torch.zeros(scale_shape(shape)))
        blocks.store_(values)
        for k in range(blocks.scales.shape[-1]):
            block = values[..., BLOCK * k : BLOCK * (k + 1)]
            assert torch.equal(blocks.scales[..., k], block.abs().amax(-1))
            scale = blocks.scales[..., k, None].clamp_min(1e-30)
            decoded = blocks.values()[..., BLOCK * k : BLOCK * (k + 1)]
            assert bool((decoded * block >= 0).all())
            off = (decoded.abs() / scale).sqrt() - (block.abs() / scale).sqrt()
            assert off.abs().max() * 127 < 0.5 + 1e-4
        other = Quantized(torch.zeros_like(blocks.codes), torch.zeros_like(blocks.scales))
        other.store_(blocks.values())
        assert torch.equal(other.codes, blocks.codes)

    def test_a_step_is_computed_from_what_is_stored(self):
        optimizer, params = build("int8")
        stepped(optimizer, params, 3)
        before = copy.deepcopy([optimizer.state[p] for p in params])
        expected = [p.detach().clone() for p in params]
        stepped(optimizer, params, 1, seed=5)
        for param, weight, state in zip(params, expected, before, strict=True):
            now = optimizer.state[param]
            if weight.shape[-1] >= 16:
                exact = Quantized(state["momentum_buffer"], state["momentum_scale"]).values().lerp(param.grad, 1 - 0.95)
                buffer = Quantized(now["momentum_buffer"], now["momentum_scale"]).values()
                assert (buffer - exact).norm() < 0.01 * exact.norm()
                update = buffer - (buffer - param.grad) * (1 - 0.95)
            else:
                update = param.grad.lerp(state["momentum_buffer"].lerp(param.grad, 1 - 0.95), 0.95)
            direction = orthogonalize(update, ns_dtype="fp32")
            weight.add_(direction * (-0.02 * 0.2 * math.sqrt(max(weight.shape[-2:]))))
            assert torch.equal(param, weight)

    def test_it_follows_fp32(self):
        runs = {momentum_dtype: build(momentum_dtype) for momentum_dtype in DTYPES}
        for optimizer, params in runs.values():
            stepped(optimizer, params, 30)
        for i, exact in enumerate(runs["fp32"][1]):
            expected = runs["fp32"][0].state[exact]["momentum_buffer"]
            for momentum_dtype, bound in (("bf16", 0.01), ("int8", 0.03)):
                optimizer, params = runs[momentum_dtype]
                state = optimizer.state[params[i]]
                values = state["momentum_buffer"].float()
                if "momentum_scale" in state:
                    values = Quantized(state["momentum_buffer"], state["momentum_scale"]).values()
                assert (values - expected).norm() < bound * expected.norm()


def bytes_of(optimizer):
    return sum(v.numel() * v.element_size() for state in optimizer.state.values() for v in state.values())


def test_bytes():
    nbytes = {momentum_dtype: bytes_of(build_and_step(momentum_dtype)[0]) for momentum_dtype in MOMENT_DTYPES}
    numels = [math.prod(shape) for shape in SHAPES]
    scales = 24 * 3 + 16 + 3 * 10 * 2
    assert nbytes["auto"] == nbytes["fp32"] == 4 * sum(numels)
    assert nbytes["bf16"] == 2 * sum(numels)
    assert nbytes["int8"] == sum(numels[:3]) + 4 * scales + 4 * numels[3]


def build_and_step(momentum_dtype, steps=2, **options):
    optimizer, params = build(momentum_dtype, **options)
    stepped(optimizer, params, steps)
    return optimizer, params


def equal_states(one, other):
    for a, b in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert one.state[a].keys() == other.state[b].keys()
        for key, value in one.state[a].items():
            assert value.dtype == other.state[b][key].dtype
            assert torch.equal(value, other.state[b][key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum_dtype", DTYPES)
def test_resume_is_bit_exact(momentum_dtype, dtype):
    def start():
        params = [nn.Parameter(p.detach().to(dtype)) for p in weights()]
        return Muon(params, lr=0.02, ns_dtype="fp32", momentum_dtype=momentum_dtype), params

    optimizer, params = start()
    stepped(optimizer, params, 3)
    file = io.BytesIO()
    torch.save({"weights": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    stepped(optimizer, params, 3, seed=3)
    resumed, others = start()
    with torch.no_grad():
        for param, weight in zip(others, saved["weights"], strict=True):
            param.copy_(weight)
    resumed.load_state_dict(saved["optimizer"])
    stepped(resumed, others, 3, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    equal_states(optimizer, resumed)


def test_scales_cannot_be_lost():
    optimizer, _ = build_and_step("int8")
    saved = optimizer.state_dict()
    lost = copy.deepcopy(saved)
    del lost["state"][1]["momentum_scale"]
    other, params = build("int8")
    with pytest.raises(ValueError, match=r"moments are missing: parameter 1 .* lacks \['momentum_scale'\]"):
        other.load_state_dict(lost)
    # The state that an fp32 template would read: codes as numbers.
    for state in lost["state"].values():
        state.pop("momentum_scale", None)
        state["momentum_buffer"] = state["momentum_buffer"].float()
    for momentum_dtype in ("fp32", "int8"):
        with pytest.raises(ValueError, match="moments are missing"):
            build(momentum_dtype)[0].load_state_dict(lost)
    wrong = copy.deepcopy(saved)
    wrong["state"][0]["momentum_scale"] = wrong["state"][0]["momentum_scale"][:, :2]
    with pytest.raises(ValueError, match=r"its momentum_scale has shape \(24, 2\)"):
        other.load_state_dict(wrong)
    other.load_state_dict(saved)
    del other.state[params[0]]["momentum_scale"]
    for act in (lambda: stepped(other, params, 1), other.state_dict):
        with pytest.raises(RuntimeError, match="lacks momentum_scale"):
            act()


@pytest.mark.parametrize("here", DTYPES)
@pytest.mark.parametrize("there", DTYPES)
def test_a_checkpoint_of_another_dtype_is_converted_and_that_is_logged(there, here, caplog):
    source, _ = build_and_step(there)
    optimizer, params = build(here)
    with caplog.at_level("INFO"):
        optimizer.load_state_dict(source.state_dict())
    line = f"moments are converted: momentum_dtype {there} in the checkpoint, {here} here"
    assert (line in caplog.text) is (there != here)
    assert "win over" not in caplog.text
    assert optimizer.param_groups[0]["momentum_dtype"] == here
    for param, original in zip(params, source.param_groups[0]["params"], strict=True):
        state, saved = optimizer.state[param], source.state[original]
        values = saved["momentum_buffer"].float()
        if "momentum_scale" in saved:
            values = Quantized(saved["momentum_buffer"], saved["momentum_scale"]).values()
        assert state["momentum_buffer"].dtype is moment_dtype(param, "momentum_buffer", here)
        if "momentum_scale" in state:
            expected = Quantized(torch.zeros_like(state["momentum_buffer"]), torch.zeros_like(state["momentum_scale"]))
            expected.store_(values)
            assert torch.equal(state["momentum_buffer"], expected.codes)
            assert torch.equal(state["momentum_scale"], expected.scales)
        else:
            assert torch.equal(state["momentum_buffer"], values.to(state["momentum_buffer"].dtype))
    stepped(optimizer, params, 1)


def test_states_of_versions_that_did_not_say():
    source, _ = build_and_step("auto")
    saved = source.state_dict()
    del saved["param_groups"][0]["momentum_dtype"]
    for momentum_dtype in DTYPES:
        optimizer, params = build(momentum_dtype)
        optimizer.load_state_dict(saved)
        stepped(optimizer, params, 1)
        assert optimizer.param_groups[0]["momentum_dtype"] == momentum_dtype


def test_a_dtype_that_is_changed_on_the_way_is_converted():
    optimizer, params = build_and_step("int8")
    twin = copy.deepcopy(optimizer)
    for momentum_dtype in ("bf16", "int8", "fp32"):
        optimizer.param_groups[0]["momentum_dtype"] = momentum_dtype
        stepped(optimizer, params, 1)
        assert optimizer.state[params[0]]["momentum_buffer"].dtype is moment_dtype(
            params[0], "momentum_buffer", momentum_dtype
        )
    assert twin.state[twin.param_groups[0]["params"][0]]["momentum_buffer"].dtype is torch.int8


def test_metrics_see_what_codes_stand_for(tmp_path):
    rms = {}
    for momentum_dtype in ("fp32", "int8"):
        build_and_step(momentum_dtype, diagnostics_every=2, diagnostics_file=tmp_path / momentum_dtype)
        rms[momentum_dtype] = json.loads((tmp_path / momentum_dtype).read_text().splitlines()[-1])["momentum_rms"]
    assert rms["int8"] == pytest.approx(rms["fp32"], rel=0.01)


def test_groups_may_differ():
    first, second = weights(), weights(3)
    optimizer = Muon([{"params": first, "momentum_dtype": "int8"}, {"params": second}], ns_dtype="fp32")
    stepped(optimizer, [*first, *second], 1)
    assert optimizer.state[first[0]]["momentum_buffer"].dtype is torch.int8
    assert optimizer.state[second[0]]["momentum_buffer"].dtype is torch.float32


@pytest.mark.parametrize("build_with", [lambda **o: Muon(weights(), **o), MuonConfig, MuonConfig.from_mapping])
def test_what_is_not_valid_lists_what_is(build_with):
    options = {"momentum_dtype": "fp8"}
    with pytest.raises(ValueError, match=r"momentum_dtype='fp8' is not valid. Valid: auto, fp32, bf16 or int8"):
        build_with(options) if build_with == MuonConfig.from_mapping else build_with(**options)


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

    whole_state, whole = start()
    cut_state, cut = start()
    with path():
        expected = dict(zip(whole_state, whole.updates([Piece(k) for k in whole_state]), strict=True))
        updates = cut.updates(pieces[:2]) + cut.updates(pieces[2:])
    for part, update in zip(pieces, updates, strict=True):
        assert torch.equal(update, part.of(expected[part.matrix]))
    for k, tensors in whole_state.items():
        assert all(torch.equal(tensors[key], cut_state[k][key]) for key in tensors)


def test_blocks_of_pieces_with_gaps_are_compiled_as_others_are(monkeypatch):
    layouts = set()

    def noted(self, *tensors, **options):
        layouts.update((tensor.shape[1:], tensor.is_contiguous()) for tensor in tensors if tensor.ndim)
        self.plain(*tensors, **options)

    monkeypatch.setattr(Elementwise, "__call__", noted)
    shape = (3, 24, 128)
    state = {"momentum_buffer": torch.zeros(shape, dtype=torch.int8), "momentum_scale": torch.zeros(scale_shape(shape))}
    grad = torch.randn(shape)
    pieces = [Piece(0, cut=Columns(0, 10)), Piece(0, cut=Columns(10, 14))]  # rows of each matrix of a stack
    with accelerated():
        updates = MomentumBuffers({0: state}, {0: grad}, momentum=0.0, nesterov=False).updates(pieces)
    assert layouts == {((BLOCK,), True), ((), True)}
    assert torch.equal(Quantized(state["momentum_buffer"], state["momentum_scale"]).values(), torch.cat(updates, 1))
    assert (torch.cat(updates, 1) - grad).abs().max() < 0.05
