"""Runs that continue from a converted state, compared with the same runs without a conversion."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from hf_muon.cli.model_source import model_from
from hf_muon.optimizer.checkpoint_format import unpacked
from tests.convert.deepspeed_state.write import STEPS
from tests.convert.sources import (
    AFTER,
    BEFORE,
    JORDAN_RULE,
    MOONLIGHT_RULE,
    OTHERS,
    convert,
    names_of,
    ours,
    saved,
    trained,
    with_word_embeddings,
)
from tests.support.other_muons import Model, gradients, halves, moonlight_like, run
from tests.support.reference import relative_difference


class TestAgainstAStraightRun:
    """Steps there, a conversion and steps here, compared with all steps there.

    Momentum depends on the gradients alone. Weights differ by fp32 rounding. Conversion scales the momentum of some
    sources, which orthogonalization ignores except for the rounding of a factor that is not a power of two; for the
    others the order of operations differs.
    """

    @staticmethod
    def continued(name, steps, unscaled=False):
        """Return the weights before, after more steps of theirs, and after more steps of ours."""
        source, make, rule = OTHERS[name]
        theirs, optimizer = trained(make)
        start = [p.detach().clone() for p in theirs.parameters()]
        model = copy.deepcopy(theirs)
        target = ours(model, **rule)
        target.load_state_dict(convert(optimizer, model, source, target, theirs))
        for p in halves(model)[0] if unscaled else ():
            target.state[p]["momentum_buffer"] /= 0.05
        rest = gradients(model, BEFORE + steps)[BEFORE:]
        run(model, rest, target)
        run(theirs, rest, optimizer)
        return start, list(theirs.parameters()), list(model.parameters())

    @pytest.mark.promise("convert")
    @pytest.mark.parametrize("name", OTHERS)
    def test_weights(self, name):
        for before, one, other in zip(*self.continued(name, AFTER), strict=True):
            assert relative_difference([before], [one], [other]) < 1e-5

    @pytest.mark.parametrize("name", [name for name in OTHERS if name != "deepspeed"])
    def test_an_unscaled_momentum_would_show(self, name):
        assert relative_difference(*self.continued(name, 1, unscaled=True)) > 0.1

    @pytest.mark.parametrize("name", OTHERS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_moments(self, name, dtype):
        source, make, _ = OTHERS[name]
        model, optimizer = trained(make, model=Model().to(dtype))
        target = ours(model)
        target.load_state_dict(convert(optimizer, model, source, target, model))
        factor = 1 if name == "deepspeed" else 1 - 0.95
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
    """torch.optim.Muon itself, together with torch.optim.AdamW."""

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

    def continued(self, named=False):
        """Return the weights before, after more steps of theirs, and after more steps of ours."""
        theirs = Model()
        muon, adamw = self.pair(theirs, named)
        run(theirs, gradients(theirs, BEFORE), muon, adamw)
        start = [p.detach().clone() for p in theirs.parameters()]
        model = copy.deepcopy(theirs)
        target = ours(model, momentum=0.9, **JORDAN_RULE)
        names = None if named else names_of(theirs, muon, adamw)
        target.load_state_dict(convert(muon, model, "torch", target, adamw=saved(adamw), names=names))
        for one, other in zip(theirs.parameters(), model.parameters(), strict=True):
            state = muon.state.get(one) or adamw.state[one]
            assert all(torch.equal(state[key], value) for key, value in target.state[other].items())
        rest = gradients(model, BEFORE + AFTER)[BEFORE:]
        run(model, rest, target)
        run(theirs, rest, muon, adamw)
        for one, other in zip(*(halves(m)[1] for m in (theirs, model)), strict=True):
            assert torch.equal(one, other)
        # Momentum depends on the gradients alone, which are precomputed: both moving averages stay equal but for the
        # last bits, because theirs is a `lerp`, which rounds once.
        for one, other in zip(*(halves(m)[0] for m in (theirs, model)), strict=True):
            buffers = muon.state[one]["momentum_buffer"], target.state[other]["momentum_buffer"]
            torch.testing.assert_close(*buffers, rtol=1e-6, atol=1e-7)
        return start, list(theirs.parameters()), list(model.parameters())

    @pytest.mark.parametrize("named", [True, False])
    def test_straight_run(self, named, monkeypatch):
        def in_fp32(grad, ns_coefficients, ns_steps, eps):
            return torch_in_fp32(grad, ns_coefficients, ns_steps)

        monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_fp32)
        assert relative_difference(*self.continued(named)) < 1e-5

    def test_straight_run_in_its_own_bf16(self):
        assert relative_difference(*self.continued()) < 2e-2

    def test_options_stay_those_of_the_target(self):
        model = Model()
        muon = torch.optim.Muon(halves(model)[0], momentum=0.8, nesterov=False, ns_steps=6, ns_coefficients=(3, -4, 2))
        adamw = torch.optim.AdamW(halves(model)[1], betas=(0.9, 0.95))
        run(model, gradients(model, 1), muon, adamw)
        converted = convert(muon, model, "torch", adamw=saved(adamw), names=names_of(model, muon, adamw))
        assert {unpacked(group)["momentum"] for group in converted["param_groups"]} == {0.95}

    @pytest.mark.parametrize(("amsgrad", "code"), [(None, "moments-missing"), (True, "foreign-moments")])
    def test_moments_that_ours_has_not(self, amsgrad, code):
        """Refuse the state of torch's Muon alone, and one of AdamW with a moment more."""
        model = Model()
        muon, _ = self.pair(model)
        adamw = [torch.optim.AdamW(halves(model)[1], amsgrad=amsgrad)] if amsgrad else []
        run(model, gradients(model, 1), muon, *adamw)
        more = {"adamw": saved(adamw[0])} if adamw else {}
        with pytest.raises(ValueError, match=rf"\[{code}\]"):
            convert(muon, model, "torch", names=names_of(model, muon, *adamw), **more)


