"""State dicts: a resumed run is bit-identical, and a state that does not fit raises an error."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from hf_muon import Muon
from tests.optimizer.cases import REST, SHAPES, both_gradients, both_halves, parameters, run
from tests.reference import moved


class TestStateDict:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_resume_is_bit_exact(self, dtype):
        optimizer, params = both_halves(dtype, lr=0.02, weight_decay=0.1)
        run(optimizer, params, both_gradients(3, dtype))
        file = io.BytesIO()
        torch.save({"weights": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
        run(optimizer, params, both_gradients(3, dtype, seed=4))

        file.seek(0)
        saved = torch.load(file, weights_only=True)
        resumed, resumed_params = both_halves(dtype)
        with torch.no_grad():
            for param, weight in zip(resumed_params, saved["weights"], strict=True):
                param.copy_(weight)
        resumed.load_state_dict(saved["optimizer"])
        run(resumed, resumed_params, both_gradients(3, dtype, seed=4))
        assert all(torch.equal(a, b) for a, b in zip(params, resumed_params, strict=True))
        for a, b in zip(params, resumed_params, strict=True):
            for key, value in optimizer.state[a].items():
                assert torch.equal(value, resumed.state[b][key])

    def test_dropped_moments_would_show(self):
        """Prove that the comparison above fails when moments are lost."""
        optimizer, params = both_halves(lr=0.02)
        run(optimizer, params, both_gradients(3))
        fresh, fresh_params = both_halves(lr=0.02)
        with torch.no_grad():
            for a, b in zip(fresh_params, params, strict=True):
                a.copy_(b)
        run(optimizer, params, both_gradients(3, seed=4))
        run(fresh, fresh_params, both_gradients(3, seed=4))
        assert moved(params, fresh_params) > 1e-2

    @pytest.mark.parametrize("saved_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_moments_are_fp32_whatever_the_checkpoint_held(self, dtype, saved_dtype):
        optimizer, params = both_halves(dtype)
        run(optimizer, params, both_gradients(2, dtype))
        saved = optimizer.state_dict()
        for state in saved["state"].values():
            for key in state:
                if key != "step":
                    state[key] = state[key].to(saved_dtype)
        resumed, resumed_params = both_halves(dtype)
        resumed.load_state_dict(saved)
        for i, param in enumerate(resumed_params):
            if i < len(SHAPES):
                buffer = resumed.state[param]["momentum_buffer"]
                assert buffer.dtype == torch.float32
                assert torch.equal(buffer, saved["state"][i]["momentum_buffer"].float())
            else:
                for key in ("exp_avg", "exp_avg_sq"):
                    assert resumed.state[param][key].dtype == torch.float32
                    assert torch.equal(resumed.state[param][key], saved["state"][i][key].float())
        run(resumed, resumed_params, both_gradients(1, dtype))

    def test_loading_shares_no_memory_with_the_checkpoint(self):
        optimizer, params = both_halves()
        run(optimizer, params, both_gradients(1))
        saved = optimizer.state_dict()
        before = copy.deepcopy(saved)
        twin, twin_params = both_halves()
        twin.load_state_dict(saved)
        run(twin, twin_params, both_gradients(2))
        for i, state in before["state"].items():
            assert all(torch.equal(value, saved["state"][i][key]) for key, value in state.items())

    def test_parameters_cast_after_loading(self):
        """Convert state when accelerate's FSDP2 has cast bf16 parameters to fp32 after the optimizer was built."""
        optimizer, params = both_halves(torch.bfloat16)
        run(optimizer, params, both_gradients(1, torch.bfloat16))
        for param in params:
            param.grad = None
            param.data = param.data.float()
        run(optimizer, params, both_gradients(1))
        assert all(p.dtype == torch.float32 for p in params)
        assert all(v.dtype == torch.float32 for s in optimizer.state.values() for v in s.values())

    def test_init_state_equals_lazy_state(self):
        eager, eager_params = both_halves()
        lazy, lazy_params = both_halves()
        eager.init_state()
        assert len(eager.state) == len(eager_params)
        run(eager, eager_params, both_gradients(2))
        run(lazy, lazy_params, both_gradients(2))
        assert all(torch.equal(a, b) for a, b in zip(eager_params, lazy_params, strict=True))

    def test_state_before_the_first_step(self):
        optimizer, params = both_halves()
        fresh, _ = both_halves()
        optimizer.load_state_dict(fresh.state_dict())
        twin, twin_params = both_halves()
        run(optimizer, params, both_gradients(1))
        run(twin, twin_params, both_gradients(1))
        assert all(torch.equal(a, b) for a, b in zip(params, twin_params, strict=True))

    def test_options_of_the_checkpoint_win_and_are_logged(self, caplog):
        optimizer, params = both_halves(momentum=0.9, lr=0.5)
        run(optimizer, params, both_gradients(1))
        fresh, _ = both_halves(ns_steps=6)
        fresh.load_state_dict(optimizer.state_dict())
        assert fresh.param_groups[0]["momentum"] == 0.9
        assert "win over those of this run" in caplog.text
        assert "momentum 0.9, not 0.95; ns_steps 5, not 6" in caplog.text
        caplog.clear()
        fresh.load_state_dict(optimizer.state_dict())
        assert not caplog.text

    def test_the_scale_that_had_a_name_of_ours_before_torch_had_one_is_loaded(self):
        optimizer, params = both_halves(adjust_lr_fn="spectral_unclamped")
        run(optimizer, params, both_gradients(1))
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group["adjust_lr_fn"] = "rms_to_rms"
        fresh, _ = both_halves()
        fresh.load_state_dict(saved)
        assert fresh.param_groups[0]["adjust_lr_fn"] == "spectral_unclamped"

    def test_users_pre_hook_comes_first(self):
        optimizer, params = both_halves()
        run(optimizer, params, both_gradients(1))
        renamed = optimizer.state_dict()
        for state in renamed["state"].values():
            if "momentum_buffer" in state:
                state["momentum"] = state.pop("momentum_buffer")

        def rename(_, state_dict):
            for state in state_dict["state"].values():
                if "momentum" in state:
                    state["momentum_buffer"] = state.pop("momentum")

        fresh, _ = both_halves()
        with pytest.raises(ValueError, match=r"lacks \['momentum_buffer'\]"):
            fresh.load_state_dict(renamed)
        fresh.register_load_state_dict_pre_hook(rename)
        fresh.load_state_dict(renamed)
        assert all(fresh.state[p] for group in fresh.param_groups for p in group["params"])


