from __future__ import annotations

import copy
import io
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from hf_muon import Muon, MuonConfig, orthogonalize
from hf_muon.math.momentum import BLOCK, MOMENTUM_DTYPES, Quantized, buffer_dtype, scale_shape
from hf_muon.math.rounding import round_to_bf16

# Several blocks in a row, a part of one, a stack, and rows that are too short for a scale.
SHAPES = [(24, 150), (16, 40), (3, 10, 70), (20, 8)]
KEPT = ("fp32", "bf16", "int8")


def weights(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def stepped(optimizer, params, steps, seed=2):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def made(choice, **options):
    params = weights()
    return Muon(params, lr=0.02, ns_dtype="fp32", momentum_dtype=choice, **options), params


def rounded(values, step):
    """The rule of `round_to_bf16`, in numpy's unsigned numbers."""
    bits = values.numpy().view(np.uint32)
    with np.errstate(over="ignore"):

        def mixed(x):
            for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
                x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
            return x ^ (x >> np.uint32(16))

        noise = mixed(bits ^ mixed(np.array([step], dtype=np.uint32) * np.uint32(0x9E3779B9)))
    return torch.from_numpy(((bits + (noise & np.uint32(0xFFFF))) & np.uint32(0xFFFF0000)).view(np.float32))


class TestStochasticRounding:
    def test_rule(self):
        values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        for step in (1, 2, 77777):
            assert torch.equal(round_to_bf16(values, step), rounded(values, step))

    def test_either_neighbour_and_the_mean_is_the_value(self):
        values = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
        below = (values.view(torch.int32) & -0x10000).view(torch.float32)
        above = ((below.view(torch.int32)) + 0x10000).view(torch.float32)
        away = ((values - below) / (above - below)).double()  # from zero, in units in the last place
        taken = torch.zeros_like(away)
        steps = 32
        for step in range(steps):
            found = round_to_bf16(values, step)
            assert bool(((found == below) | (found == above)).all())
            taken += found == above
        sigma = math.sqrt(float((away * (1 - away)).sum()) * steps)
        assert abs(float((taken - steps * away).sum())) < 5 * sigma
        # Neither the value's last bits nor those of others are left in the choice.
        for part in (away < 0.1, away > 0.9, values < 0, values.view(torch.int32) & 1 == 1):
            some = away[part]
            sigma = math.sqrt(float((some * (1 - some)).sum()) * steps)
            assert abs(float((taken - steps * away)[part].sum())) < 5 * sigma
        # One value over the steps is as random as many values in one.
        spread = ((taken - steps * away).square().sum() / (steps * (away * (1 - away)).sum())).item()
        assert spread == pytest.approx(1, abs=0.02)

    def test_what_bf16_holds_stays_and_nothing_becomes_infinite(self):
        held = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.finfo(torch.bfloat16).max, 1e-40])
        held = held.bfloat16().float()
        for step in range(50):
            assert torch.equal(round_to_bf16(held, step), held)
        largest = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
        assert all(bool(round_to_bf16(largest, step).isfinite().all()) for step in range(50))


@pytest.mark.parametrize("nesterov", [True, False])
def test_bf16_is_an_fp32_step_from_a_rounded_buffer(nesterov):
    optimizer, params = made("bf16", nesterov=nesterov, weight_decay=0.1)
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
        found = optimizer.state[param]["momentum_buffer"]
        assert found.dtype is torch.bfloat16
        assert torch.equal(found.float(), buffer)
        assert torch.equal(param, weight)


