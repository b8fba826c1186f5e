from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from hf_muon import build_optimizer
from hf_muon.convert.conversion import convert_state_dict
from hf_muon.convert.formats import FORMATS
from tests.other_muons import Model, gradients, halves, jordan_2024, jordan_2025, moonlight_like, run
from tests.reference import relative_difference

BEFORE, AFTER = 4, 5
MOONLIGHT_RULE = {"adjust_lr_fn": "match_rms_adamw", "adamw_betas": (0.9, 0.95)}
JORDAN_RULE = {"adjust_lr_fn": "original", "adamw_betas": (0.9, 0.95)}
IN_ORDER = {"in_model_order": True}

# Each other Muon: its format, how it is made, our options for its rule, and what has to be said of its state.
OTHERS = {
    "llamafactory-v0": ("llamafactory-v0", moonlight_like, MOONLIGHT_RULE, {}),
    "llamafactory-v1": ("llamafactory-v1", lambda m: moonlight_like(m, "llamafactory-v1"), MOONLIGHT_RULE, {}),
    "moonlight": ("moonlight", lambda m: moonlight_like(m, "moonlight"), MOONLIGHT_RULE, {}),
    "jordan 2024": ("keller-jordan", jordan_2024, JORDAN_RULE, IN_ORDER),
    "jordan 2025": ("keller-jordan", jordan_2025, JORDAN_RULE, IN_ORDER),
    "jordan, copied": (
        "keller-jordan",
        lambda m: jordan_2025(m, form="sgd", nesterov=True),
        JORDAN_RULE,
        {**IN_ORDER, "momentum_form": "sgd"},
    ),
}


def ours(model, **options):
    rule = {"lr": 0.02, "ns_coefficients": "original", "ns_dtype": "fp32", "adamw_eps": 1e-8}
    return build_optimizer(model, **{**rule, **options})


def saved(optimizer):
    """A state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def trained(make, steps=BEFORE, model=None):
    model = model or Model()
    optimizer = make(model)
    run(model, gradients(model, steps), optimizer)
    return model, optimizer


def convert(optimizer, model, source="llamafactory-v0", target=None, **arguments):
    state_dict = optimizer if isinstance(optimizer, dict) else saved(optimizer)
    return convert_state_dict(state_dict, model, target or ours(model), source, **arguments)


def moments(target, model):
    """By the model's own names, whatever the order of groups."""
    return {name: target.state[p] for name, p in model.named_parameters() if p.requires_grad}