class TestRefusedCheckpoints:
    """Each checkpoint raises an error that names the fault, and the optimizer stays as it was."""

    @staticmethod
    def named(shapes=SHAPES, prefix="layers", use_muon=True):
        return {"params": [(f"{prefix}.{i}", p) for i, p in enumerate(parameters(shapes))], "use_muon": use_muon}

    def stepped(self, *groups):
        optimizer = Muon(list(groups) or [self.named(), self.named(REST, "rest", False)])
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
        return optimizer

    def refused(self, state_dict, message, optimizer=None):
        optimizer = optimizer or self.stepped()
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=message) as error:
            optimizer.load_state_dict(state_dict)
        assert "nothing was changed" in str(error.value)
        after = optimizer.state_dict()
        assert before["param_groups"] == after["param_groups"]
        for i, state in before["state"].items():
            assert all(torch.equal(value, after["state"][i][key]) for key, value in state.items())

    @pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
    def test_another_optimizer(self, name):
        cls = getattr(torch.optim, name, None) or pytest.skip(f"this torch has no {name}")
        self.refused(cls(parameters()).state_dict(), "written by another optimizer.*`use_muon` is not among them")

    def test_not_an_optimizer(self):
        self.refused({"model": 1}, r"not an optimizer's state_dict: its keys are \['model'\]")

    def test_another_number_of_parameters(self):
        fewer = self.stepped(self.named(SHAPES[:3]), self.named(REST, "rest", False))
        self.refused(
            fewer.state_dict(), r"does not have layers.3, layers.4, layers.5 \(6 parameters, this optimizer 9\)"
        )
        self.refused(self.stepped().state_dict(), "which this optimizer does not train", fewer)

    def test_another_number_of_parameters_without_names(self):
        optimizer, params = both_halves()
        run(optimizer, params, both_gradients(1))
        other = Muon(parameters())
        self.refused(optimizer.state_dict(), "9 parameters in groups of 6 Muon .* 3 AdamW, this optimizer has 6", other)

    def test_another_routing(self):
        moved_one = self.stepped(self.named(SHAPES[:-1]), self.named(REST, "rest", False))
        extra = {"params": [("layers.5", parameters([SHAPES[-1]])[0])], "use_muon": False}
        moved_one.add_param_group(extra)
        self.refused(moved_one.state_dict(), r"the routing changed for layers.5 \(AdamW there\)")

    def test_another_order(self):
        swapped = self.named()
        swapped["params"].reverse()
        optimizer = self.stepped(swapped, self.named(REST, "rest", False))
        self.refused(optimizer.state_dict(), "in another order, and state is matched by position")

    def test_another_shape(self):
        other = self.named()
        other["params"][2] = ("layers.2", nn.Parameter(torch.randn(5, 5)))
        optimizer = self.stepped(other, self.named(REST, "rest", False))
        self.refused(optimizer.state_dict(), r"layers.2 \(16, 40\): its momentum_buffer has shape \(5, 5\)")

    @pytest.mark.parametrize(("index", "key"), [(1, "momentum_buffer"), (len(SHAPES), "exp_avg")])
    def test_missing_moments(self, index, key):
        state_dict = self.stepped().state_dict()
        del state_dict["state"][index][key]
        self.refused(state_dict, f"moments are missing: .* lacks \\['{key}'\\]")

    def test_half_of_the_state(self):
        state_dict = self.stepped().state_dict()
        del state_dict["state"][0]
        self.refused(state_dict, "moments are missing: layers.0")

    @pytest.mark.parametrize(("option", "value"), [("ns_dtype", "fp8"), ("momentum", 2.0), ("adamw_betas", (0.9,))])
    def test_options_that_are_not_valid(self, option, value):
        state_dict = self.stepped().state_dict()
        state_dict["param_groups"][0][option] = value
        self.refused(state_dict, f"one of its param groups has {option}=.* is not valid")

    def test_moments_that_are_not_finite(self):
        state_dict = self.stepped().state_dict()
        state_dict["state"][1]["momentum_buffer"][0, 0] = float("nan")
        self.refused(state_dict, r"layers.1 \(40, 16\): its momentum_buffer is not finite")

    def test_all_complaints_at_once(self):
        state_dict = self.stepped().state_dict()
        del state_dict["state"][0]
        state_dict["state"][3]["momentum_buffer"] = torch.zeros(2, 2)
        self.refused(state_dict, r"(?s)layers.3 \(24, 24\): its momentum_buffer.*moments are missing: layers.0")