class TestInt8:
    @pytest.mark.parametrize("shape", [(4, 64), (5, 150), (3, 20), (2, 3, 70)])
    def test_codes_are_the_nearest(self, shape):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) ** 3
        values[0] = 0
        kept = Quantized(torch.zeros(shape, dtype=torch.int8), torch.zeros(scale_shape(shape)))
        kept.store_(values)
        for k in range(kept.scales.shape[-1]):
            block = values[..., BLOCK * k : BLOCK * (k + 1)]
            assert torch.equal(kept.scales[..., k], block.abs().amax(-1))
            scale = kept.scales[..., k, None].clamp_min(1e-30)
            found = kept.values()[..., BLOCK * k : BLOCK * (k + 1)]
            assert bool((found * block >= 0).all())
            off = (found.abs() / scale).sqrt() - (block.abs() / scale).sqrt()
            assert off.abs().max() * 127 < 0.5 + 1e-4
        again = Quantized(torch.zeros_like(kept.codes), torch.zeros_like(kept.scales))
        again.store_(kept.values())
        assert torch.equal(again.codes, kept.codes)

    def test_a_step_is_made_from_what_is_kept(self):
        optimizer, params = made("int8")
        stepped(optimizer, params, 3)
        before = copy.deepcopy([optimizer.state[p] for p in params])
        expected = [p.detach().clone() for p in params]
        stepped(optimizer, params, 1, seed=5)
        for param, weight, state in zip(params, expected, before, strict=True):
            now = optimizer.state[param]
            buffer = state["momentum_buffer"].float().lerp(param.grad, 1 - 0.95)
            if weight.shape[-1] >= 16:
                exact = Quantized(state["momentum_buffer"], state["momentum_scale"]).values().lerp(param.grad, 1 - 0.95)
                buffer = Quantized(now["momentum_buffer"], now["momentum_scale"]).values()
                assert (buffer - exact).norm() < 0.01 * exact.norm()
            direction = orthogonalize(param.grad.lerp(buffer, 0.95), ns_dtype="fp32")
            weight.add_(direction * (-0.02 * 0.2 * math.sqrt(max(weight.shape[-2:]))))
            assert torch.equal(param, weight)

    def test_it_follows_fp32(self):
        runs = {choice: made(choice) for choice in KEPT}
        for optimizer, params in runs.values():
            stepped(optimizer, params, 30)
        for i, exact in enumerate(runs["fp32"][1]):
            wanted = runs["fp32"][0].state[exact]["momentum_buffer"]
            for choice, bound in (("bf16", 0.01), ("int8", 0.03)):
                optimizer, params = runs[choice]
                state = optimizer.state[params[i]]
                found = state["momentum_buffer"].float()
                if "momentum_scale" in state:
                    found = Quantized(state["momentum_buffer"], state["momentum_scale"]).values()
                assert (found - wanted).norm() < bound * wanted.norm()


def bytes_of(optimizer):
    return sum(v.numel() * v.element_size() for state in optimizer.state.values() for v in state.values())


def test_bytes():
    found = {choice: bytes_of(made_and_stepped(choice)[0]) for choice in MOMENTUM_DTYPES}
    numels = [math.prod(shape) for shape in SHAPES]
    scales = 24 * 3 + 16 + 3 * 10 * 2
    assert found["auto"] == found["fp32"] == 4 * sum(numels)
    assert found["bf16"] == 2 * sum(numels)
    assert found["int8"] == sum(numels[:3]) + 4 * scales + 4 * numels[3]


def made_and_stepped(choice, steps=2, **options):
    optimizer, params = made(choice, **options)
    stepped(optimizer, params, steps)
    return optimizer, params


