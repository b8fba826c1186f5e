"""States that the conversion refuses, and the text of the error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_muon.convert.conversion import convert_state_dict
from hf_muon.convert.formats import FORMATS
from tests.convert.sources import (
    IN_ORDER,
    OTHERS,
    convert,
    ours,
    saved,
    trained,
    with_word_embeddings,
)
from tests.other_muons import Model, halves, jordan_2025, moonlight_like


class TestRefused:
    """A wrong source, ambiguous parameters and moments that would be lost. The target does not change."""

    @staticmethod
    def refused(message, optimizer=None, model=None, source="llamafactory-v0", edit=None, target=None, **arguments):
        if optimizer is None:
            model, optimizer = trained(moonlight_like)
        state_dict = optimizer if isinstance(optimizer, dict) else saved(optimizer)
        if edit:
            edit(state_dict)
        target = target or ours(model)
        with pytest.raises(ValueError, match=message):
            convert_state_dict(state_dict, model, target, source, **arguments)
        assert not target.state

    def test_an_unknown_format(self):
        self.refused(f"'moonlit' is not a format. Valid: {', '.join(FORMATS)}", source="moonlit")

    @pytest.mark.parametrize("state_dict", [{"model": 1}, [1], {"param_groups": 3, "state": {}}])
    def test_not_an_optimizer(self, state_dict):
        with pytest.raises(ValueError, match="not an optimizer's state_dict"):
            convert_state_dict(state_dict, Model(), ours(Model()), "torch")

    @pytest.mark.parametrize("source", ["torch", "keller-jordan"])
    def test_another_format(self, source):
        self.refused(
            r"param groups hold .*'wd'\].* looks like llamafactory-v0 or llamafactory-v1 or moon", source=source
        )

    def test_jordans_as_moonlights(self):
        model, optimizer = trained(jordan_2025)
        self.refused("It looks like keller-jordan", optimizer, model, "moonlight")

    def test_hf_muons_own(self):
        model, optimizer = trained(ours)
        self.refused("It is hf_muon's own already", optimizer, model, "keller-jordan")

    def test_adamw_alone(self):
        model, optimizer = trained(lambda m: torch.optim.AdamW(m.parameters()))
        self.refused("no parameter that Muon stepped", optimizer, model, "keller-jordan", **IN_ORDER)

    @pytest.mark.parametrize("name", ["jordan 2024", "jordan 2025"])
    def test_neither_names_nor_an_order(self, name):
        source, make, _, _ = OTHERS[name]
        model, optimizer = trained(make)
        self.refused("holds no names, .* say in_model_order; if not", optimizer, model, source)

    @pytest.mark.parametrize("option", ["nesterov", "backend", "ema"])
    def test_the_form_of_the_momentum_cannot_be_told(self, option):
        """Refuse options of modified copies of that file, whose rule for the momentum is unknown."""
        model, optimizer = trained(lambda m: jordan_2025(m, **{option: True}))
        message = r"cannot be told from it.* momentum_form=sgd.* momentum_form=ema"
        self.refused(message, optimizer, model, "keller-jordan", **IN_ORDER)

    def test_a_form_that_contradicts_the_format(self):
        self.refused("llamafactory-v0 keeps its momentum as sgd", momentum_form="ema")
        self.refused("momentum_form='EMA' is not valid. Valid: ema or sgd", momentum_form="EMA")

    def test_momentum(self):
        def edit(state_dict):
            for group in state_dict["param_groups"]:
                group["momentum"] = None

        self.refused("do not hold their momentum", edit=edit)
        self.refused("momentum=1.5 is not valid", edit=edit, momentum=1.5)
        self.refused("momentum=0.9: the source says 0.95", momentum=0.9)
        model, optimizer = trained(moonlight_like)
        state_dict = saved(optimizer)
        edit(state_dict)
        assert convert(state_dict, model, momentum=0.75).factors == (0.25,)

    @pytest.mark.parametrize("value", [None, 0])
    def test_adamws_step(self, value):
        def edit(state_dict):
            state = next(state for state in state_dict["state"].values() if "moment1" in state)
            state.pop("step")
            if value is not None:
                state["step"] = value

        lost = "AdamW's mean nothing without their number of steps"
        self.refused(lost if value is None else "its step is 0.0 although it has moments", edit=edit)

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda s: s.update(use_muon=False), "its state is Muon's, and its flag use_muon says False"),
            (lambda s: s.update(variance=torch.ones(1)), r"holds \['momentum_buffer', 'variance'\], which is neither"),
            (lambda s: s.update(momentum_buffer=[0.0]), "something that is not a tensor of floats"),
            (lambda s: s.update(momentum_buffer=torch.ones(16, 16).int()), "something that is not a tensor of floats"),
            (lambda s: s["momentum_buffer"].fill_(torch.nan), "its momentum_buffer is not finite"),
            (lambda s: s.pop("momentum_buffer"), r"layers.0.q_proj.weight: no moments in the source"),
            (lambda s: s.update(momentum_buffer=torch.ones(9, 9)), r"q_proj.weight \(16, 16\): parameter 0 of group 0"),
        ],
    )
    def test_broken_state(self, edit, message):
        self.refused(message, edit=lambda state_dict: edit(state_dict["state"][0]))

    def test_another_model(self):
        _, optimizer = trained(moonlight_like)
        smaller = Model()
        del smaller.layers[2]
        self.refused("has 25 parameters, and llamafactory-v0 lists 18 of this model's 18", optimizer, smaller)
        wider = Model()
        for layer in wider.layers:
            layer.up_proj = nn.Linear(16, 48, bias=False)
        self.refused(r"up_proj.weight \(48, 16\): parameter 2 of group 0 in the source has", optimizer, wider)

    def test_another_choice_of_what_is_trained(self):
        model, optimizer = trained(moonlight_like)
        model.lm_head.requires_grad_(False)
        self.refused("25 parameters, and llamafactory-v0 lists 24 of this model's 25", optimizer, model)
        names = [n for half in halves(model, frozen=True) for p in half for n, q in model.named_parameters() if p is q]
        self.refused("lm_head.weight: trained there and not here", optimizer, model, names=names)

    def test_another_rule(self):
        model = with_word_embeddings()
        model, optimizer = trained(moonlight_like, model=model)
        self.refused("was stepped by Muon, where llamafactory-v1 has", optimizer, model, "llamafactory-v1")

    def test_one_rank_of_two(self):
        """Refuse the file of one rank: Keller Jordan's distributed Muon keeps each matrix's momentum on one rank."""
        model, optimizer = trained(jordan_2025)
        state_dict = saved(optimizer)
        for i in state_dict["param_groups"][0]["params"][::2]:
            del state_dict["state"][i]
        self.refused(
            "parameter 0 of group 0 has no moments, and so no shape", state_dict, model, "keller-jordan", **IN_ORDER
        )
        names = [n for g in optimizer.param_groups for p in g["params"] for n, q in model.named_parameters() if p is q]
        self.refused("It may be the state of one rank of several", state_dict, model, "keller-jordan", names=names)

    def test_one_shape_in_two_groups(self):
        def make(model):
            optimizer = jordan_2025(model)
            head = {**optimizer.param_groups[1], "params": [model.lm_head.weight]}
            optimizer.param_groups[1]["params"] = [p for p in halves(model)[1] if p is not model.lm_head.weight]
            optimizer.add_param_group(head)
            return optimizer

        model, optimizer = trained(make)
        self.refused(
            r"embed_tokens.weight, lm_head.weight: group 1 \(AdamW\) and group 2 \(AdamW\) have this shape \(50, 16\)",
            optimizer, model, "keller-jordan", **IN_ORDER,
        )  # fmt: skip

    def test_shapes_that_are_not_here(self):
        _, optimizer = trained(jordan_2025)
        other = Model()
        other.layers[0].up_proj = nn.Linear(16, 30, bias=False)
        message = r"it has 3 parameters of shape \(40, 16\), this model 2 \(layers.1.up_proj.weight, layers.2.up_proj"
        self.refused(message, optimizer, other, "keller-jordan", **IN_ORDER)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda names: names[1:], "names: 24 names for a state of 25 parameters"),
            (lambda names: ["layer.0.q_proj.weight", *names[1:]], "Did you mean 'layers.0.q_proj.weight'"),
            (lambda names: [names[1], *names[1:]], "stands there twice"),
        ],
    )
    def test_names(self, change, message):
        model, optimizer = trained(jordan_2025)
        names = [n for g in optimizer.param_groups for p in g["params"] for n, q in model.named_parameters() if p is q]
        self.refused(message, optimizer, model, "keller-jordan", names=change(names))

    def test_a_state_of_adamw_where_one_is_inside(self):
        self.refused("llamafactory-v0 has its AdamW half inside", adamw={})

    def test_an_optimizer_over_another_model(self):
        model, optimizer = trained(moonlight_like)
        self.refused("not over this Model", optimizer, model, target=ours(with_word_embeddings()))

    def test_an_optimizer_without_names(self):
        from hf_muon import Muon

        model, optimizer = trained(moonlight_like)
        self.refused("Make it with build_optimizer", optimizer, model, target=Muon(halves(model)[0]))
