"""States in every form that is loaded: a run that loads one continues with the bits of the uninterrupted run."""

from __future__ import annotations

import copy
import json
import pickle
import weakref

import pytest
import torch
from torch import nn

from hf_muon import Muon, build_optimizer
from hf_muon.config import OPTIMIZER_OPTIONS
from hf_muon.math.moments import MOMENTS, decoded, encode_, scale_shape
from hf_muon.optimizer.state import entries_of
from tests.optimizer.cases import (
    STEPS,
    adamw_over,
    bits,
    both_gradients,
    both_halves,
    build,
    equal,
    normal,
    params_of,
    run,
    step,
    stepped,
)
from tests.refusals import differences, snapshot

# --- forms of the same state


def of_steps(form):
    def change(saved):
        for counter in (*saved["state"].values(), *saved["param_groups"]):
            if "step" in counter:
                counter["step"] = form(float(counter["step"]))

    return change


def sequences(saved):
    for group in saved["param_groups"]:
        group.update({key: list(value) for key, value in group.items() if isinstance(value, tuple)})
        group["params"] = tuple(group["params"])
    saved["param_groups"] = tuple(saved["param_groups"])


def moments(form):
    def change(saved):
        for state in saved["state"].values():
            state.update({key: form(value) for key, value in state.items()})

    return change


def without(*names):
    def change(saved):
        for group in saved["param_groups"]:
            options = json.loads(group["hf_muon"])
            for name in names:
                del options["options"][name]
            group["hf_muon"] = json.dumps(options)

    return change


def with_key(name, value):
    return lambda saved: [group.update({name: value}) for group in saved["param_groups"]]