def equal_states(one, other):
    for a, b in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert one.state[a].keys() == other.state[b].keys()
        for key, value in one.state[a].items():
            assert value.dtype == other.state[b][key].dtype
            assert torch.equal(value, other.state[b][key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choice", KEPT)
def test_resume_is_bit_exact(choice, dtype):
    def start():
        params = [nn.Parameter(p.detach().to(dtype)) for p in weights()]
        return Muon(params, lr=0.02, ns_dtype="fp32", momentum_dtype=choice), params

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
    optimizer, _ = made_and_stepped("int8")
    saved = optimizer.state_dict()
    lost = copy.deepcopy(saved)
    del lost["state"][1]["momentum_scale"]
    other, params = made("int8")
    with pytest.raises(ValueError, match=r"moments are missing: parameter 1 .* lacks \['momentum_scale'\]"):
        other.load_state_dict(lost)
    # As a template of fp32 would leave it: codes as numbers.
    for state in lost["state"].values():
        state.pop("momentum_scale", None)
        state["momentum_buffer"] = state["momentum_buffer"].float()
    for choice in ("fp32", "int8"):
        with pytest.raises(ValueError, match="moments are missing"):
            made(choice)[0].load_state_dict(lost)
    wrong = copy.deepcopy(saved)
    wrong["state"][0]["momentum_scale"] = wrong["state"][0]["momentum_scale"][:, :2]
    with pytest.raises(ValueError, match=r"its momentum_scale has shape \(24, 2\)"):
        other.load_state_dict(wrong)
    other.load_state_dict(saved)
    del other.state[params[0]]["momentum_scale"]
    for act in (lambda: stepped(other, params, 1), other.state_dict):
        with pytest.raises(RuntimeError, match="lacks momentum_scale"):
            act()


@pytest.mark.parametrize("here", KEPT)
@pytest.mark.parametrize("there", KEPT)
def test_a_checkpoint_of_another_dtype_is_converted_and_that_is_said(there, here, caplog):
    source, _ = made_and_stepped(there)
    optimizer, params = made(here)
    with caplog.at_level("INFO"):
        optimizer.load_state_dict(source.state_dict())
    said = f"momentum is converted: {there} in the checkpoint, {here} here"
    assert (said in caplog.text) is (there != here)
    assert "win over" not in caplog.text
    assert optimizer.param_groups[0]["momentum_dtype"] == here
    for param, original in zip(params, source.param_groups[0]["params"], strict=True):
        state, kept = optimizer.state[param], source.state[original]
        values = kept["momentum_buffer"].float()
        if "momentum_scale" in kept:
            values = Quantized(kept["momentum_buffer"], kept["momentum_scale"]).values()
        assert state["momentum_buffer"].dtype is buffer_dtype(param, here)
        if "momentum_scale" in state:
            expected = Quantized(torch.zeros_like(state["momentum_buffer"]), torch.zeros_like(state["momentum_scale"]))
            expected.store_(values)
            assert torch.equal(state["momentum_buffer"], expected.codes)
            assert torch.equal(state["momentum_scale"], expected.scales)
        else:
            assert torch.equal(state["momentum_buffer"], values.to(state["momentum_buffer"].dtype))
    stepped(optimizer, params, 1)


def test_states_of_versions_that_did_not_say():
    source, _ = made_and_stepped("auto")
    saved = source.state_dict()
    del saved["param_groups"][0]["momentum_dtype"]
    for choice in KEPT:
        optimizer, params = made(choice)
        optimizer.load_state_dict(saved)
        stepped(optimizer, params, 1)
        assert optimizer.param_groups[0]["momentum_dtype"] == choice


def test_a_dtype_that_is_changed_on_the_way_is_converted():
    optimizer, params = made_and_stepped("int8")
    twin = copy.deepcopy(optimizer)
    for choice in ("bf16", "int8", "fp32"):
        optimizer.param_groups[0]["momentum_dtype"] = choice
        stepped(optimizer, params, 1)
        assert optimizer.state[params[0]]["momentum_buffer"].dtype is buffer_dtype(params[0], choice)
    assert twin.state[twin.param_groups[0]["params"][0]]["momentum_buffer"].dtype is torch.int8


def test_metrics_see_what_codes_stand_for(tmp_path):
    seen = {}
    for choice in ("fp32", "int8"):
        made_and_stepped(choice, diagnostics_every=2, diagnostics_file=tmp_path / choice)
        seen[choice] = json.loads((tmp_path / choice).read_text().splitlines()[-1])["momentum_rms"]
    assert seen["int8"] == pytest.approx(seen["fp32"], rel=0.01)


def test_groups_may_differ():
    first, second = weights(), weights(3)
    optimizer = Muon([{"params": first, "momentum_dtype": "int8"}, {"params": second}], ns_dtype="fp32")
    stepped(optimizer, [*first, *second], 1)
    assert optimizer.state[first[0]]["momentum_buffer"].dtype is torch.int8
    assert optimizer.state[second[0]]["momentum_buffer"].dtype is torch.float32


@pytest.mark.parametrize("made_by", [lambda **o: Muon(weights(), **o), MuonConfig, MuonConfig.from_mapping])
def test_what_is_not_valid_lists_what_is(made_by):
    options = {"momentum_dtype": "fp8"}
    with pytest.raises(ValueError, match=r"momentum_dtype='fp8' is not valid. Valid: auto, fp32, bf16 or int8"):
        made_by(options) if made_by == MuonConfig.from_mapping else made_by(**options)