class TestAgainstAStraightRun:
    """Steps there, converted, steps here, against the same steps all there.

    Momentum depends on the given gradients alone. Weights differ by fp32 rounding: where the momentum was scaled, which
    orthogonalization does not see, by that of a factor that is no power of two; else by the order of operations.
    """

    @pytest.mark.parametrize("name", OTHERS)
    def test_weights(self, name):
        source, make, rule, said = OTHERS[name]
        theirs, optimizer = trained(make)
        start = [p.detach().clone() for p in theirs.parameters()]
        model = copy.deepcopy(theirs)
        target = ours(model, **rule)
        done = convert(optimizer, model, source, target, **said)
        target.load_state_dict(done.state_dict)
        rest = gradients(model, BEFORE + AFTER)[BEFORE:]
        run(model, rest, target)
        run(theirs, rest, optimizer)
        for before, one, other in zip(start, theirs.parameters(), model.parameters(), strict=True):
            assert relative_difference([before], [one], [other]) < 1e-5
        assert not done.other_options

    @pytest.mark.parametrize("name", [name for name in OTHERS if name != "jordan 2025"])
    def test_an_unscaled_momentum_would_show(self, name):
        source, make, rule, said = OTHERS[name]
        theirs, optimizer = trained(make)
        start = [p.detach().clone() for p in theirs.parameters()]
        model = copy.deepcopy(theirs)
        target = ours(model, **rule)
        target.load_state_dict(convert(optimizer, model, source, target, **said).state_dict)
        for p in halves(model)[0]:
            target.state[p]["momentum_buffer"] /= 0.05
        rest = gradients(model, BEFORE + 1)[BEFORE:]
        run(model, rest, target)
        run(theirs, rest, optimizer)
        assert relative_difference(start, list(theirs.parameters()), list(model.parameters())) > 0.1

    @pytest.mark.parametrize("name", OTHERS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_moments(self, name, dtype):
        source, make, _, said = OTHERS[name]
        model, optimizer = trained(make, model=Model().to(dtype))
        target = ours(model)
        target.load_state_dict(convert(optimizer, model, source, target, **said).state_dict)
        factor = 1 if name == "jordan 2025" else 1 - 0.95
        for p in halves(model)[0]:
            expected = optimizer.state[p]["momentum_buffer"].float() * factor
            assert target.state[p]["momentum_buffer"].dtype == torch.float32
            assert torch.equal(target.state[p]["momentum_buffer"], expected)
        for p in halves(model)[1]:
            there, here = optimizer.state[p], target.state[p]
            for one, other in zip(optimizer.averages, ("exp_avg", "exp_avg_sq"), strict=True):
                assert torch.equal(there[one], here[other])
            assert here["step"].dtype == torch.float32
            assert here["step"] == there["step"] == BEFORE
        assert all(group["step"] == BEFORE for group in target.param_groups)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
class TestTorch:
    """torch.optim.Muon itself, with torch.optim.AdamW beside it."""

    @staticmethod
    def pair(model, named=False):
        muon, adamw = halves(model)
        if named:
            names = {id(p): f"module.{name}" for name, p in model.named_parameters()}
            muon, adamw = [(names[id(p)], p) for p in reversed(muon)], [(names[id(p)], p) for p in adamw]
        return (
            torch.optim.Muon(muon, lr=0.02, weight_decay=0.0, momentum=0.9),
            torch.optim.AdamW(adamw, lr=0.02, weight_decay=0.0, betas=(0.9, 0.95)),
        )

    def continued(self, named=False, **said):
        """Weights before, after going on there, and after going on here, in either half."""
        theirs = Model()
        muon, adamw = self.pair(theirs, named)
        run(theirs, gradients(theirs, BEFORE), muon, adamw)
        start = [p.detach().clone() for p in theirs.parameters()]
        model = copy.deepcopy(theirs)
        target = ours(model, momentum=0.9, **JORDAN_RULE)
        done = convert(muon, model, "torch", target, adamw=saved(adamw), **said)
        target.load_state_dict(done.state_dict)
        for one, other in zip(theirs.parameters(), model.parameters(), strict=True):
            state = muon.state.get(one) or adamw.state[one]
            assert all(torch.equal(state[key], value) for key, value in target.state[other].items())
        rest = gradients(model, BEFORE + AFTER)[BEFORE:]
        run(model, rest, target)
        run(theirs, rest, muon, adamw)
        for one, other in zip(*(halves(m)[1] for m in (theirs, model)), strict=True):
            assert torch.equal(one, other)
        # Momentum depends on the gradients alone, which are given: the two are the same moving average still.
        for one, other in zip(*(halves(m)[0] for m in (theirs, model)), strict=True):
            assert torch.equal(muon.state[one]["momentum_buffer"], target.state[other]["momentum_buffer"])
        return start, list(theirs.parameters()), list(model.parameters()), done

    @pytest.mark.parametrize("named", [True, False])
    def test_straight_run(self, named, monkeypatch):
        def in_fp32(grad, ns_coefficients, ns_steps, eps):
            return torch_in_fp32(grad, ns_coefficients, ns_steps)

        monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_fp32)
        *weights, done = self.continued(named, **({} if named else IN_ORDER))
        assert relative_difference(*weights) < 1e-5
        assert not done.other_options

    def test_straight_run_in_its_own_bf16(self):
        *weights, _ = self.continued(**IN_ORDER)
        assert relative_difference(*weights) < 2e-2

    def test_the_adamw_half_is_missed(self):
        model = Model()
        muon, _ = self.pair(model)
        run(model, gradients(model, 1), muon)
        with pytest.raises(ValueError, match=r"embed_tokens.weight.* no moments in the source.*\(adamw\)"):
            convert(muon, model, "torch", **IN_ORDER)
        done = convert(muon, model, "torch", **IN_ORDER, accept_missing=True)
        assert set(done.from_zero) == {name for name, p in model.named_parameters() if p in set(halves(model)[1])}
        target = ours(model)
        target.load_state_dict(done.state_dict)
        assert all(target.state[p]["step"] == 0 and not target.state[p]["exp_avg"].any() for p in halves(model)[1])
        assert done.step == 1

    def test_options_are_told(self):
        model = Model()
        muon = torch.optim.Muon(halves(model)[0], momentum=0.8, nesterov=False, ns_steps=6, ns_coefficients=(3, -4, 2))
        run(model, gradients(model, 1), muon)
        target = build_optimizer(model)
        done = convert(muon, model, "torch", target, **IN_ORDER, accept_missing=True)
        expected = {"momentum": 0.8, "nesterov": False, "ns_steps": 6, "ns_coefficients": (3, -4, 2)}
        assert done.other_options == {**expected, "adjust_lr_fn": "original"}
        assert [group["momentum"] for group in done.state_dict["param_groups"]] == [0.95] * len(target.param_groups)

    def test_torchs_adam_with_amsgrad(self):
        model = Model()
        muon, _ = self.pair(model)
        adamw = torch.optim.AdamW(halves(model)[1], amsgrad=True)
        run(model, gradients(model, 1), muon, adamw)
        with pytest.raises(ValueError, match=r"from torch.optim.AdamW:\n  - it was written with amsgrad"):
            convert(muon, model, "torch", adamw=saved(adamw), **IN_ORDER)