def torch_in_fp32(grad, coefficients, steps):
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


class TestDeepSpeedItself:
    """The checkpoint that DeepSpeed's engine writes at stage 0, and its optimizer's moments by name."""

    FOLDER = Path(__file__).parent / "deepspeed_state"

    def state(self):
        return torch.load(self.FOLDER / "mp_rank_00_model_states.pt", weights_only=True)["optimizer"]

    @pytest.mark.parametrize("embedding", ["embed_tokens", "tokenEmbed"])
    def test_moments_come_to_their_names_without_names(self, embedding):
        """DeepSpeed looks for words in names in lower case."""
        model = model_from(self.FOLDER)
        modules = model.model._modules
        model.model._modules = {name.replace("embed_tokens", embedding): module for name, module in modules.items()}
        target = convert(self.state(), model, "deepspeed")
        by_name = torch.load(self.FOLDER / "by_name.pt", weights_only=True)
        names = [name for group in target["param_groups"] for name in group["param_names"]]
        assert sorted(names) == sorted(name.replace("embed_tokens", embedding) for name in by_name)
        for name, own in zip(names, target["state"].values(), strict=True):
            expected = by_name[name.replace(embedding, "embed_tokens")]
            assert own.keys() == expected.keys()
            assert all(torch.equal(own[key], value) for key, value in expected.items() if key != "step"), name

    def test_all_of_adamw_has_the_steps_that_one_parameter_counts(self):
        assert sorted(own["step"] for own in self.state()["state"].values() if "step" in own)[-2:] == [0, STEPS]
        steps = [
            own["step"]
            for own in convert(self.state(), model_from(self.FOLDER), "deepspeed")["state"].values()
            if "step" in own
        ]
        assert set(map(float, steps)) == {STEPS}

    def test_groups_of_the_user_need_names(self):
        state = self.state()
        state["param_groups"][1]["name"] = "mine"
        with pytest.raises(ValueError, match=r"\[names-needed\]"):
            convert(state, model_from(self.FOLDER), "deepspeed")


@pytest.mark.llamafactory
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
            # Their step does not disable gradients itself; torch's schedulers and accelerate do it around the step.
            with torch.no_grad():
                run(theirs, grads, optimizer)

        all_grads = gradients(theirs, BEFORE + AFTER)
        step(all_grads[:BEFORE])
        start = [p.detach().clone() for p in theirs.parameters()]
        model = copy.deepcopy(theirs)
        target = ours(model, **MOONLIGHT_RULE)
        target.load_state_dict(convert(optimizer, model, "llamafactory-v0", target))
        run(model, all_grads[BEFORE:], target)
        step(all_grads[BEFORE:])
        assert relative_difference(start, list(theirs.parameters()), list(model.parameters())) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "wte.weight: Muon there"), ({"muon_patterns": "wte|embed_tokens"}, "embed_tokens.weight: AdamW there")],
)
def test_what_the_other_half_stepped_is_refused_by_name(options, message):
    model, optimizer = trained(moonlight_like, model=with_word_embeddings())
    with pytest.raises(ValueError, match=rf"{message}.*\[routing-changed\]"):
        convert(optimizer, model, target=ours(model, **options))


def test_moments_of_the_models_wrapper_keep_their_names():
    """Read a state keyed by the names of a model that was wrapped by DistributedDataParallel."""
    model, optimizer = trained(moonlight_like)
    names = dict(enumerate(names_of(model, optimizer)))
    state = saved(optimizer)
    state["state"] = {f"module.{names[key]}": value for key, value in state["state"].items()}
    state["param_groups"][0]["params"] = [f"module.{name}" for name in reversed(names.values())]
    target = ours(model)
    target.load_state_dict(convert(state, model, target=target))
    for name, p in model.named_parameters():
        buffer = optimizer.state[p].get("momentum_buffer")
        assert buffer is None or torch.equal(target.state[p]["momentum_buffer"], buffer * (1 - 0.95)), name
