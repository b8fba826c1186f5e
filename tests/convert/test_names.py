"""Every parameter gets its own moments, matched by name or by the order of the source."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.convert.sources import (
    IN_ORDER,
    OTHERS,
    convert,
    ours,
    saved,
    trained,
)
from tests.other_muons import Model, gradients, jordan_2024, jordan_2025, moonlight_like, run


class TestOrder:
    """Gradients differ between parameters, so that exchanged moments would show."""

    @staticmethod
    def check(optimizer, model, source, factor=1 - 0.95, **arguments):
        target = ours(model)
        target.load_state_dict(convert(optimizer, model, source, target, **arguments).state_dict)
        for name, p in model.named_parameters():
            if p.requires_grad and "momentum_buffer" in optimizer.state[p]:
                expected = optimizer.state[p]["momentum_buffer"].reshape(p.shape) * factor
                assert torch.equal(target.state[p]["momentum_buffer"], expected), name
            elif p.requires_grad:
                assert torch.equal(target.state[p]["exp_avg"], optimizer.state[p][optimizer.averages[0]]), name

    @pytest.mark.parametrize("name", OTHERS)
    def test_all_trained(self, name):
        source, make, _, arguments = OTHERS[name]
        model, optimizer = trained(make)
        self.check(optimizer, model, source, 1 if name == "jordan 2025" else 1 - 0.95, **arguments)

    @pytest.mark.parametrize("source", ["llamafactory-v0", "llamafactory-v1", "moonlight"])
    def test_frozen_layers(self, source):
        model = Model()
        model.embed_tokens.requires_grad_(False)
        model.layers[1].requires_grad_(False)
        model, optimizer = trained(lambda m: moonlight_like(m, source), model=model)
        self.check(optimizer, model, source)

    def test_tied_weights(self):
        model = Model()
        model.lm_head.weight = model.embed_tokens.weight
        self.check(trained(moonlight_like, model=model)[1], model, "llamafactory-v0")

    @pytest.mark.parametrize("key", ["names", "param_names", "keys"])
    def test_names(self, key):
        """Match by name alone."""
        model, optimizer = trained(jordan_2025)
        state_dict = saved(optimizer)
        names = [
            name for g in optimizer.param_groups for p in g["params"] for name, q in model.named_parameters() if p is q
        ]
        arguments = {}
        if key == "names":
            arguments = {"names": names}
        elif key == "param_names":
            for group in state_dict["param_groups"]:
                group["param_names"] = [f"_orig_mod.module.{names[i]}" for i in group["params"]]
        else:  # the form of torch.distributed.checkpoint
            state_dict["state"] = {names[i]: state for i, state in state_dict["state"].items()}
            for group in state_dict["param_groups"]:
                group["params"] = [names[i] for i in group["params"]]
        target = ours(model)
        target.load_state_dict(convert(state_dict, model, "keller-jordan", target, **arguments).state_dict)
        for name, p in model.named_parameters():
            key = "momentum_buffer" if "momentum_buffer" in optimizer.state[p] else "exp_avg"
            assert torch.equal(target.state[p][key], optimizer.state[p][key]), name

    def test_momentum_kept_as_a_matrix(self):
        """Convert stacks of matrices from versions that flattened tensors of more than two dims."""
        model = Model()
        model.layers[0].experts = nn.Module()
        model.layers[0].experts.down = nn.Parameter(torch.randn(3, 4, 5))
        optimizer = jordan_2024(model)
        run(model, gradients(model, 1), optimizer)
        stack = model.layers[0].experts.down
        buffer = torch.randn(3, 20)
        optimizer.state[stack] = {"use_muon": True, "momentum_buffer": buffer}
        self.check(optimizer, model, "keller-jordan", **IN_ORDER)

    def test_the_model_may_be_on_the_meta_device(self):
        model, optimizer = trained(moonlight_like)
        empty = Model().to("meta")
        conversion = convert(optimizer, empty, "llamafactory-v0", ours(empty))
        target = ours(model)
        target.load_state_dict(conversion.state_dict)
        p = model.layers[2].up_proj.weight
        assert torch.equal(target.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"] * (1 - 0.95))