def torch_in_fp32(grad, coefficients, steps):
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


class TestLlamaFactoryItself:
    """The optimizer that LLaMA-Factory makes for `use_muon: true`, with its products in fp32."""

    @pytest.mark.parametrize("frozen", [False, True])
    def test_straight_run(self, frozen, monkeypatch):
        muon = pytest.importorskip("llamafactory.third_party.muon.muon")
        utils = pytest.importorskip("llamafactory.train.trainer_utils")
        coefficients = (3.4445, -4.7750, 2.0315)
        monkeypatch.setattr(
            muon, "zeropower_via_newtonschulz5", lambda grad, steps: torch_in_fp32(grad, coefficients, steps)
        )

        class Arguments:
            learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon = 0.02, 0.0, 0.9, 0.95, 1e-8

        theirs = Model()
        theirs.layers[1].requires_grad_(not frozen)
        optimizer = utils._create_muon_optimizer(theirs, Arguments)

        def step(grads):
            # Their step has no no_grad of its own: torch's schedulers and accelerate bring it.
            with torch.no_grad():
                run(theirs, grads, optimizer)

        all_grads = gradients(theirs, BEFORE + AFTER)
        step(all_grads[:BEFORE])
        start = [p.detach().clone() for p in theirs.parameters()]
        model = copy.deepcopy(theirs)
        target = ours(model, **MOONLIGHT_RULE)
        target.load_state_dict(convert(optimizer, model, "llamafactory-v0", target).state_dict)
        run(model, all_grads[BEFORE:], target)
        step(all_grads[BEFORE:])
        assert relative_difference(start, list(theirs.parameters()), list(model.parameters())) < 1e-5