# What is changed, and what the log says.
FORMS = {
    "steps as tensors of shape 1": (of_steps(lambda count: torch.tensor([count])),),
    "steps as int64": (of_steps(lambda count: torch.tensor(int(count))),),
    "steps as float64": (of_steps(lambda count: torch.tensor(count, dtype=torch.float64)),),
    "steps as int": (of_steps(int),),
    "steps as float": (of_steps(float),),
    "lists for tuples and tuples for lists": (sequences,),
    "moments that require gradients": (moments(lambda value: nn.Parameter(value.float())),),
    "moments in float64": (moments(torch.Tensor.double),),
    "state of another pipeline stage": (
        lambda saved: saved["state"].update(other={"momentum_buffer": torch.ones(3)}),
        "[state-left-out]",
    ),
    "a key that torch once put into groups": (with_key("differentiable", False),),
    "a key that no option has": (with_key("foreign", True),),
    "without some options": (without("ns_dtype", "momentum_dtype"), "this run's stay"),
    "what a user keeps there": (lambda saved: saved["state"][0].update(my_ema=torch.ones(3)), "my_ema"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form, caplog):
    change, *facts = FORMS[form]
    (model, optimizer), (other, into) = stepped(), build()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved)
    before = copy.deepcopy(saved)
    into.load_state_dict(saved)
    assert not any(value.requires_grad for state in into.state.values() for value in state.values())
    assert all(fact in caplog.text for fact in facts)
    for each in (optimizer, into):
        step(each, 7)
    assert equal(saved, before), "the state dict shares memory"
    assert equal(bits(other.parameters()), bits(model.parameters()))
    for group in into.param_groups:
        group.pop("foreign", None)
    assert equal(into.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_steps_are_counted_in_fp32_whatever_the_default_dtype(default):
    """Count beyond 256, where bf16 stops."""
    optimizer, fresh = stepped()[1], adamw_over(nn.Parameter(torch.ones(3)))
    saved = copy.deepcopy(optimizer.state_dict())
    of_steps(lambda _: torch.tensor(256.0))(saved)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            optimizer.load_state_dict(saved)
        fresh.init_state()
        step(optimizer)
    finally:
        torch.set_default_dtype(before)
    for each, count in ((optimizer, 257.0), (fresh, 0.0)):
        counters = [state["step"] for state in each.state.values() if "step" in state]
        assert {(c.dtype, c.device.type, float(c)) for c in counters} == {(torch.float32, "cpu", count)}


# --- dtypes of moments


@pytest.mark.parametrize(
    ("weights", "option", "stored"),
    [
        *((weights, "auto", torch.float32) for weights in (torch.bfloat16, torch.float16, torch.float32)),
        *((torch.float64, option, torch.float64) for option in ("auto", "fp32")),
        *((weights, "bf16", torch.bfloat16) for weights in (torch.bfloat16, torch.float32, torch.float64)),
        (torch.float64, "int8", torch.float32),  # short rows
    ],
)
def test_dtypes(weights, option, stored):
    optimizer = stepped(weights, adamw_state_dtype=option, weight_rounding="nearest")[1]
    for state in optimizer.state.values():
        if "step" in state:
            assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {stored}
            assert state["step"] == STEPS
            assert bool((state["exp_avg_sq"] > 0).all())


def test_parameters_cast_after_loading():
    """Convert state when accelerate's FSDP2 has cast bf16 parameters to fp32 after the optimizer was built."""
    optimizer, params = both_halves(torch.bfloat16)
    run(optimizer, params, both_gradients(1, torch.bfloat16))
    for param in params:
        param.grad = None
        param.data = param.data.float()
    run(optimizer, params, both_gradients(1))
    assert {v.dtype for v in (*params, *(v for s in optimizer.state.values() for v in s.values()))} == {torch.float32}


WORDS = {"auto": "fp32", "bf16": "bf16", "int8": "int8"}
KEYS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def wide(option):
    """Return an optimizer of a matrix of blocks and of a part of one, one of short rows, and of what AdamW steps."""
    matrices, vectors = ([nn.Parameter(normal(*s).bfloat16()) for s in ((6, 80), (20, 8))] for _ in range(2))
    stored = {"momentum_dtype": option, "adamw_state_dtype": option}
    return Muon([{"params": matrices}, {"params": vectors, "use_muon": False}], ns_dtype="fp32", **stored)


def moments_of(optimizer):
    states = [optimizer.state[param] for param in params_of(optimizer)]
    return [(key, decoded(state, key).float()) for state in states for key in KEYS if key in state]


def kinds_of(optimizer):
    return [{key: value.dtype for key, value in optimizer.state[p].items()} for p in params_of(optimizer)]


@pytest.mark.parametrize("there", WORDS)
@pytest.mark.parametrize("here", WORDS)
def test_moments_of_a_checkpoint_are_converted_and_that_is_logged(there, here, caplog):
    source, target, fresh = wide(there), wide(here), wide(here)
    step(source)
    target.load_state_dict(source.state_dict())
    step(fresh)
    assert kinds_of(target) == kinds_of(fresh)
    for (key, exact), (_, loaded) in zip(moments_of(source), moments_of(target), strict=True):
        if here == "int8" != there and exact.shape[-1] > 8:
            state = {key: torch.zeros(6, 80, dtype=MOMENTS[key].dtype)}
            state[MOMENTS[key].scale] = torch.zeros(scale_shape((6, 80)))
            encode_(state, key, exact)
            exact = decoded(state, key)
        assert torch.equal(loaded, exact.bfloat16().float() if here == "bf16" else exact)
    for name in ("adamw_state_dtype", "momentum_dtype"):
        expected = f"{name} {WORDS[there]} in the checkpoint, {WORDS[here]} here"
        assert caplog.text.count(expected) == caplog.text.count("converted") == (there != here)
    step(target)


def test_a_dtype_that_is_changed_on_the_way_is_converted():
    optimizer = wide("fp32")
    for k, here in enumerate(("int8", "bf16", "int8", "fp32"), 1):
        fresh = wide(here)
        for group in optimizer.param_groups:
            group["momentum_dtype"] = group["adamw_state_dtype"] = here
        for each in (optimizer, fresh):
            step(each)  # with equal gradients
        assert kinds_of(optimizer) == kinds_of(fresh)
        for param in params_of(optimizer):
            key, beta = ("exp_avg", 0.9) if "step" in optimizer.state[param] else ("momentum_buffer", 0.95)
            expected = param.grad.float() * (1 - beta**k)
            assert float((decoded(optimizer.state[param], key).float() - expected).abs().max()) < 0.05


# --- options, rates and hooks


def test_options_of_the_checkpoint_win_and_are_logged(caplog):
    optimizer, fresh = stepped(momentum=0.9)[1], build(ns_steps=6)[1]
    for text in ("momentum 0.9, not 0.95; ns_steps 5, not 6 [options-of-checkpoint]", ""):
        caplog.clear()
        fresh.load_state_dict(optimizer.state_dict())
        assert fresh.param_groups[0]["momentum"] == 0.9
        assert text in caplog.text
        assert bool(text) == bool(caplog.text)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({}, []),
        ({"lr": 0.5}, ["Muon's 0.01, not 0.5", "AdamW's 0.01, not 0.5"]),
        ({"muon_lr": 0.5}, ["Muon's 0.01, not 0.5"]),
    ],
)
@pytest.mark.parametrize("schedule", [False, True])
def test_a_changed_rate_is_named(options, facts, schedule, caplog):
    """Compare rates before any schedule."""
    optimizer, into = stepped()[1], build(**options)[1]
    for each, steps in ((optimizer, 3), (into, 0)) if schedule else ():
        scheduler = torch.optim.lr_scheduler.LambdaLR(each, lambda count: 1 / (1 + count))
        for _ in range(steps):
            scheduler.step()
    into.load_state_dict(optimizer.state_dict())
    assert caplog.text.count("[rates-of-checkpoint]") == bool(facts)
    assert all(fact in caplog.text for fact in facts)
    assert caplog.text.count("'s 0.01") == len(facts)
    assert ("unless a schedule" in caplog.text) == (bool(facts) and not schedule)