class TestWhichIsWhich:
    """Every parameter gets its own moments: gradients differ, and so do the moments."""

    @staticmethod
    def check(optimizer, model, source, factor=1 - 0.95, **said):
        target = ours(model)
        target.load_state_dict(convert(optimizer, model, source, target, **said).state_dict)
        for name, p in model.named_parameters():
            if p.requires_grad and "momentum_buffer" in optimizer.state[p]:
                expected = optimizer.state[p]["momentum_buffer"].reshape(p.shape) * factor
                assert torch.equal(target.state[p]["momentum_buffer"], expected), name
            elif p.requires_grad:
                assert torch.equal(target.state[p]["exp_avg"], optimizer.state[p][optimizer.averages[0]]), name

    @pytest.mark.parametrize("name", OTHERS)
    def test_all_trained(self, name):
        source, make, _, said = OTHERS[name]
        model, optimizer = trained(make)
        self.check(optimizer, model, source, 1 if name == "jordan 2025" else 1 - 0.95, **said)

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
        """In an order that nothing but names can tell."""
        model, optimizer = trained(jordan_2025)
        state_dict = saved(optimizer)
        names = [
            name for g in optimizer.param_groups for p in g["params"] for name, q in model.named_parameters() if p is q
        ]
        said = {}
        if key == "names":
            said = {"names": names}
        elif key == "param_names":
            for group in state_dict["param_groups"]:
                group["param_names"] = [f"_orig_mod.module.{names[i]}" for i in group["params"]]
        else:  # as torch.distributed.checkpoint makes it
            state_dict["state"] = {names[i]: state for i, state in state_dict["state"].items()}
            for group in state_dict["param_groups"]:
                group["params"] = [names[i] for i in group["params"]]
        target = ours(model)
        target.load_state_dict(convert(state_dict, model, "keller-jordan", target, **said).state_dict)
        for name, p in model.named_parameters():
            key = "momentum_buffer" if "momentum_buffer" in optimizer.state[p] else "exp_avg"
            assert torch.equal(target.state[p][key], optimizer.state[p][key]), name

    def test_momentum_kept_as_a_matrix(self):
        """Stacks of matrices, in the versions that flattened what has more than two dims."""
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
        done = convert(optimizer, empty, "llamafactory-v0", ours(empty))
        target = ours(model)
        target.load_state_dict(done.state_dict)
        p = model.layers[2].up_proj.weight
        assert torch.equal(target.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"] * (1 - 0.95))


class TestRerouted:
    """llamafactory-v0 steps GPT-2's embeddings by Muon."""

    @staticmethod
    def model():
        model = Model()
        model.wte = nn.Embedding(30, 16)
        return model

    def test_refused_by_name(self):
        model, optimizer = trained(moonlight_like, model=self.model())
        with pytest.raises(ValueError, match=r"wte.weight \(Muon there, AdamW here\).*accept_rerouted"):
            convert(optimizer, model)

    def test_accepted(self):
        model, optimizer = trained(moonlight_like, model=self.model())
        target = ours(model)
        done = convert(optimizer, model, target=target, accept_rerouted=True)
        assert done.from_zero == {"wte.weight": "Muon there, AdamW here"}
        target.load_state_dict(done.state_dict)
        assert not any(value.any() for value in target.state[model.wte.weight].values())
        run(model, gradients(model, 1), target)
        assert target.state[model.wte.weight]["step"] == 1

    def test_the_other_way_round(self):
        model, optimizer = trained(moonlight_like)
        target = ours(model, muon_patterns="embed_tokens")
        with pytest.raises(ValueError, match=r"embed_tokens.weight \(AdamW there, Muon here\)"):
            convert(optimizer, model, target=target)
        target.load_state_dict(convert(optimizer, model, target=target, accept_rerouted=True).state_dict)
        assert not target.state[model.embed_tokens.weight]["momentum_buffer"].any()


class TestRefused:
    """What is not what it is said to be, what cannot be told, and what would be lost; the target stays as it was."""

    @staticmethod
    def refused(message, optimizer=None, model=None, source="llamafactory-v0", edit=None, target=None, **said):
        if optimizer is None:
            model, optimizer = trained(moonlight_like)
        state_dict = optimizer if isinstance(optimizer, dict) else saved(optimizer)
        if edit:
            edit(state_dict)
        target = target or ours(model)
        with pytest.raises(ValueError, match=message):
            convert_state_dict(state_dict, model, target, source, **said)
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
        """Copies of that file are many, and what they have changed is not known."""
        model, optimizer = trained(lambda m: jordan_2025(m, **{option: True}))
        message = r"cannot be told from it.* momentum_form=sgd.* momentum_form=ema"
        self.refused(message, optimizer, model, "keller-jordan", **IN_ORDER)

    def test_the_form_is_said_against_the_format(self):
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
        model = TestRerouted.model()
        model, optimizer = trained(moonlight_like, model=model)
        self.refused("was stepped by Muon, where llamafactory-v1 has", optimizer, model, "llamafactory-v1")

    def test_one_rank_of_two(self):
        """Keller Jordan's distributed Muon keeps each matrix's momentum on one rank."""
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
        self.refused("not over this Model", optimizer, model, target=ours(TestRerouted.model()))

    def test_an_optimizer_without_names(self):
        from hf_muon import Muon

        model, optimizer = trained(moonlight_like)
        self.refused("Make it with build_optimizer", optimizer, model, target=Muon(halves(model)[0]))