def test_hooks_run_around_the_load():
    """Load the result of the last pre-hook, and show post-hooks the momentum in this run's dtype."""
    saved = copy.deepcopy(stepped(torch.bfloat16)[1].state_dict())
    _, into = build(torch.bfloat16)
    dtypes = []
    into.register_load_state_dict_pre_hook(lambda _, state_dict: state_dict.update(state="replaced by the next hook"))
    into.register_load_state_dict_pre_hook(lambda _, state_dict: copy.deepcopy(saved))
    into.register_load_state_dict_post_hook(
        lambda loaded: dtypes.append(loaded.state_dict()["state"][0]["momentum_buffer"].dtype)
    )
    into.load_state_dict({})
    assert dtypes == [torch.float32]
    assert equal(into.state_dict(), saved)

    def fail(*_):
        raise KeyError("of the user")

    for when in ("pre", "post"):
        handle = getattr(into, f"register_load_state_dict_{when}_hook")(fail)
        before = snapshot(into)
        with pytest.raises(KeyError, match="of the user"):
            into.load_state_dict(stepped(torch.bfloat16, momentum=0.5)[1].state_dict())
        assert not differences(before, snapshot(into))
        handle.remove()


# --- copies, and groups of another optimizer


def other_value(option):
    """Return a value of an option other than its default."""
    if option.type.choices:
        return next(word for word in option.type.choices if word not in (option.default, "accelerator"))
    return {bool: lambda: not option.default, int: lambda: option.default + 3}[type(option.default)]()


OTHER = {name: other_value(option) for name, option in OPTIMIZER_OPTIONS.items()}
COPIES = [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer)), copy.copy]


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_has_every_option_and_does_not_write_into_the_originals_file(way, tmp_path, monkeypatch):
    """Compare with a run that is not copied; a load leaves the options, too."""
    optimizer = stepped(**OTHER, diagnostics_file=str(tmp_path / "elsewhere.jsonl"))[1]
    optimizer.load_state_dict(build()[1].state_dict())
    assert {name: getattr(way(optimizer), name) for name in OTHER} == OTHER
    counts = []
    for name in ("alone", "copied", "in the environment"):
        if name == "in the environment":
            monkeypatch.setenv("HF_MUON_DIAGNOSTICS_EVERY", "1")
        file = tmp_path / name
        options = {"diagnostics_every": 1} if name != "in the environment" else {}
        optimizer = stepped(diagnostics_file=str(file), **options)[1]
        if name != "alone":
            step(way(optimizer), 5)
        if way is not copy.copy:
            step(optimizer, 1)
        counts.append(len([line for line in file.read_text().splitlines() if line]))
    assert counts[0] == counts[1] == counts[2] > 0


def test_groups_of_a_loaded_optimizer():
    """Start the steps from zero: the groups count steps whose moments the new optimizer does not have."""
    model, optimizer = stepped()
    optimizer.load_state_dict(optimizer.state_dict())
    twin = copy.deepcopy(model)
    fresh, expected = Muon(optimizer.param_groups), build_optimizer(twin, lr=0.01, ns_dtype="fp32", muon_patterns="^2")
    for each in (fresh, expected):
        step(each)
    assert equal(bits(model.parameters()), bits(twin.parameters()))
    assert [group["step"] for group in optimizer.param_groups] == [STEPS] * 2
    groups = [{**group, "differentiable": False} for group in optimizer.param_groups]  # as torch writes them
    assert "differentiable" not in Muon(groups).param_groups[0]


# --- a step looks at its state again only if its form has changed


def cast_in_place(moment):
    moment.data = moment.data.bfloat16()


# What is done to the group and to the state of its first parameter.
CHANGES = {
    "nothing": lambda optimizer, group, state: None,
    "replaced": lambda optimizer, group, state: state.update({key: value.clone() for key, value in state.items()}),
    "cast": lambda optimizer, group, state: cast_in_place(state["momentum_buffer"]),
    "option": lambda optimizer, group, state: group.update(momentum_dtype="bf16"),
    "loaded": lambda optimizer, group, state: optimizer.load_state_dict(optimizer.state_dict()),
    "of a user": lambda optimizer, group, state: state.update(my_count=3),
}


IN_THE_SAME_FORM = ("nothing", "replaced")


@pytest.mark.parametrize("change", CHANGES)
def test_state_is_looked_at_again_only_if_its_form_has_changed(change, monkeypatch):
    optimizer = stepped()[1]
    group = optimizer.param_groups[0]
    param, looked_at = group["params"][0], []
    monkeypatch.setattr(
        "hf_muon.optimizer.state.entries_of", lambda group: looked_at.append(group) or entries_of(group)
    )
    CHANGES[change](optimizer, group, optimizer.state[param])
    looked_at.clear()
    step(optimizer, 5)
    assert bool(looked_at) == (change not in IN_THE_SAME_FORM)
    assert optimizer.state[param]["momentum_buffer"].dtype == (torch.bfloat16 if change == "option" else torch.float32)
    looked_at.clear()
    step(optimizer, 6)
    assert not looked_at


def test_moments_that_are_replaced_are_not_kept():
    """Offload moments between steps as frameworks do: the memory of the others is free at once."""
    optimizer = stepped()[1]
    moments = [weakref.ref(value) for own in optimizer.state.values() for value in own.values()]
    for own in optimizer.state.values():
        own.update({key: value.clone() for key, value in own.items()})
    assert not any(moment() is not None for moment in moments)


# --- what is written between steps, by hand


class Subclass(torch.Tensor):
    """A tensor of a class that hf_muon does not know."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


def swapped(optimizer, weight):
    replaced = nn.Parameter(torch.randn(weight.shape).as_subclass(Subclass))
    weight.grad = None
    torch.utils.swap_tensors(weight, replaced)
    weight.grad = torch.ones(weight.shape)


def moment(form):
    def change(optimizer, weight):
        optimizer.state[weight]["momentum_buffer"] = form(optimizer.state[weight]["momentum_buffer"])

    return change


@torch.inference_mode()
def under_inference_mode(value):
    return value.clone()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (swapped, "Subclass"),
        (moment(torch.Tensor.to_sparse), "sparse.*moment-misfit"),
        (moment(lambda value: value[:1].expand_as(value)), "expanded.*moment-misfit"),
        (moment(under_inference_mode), "inference_mode.*moment-misfit"),
        (lambda optimizer, weight: optimizer.param_groups[1].update(use_muon=0), "use_muon=0.*invalid-value"),
    ],
)
def test_what_cannot_be_stepped_is_seen_by_a_live_plan(change, says):
    """Shape, dtype and device are as before, so that only these show the change; nothing has moved then."""
    model, optimizer = stepped()
    weight = optimizer.param_groups[0]["params"][0]
    change(optimizer, weight)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with pytest.raises((ValueError, RuntimeError), match=f"(?s){says}"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_a_state_that_is_loaded_under_inference_mode_can_be_stepped():
    _, optimizer = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    with torch.inference_mode():
        optimizer.load_state_dict(saved)
    step(optimizer)


def test_steps_counted_in_floats_are_steps():
    _, optimizer = stepped()
    for group in optimizer.param_groups:
        group["step"] = float(group["step"])
    step(optimizer)
    assert {group["step"] for group in optimizer.param_groups} == {STEPS + 1}
