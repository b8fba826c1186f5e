"""States in every form that is loaded: a run that loads one continues with the bits of the uninterrupted run."""

from __future__ import annotations

import copy
import gzip
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from hf_muon import Muon, build_optimizer
from hf_muon.config import GROUP_OPTIONS, OPTIMIZER_OPTIONS, OPTIONS
from hf_muon.math.moments import decoded
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
    unchanged,
)
from tests.optimizer.old_states import write

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


def trainable(saved):
    for state in saved["state"].values():
        state.update({key: nn.Parameter(value.float()) for key, value in state.items()})


def of_dtype(dtype):
    def change(saved):
        for state in saved["state"].values():
            state.update({key: value.to(dtype) for key, value in state.items()})

    return change


def without(*names):
    def change(saved):
        for group in saved["param_groups"]:
            for name in names:
                del group[name]

    return change


def with_key(name, value):
    return lambda saved: [group.update({name: value}) for group in saved["param_groups"]]


FORMS = {
    "steps as tensors of shape 1": of_steps(lambda count: torch.tensor([count])),
    "steps as int64": of_steps(lambda count: torch.tensor(int(count))),
    "steps as float64": of_steps(lambda count: torch.tensor(count, dtype=torch.float64)),
    "steps as int": of_steps(int),
    "steps as float": of_steps(float),
    "lists for tuples and tuples for lists": sequences,
    "moments that require gradients": trainable,
    "moments in float64": of_dtype(torch.float64),
    "state of another pipeline stage": lambda saved: saved["state"].update(other={"momentum_buffer": torch.ones(3)}),
    "a key that torch once put into groups": with_key("differentiable", False),
    "a key that no option has": with_key("foreign", True),
    "without options that an older version did not have": without("ns_dtype", "momentum_dtype"),
    "without steps, as the oldest versions": without("step"),
    "the name of a scale before torch had one": with_key("adjust_lr_fn", "rms_to_rms"),
    "what a user keeps there": lambda saved: saved["state"][0].update(my_ema=torch.ones(3)),
}  # fmt: skip
OPTIONS_OF = {"the name of a scale before torch had one": {"adjust_lr_fn": "spectral_unclamped"}}
NOTICES = {
    "without options that an older version did not have": "this run's stay",
    "without steps, as the oldest versions": f"{STEPS} are assumed [steps-assumed]",
    "what a user keeps there": "my_ema",
    "state of another pipeline stage": "[state-left-out]",
    "a key that no option has": "foreign=True, [unknown-in-checkpoint]",
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form, caplog):
    model, optimizer = stepped(**OPTIONS_OF.get(form, {}))
    other, into = build(**OPTIONS_OF.get(form, {}))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    saved = copy.deepcopy(optimizer.state_dict())
    FORMS[form](saved)
    into.load_state_dict(saved)
    assert not any(value.requires_grad for state in into.state.values() for value in state.values())
    assert all(fact in caplog.text for fact in NOTICES.get(form, "").split(", "))
    for each in (optimizer, into):
        step(each, 7)
    assert equal(bits(other.parameters()), bits(model.parameters()))
    for group in into.param_groups:
        group.pop("foreign", None)
    assert equal(into.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, torch.float16])
def test_moments_of_half_precision_are_widened(saved_dtype):
    optimizer, params = both_halves(torch.bfloat16)
    run(optimizer, params, both_gradients(2, torch.bfloat16))
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state.update({key: value.to(saved_dtype) for key, value in state.items() if key != "step"})
    before = copy.deepcopy(saved)
    resumed, resumed_params = both_halves(torch.bfloat16)
    resumed.load_state_dict(saved)
    for i, param in enumerate(resumed_params):
        assert all(value.dtype == torch.float32 for value in resumed.state[param].values())
        assert all(torch.equal(value, saved["state"][i][key].float()) for key, value in resumed.state[param].items())
    run(resumed, resumed_params, both_gradients(1, torch.bfloat16))
    assert equal(saved, before), "the state dict shares memory"


def test_the_oldest_format_of_muon_alone():
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = Muon([weight])
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["step"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["step"] == 0
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], saved["state"][0]["momentum_buffer"])


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_steps_are_counted_in_fp32_whatever_the_default_dtype(default):
    """Count beyond 256, where bf16 stops."""
    _, optimizer = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    of_steps(lambda _: torch.tensor(256.0))(saved)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            optimizer.load_state_dict(saved)
        fresh = adamw_over(nn.Parameter(torch.ones(3)))
        fresh.init_state()
        step(optimizer)
    finally:
        torch.set_default_dtype(before)
    counters = [state["step"] for o in (optimizer, fresh) for state in o.state.values() if "step" in state]
    assert {(c.dtype, c.device.type, float(c)) for c in counters} == {
        (torch.float32, "cpu", 257.0),
        (torch.float32, "cpu", 0.0),
    }


@pytest.mark.parametrize("before_the_first_step", [True, False])
def test_what_a_user_keeps_in_the_state_of_parameters(before_the_first_step):
    """Save it, as torch does; a step ignores it, and a load drops it."""
    (model, optimizer), (twin, other) = (build(), build()) if before_the_first_step else (stepped(), stepped())
    optimizer.state[model[0].weight]["my_ema"] = {"of": "the user"}
    if not before_the_first_step:
        step(optimizer, 4)
        step(other, 4)
    saved = optimizer.state_dict()
    assert "my_ema" in saved["state"][0]
    optimizer.load_state_dict(saved)
    step(optimizer)
    step(other)
    assert equal(optimizer.state_dict(), other.state_dict())
    assert equal(bits(model.parameters()), bits(twin.parameters()))


def test_state_that_is_made_before_the_first_step():
    results = []
    for make in (lambda _: None, lambda optimizer: optimizer.init_state()):
        optimizer, params = both_halves()
        make(optimizer)
        results.append((bits(run(optimizer, params, both_gradients(2))), optimizer.state_dict()))
    assert equal(*results)


def test_parameters_cast_after_loading():
    """Convert state when accelerate's FSDP2 has cast bf16 parameters to fp32 after the optimizer was built."""
    optimizer, params = both_halves(torch.bfloat16)
    run(optimizer, params, both_gradients(1, torch.bfloat16))
    for param in params:
        param.grad = None
        param.data = param.data.float()
    run(optimizer, params, both_gradients(1))
    assert all(p.dtype == torch.float32 for p in params)
    assert all(v.dtype == torch.float32 for s in optimizer.state.values() for v in s.values())


# --- options and rates


def test_options_of_the_checkpoint_win_and_are_logged(caplog):
    optimizer = stepped(momentum=0.9)[1]
    fresh = build(ns_steps=6)[1]
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[0]["momentum"] == 0.9
    assert "momentum 0.9, not 0.95; ns_steps 5, not 6 [options-of-checkpoint]" in caplog.text
    caplog.clear()
    fresh.load_state_dict(optimizer.state_dict())
    assert not caplog.text


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
    if schedule:
        for each, steps in ((optimizer, 3), (into, 0)):
            scheduler = torch.optim.lr_scheduler.LambdaLR(each, lambda count: 1 / (1 + count))
            for _ in range(steps):
                scheduler.step()
    into.load_state_dict(optimizer.state_dict())
    assert caplog.text.count("[rates-of-checkpoint]") == bool(facts)
    assert all(fact in caplog.text for fact in facts)
    assert caplog.text.count("'s 0.01") == len(facts)
    assert ("unless a schedule" in caplog.text) == (bool(facts) and not schedule)


WORDS = {"auto": "fp32", "bf16": "bf16", "int8": "int8"}


@pytest.mark.parametrize("there", WORDS)
@pytest.mark.parametrize("here", WORDS)
def test_a_checkpoint_of_adamw_is_converted(there, here, caplog):
    param = nn.Parameter(normal(6, 80).bfloat16())
    source = adamw_over(param, adamw_state_dtype=there)
    step(source)
    target = adamw_over(param, adamw_state_dtype=here)
    target.load_state_dict(source.state_dict())
    fresh = adamw_over(nn.Parameter(normal(6, 80).bfloat16()), adamw_state_dtype=here)
    step(fresh)
    kinds = [{key: value.dtype for key, value in o.state[params_of(o)[0]].items()} for o in (target, fresh)]
    assert kinds[0] == kinds[1]
    for key, bits_of_code in (("exp_avg", 2), ("exp_avg_sq", 4)):
        exact, loaded = (decoded(o.state[param], key).double() for o in (source, target))
        if here == "int8" and there != "int8":
            # Half a level: of squares with 127 levels, and of fourth powers with 255.
            roots = [(values.abs() / exact.abs().max()) ** (1 / bits_of_code) for values in (exact, loaded)]
            assert float((roots[0] - roots[1]).abs().max()) < 0.02
        else:
            assert torch.equal(loaded, exact.to(torch.bfloat16 if here == "bf16" else torch.float32).double())
    expected = f"adamw_state_dtype {WORDS[there]} in the checkpoint, {WORDS[here]} here"
    assert caplog.text.count(expected) == caplog.text.count("converted") == (there != here)


# --- hooks


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_that_fails_changes_nothing(when):
    _, optimizer = stepped()

    def fail(*_):
        raise KeyError("of the user")

    getattr(optimizer, f"register_load_state_dict_{when}_hook")(fail)
    with unchanged(optimizer), pytest.raises(KeyError, match="of the user"):
        optimizer.load_state_dict(stepped(momentum=0.5)[1].state_dict())


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


# --- torch's checkpoints


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoints_load_as_often_as_one_likes(flat, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = stepped()
    before = copy.deepcopy(optimizer.state_dict())
    dcp.save({"o": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path)
    for _ in range(2):
        step(optimizer)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.load({"o": state}, checkpoint_id=tmp_path)
        set_optimizer_state_dict(model, optimizer, state, options=options)
        assert equal(optimizer.state_dict(), before)


# --- files of older versions, in `old_states`

FOLDER = Path(write.__file__).parent


def content(name):
    return gzip.decompress((FOLDER / name).read_bytes())


def state_of(kind):
    """Return the weights and the state dict that the older version wrote, as plain tensors."""
    return torch.load(io.BytesIO(content("state_dicts.pt.gz")), weights_only=True)[kind]


def set_weights(optimizer, weights):
    for param, weight in zip(params_of(optimizer), weights, strict=True):
        param.data.copy_(weight)


def loaded(kind):
    """Return a new optimizer with the weights and the state dict of the file."""
    optimizer = write.build(kind)
    set_weights(optimizer, state_of(kind)["weights"])
    optimizer.load_state_dict(state_of(kind)["state_dict"])
    return optimizer


def assembled(kind):
    """Return an optimizer with the file's weights and moments, set by hand, without any loading code."""
    optimizer, saved = write.build(kind), state_of(kind)
    set_weights(optimizer, saved["weights"])
    for i, param in enumerate(params_of(optimizer)):
        optimizer.state[param].update(saved["state_dict"]["state"][i])
    for group in optimizer.param_groups:
        group["step"] = write.STEPS
    return optimizer


def of_today(state_dict):
    """Return a state dict with the defaults of newer options, and with AdamW's moments in fp32."""
    defaults = {"lr_factors": None, **{name: OPTIONS[name].default for name in GROUP_OPTIONS}}
    state = {
        i: {key: value.float() if key.startswith("exp_avg") else value for key, value in moments.items()}
        for i, moments in state_dict["state"].items()
    }
    return {"state": state, "param_groups": [defaults | group for group in state_dict["param_groups"]]}


WAYS = {
    "state dict": loaded,
    "torch.save": lambda kind: torch.load(io.BytesIO(content("optimizers.pt.gz")), weights_only=False)[kind],
    "pickle": lambda kind: pickle.loads(content("optimizers.pickle.gz"))[kind],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", write.KINDS)
def test_old_files_load_exactly_and_continue(kind, way):
    optimizer, saved, expected = WAYS[way](kind), state_of(kind), assembled(kind)
    assert type(optimizer) is Muon
    assert equal(of_today(optimizer.state_dict()), of_today(saved["state_dict"]))
    assert equal(bits(params_of(optimizer)), saved["weights"])
    straight = write.trained(kind)
    for seed in range(write.STEPS, write.STEPS + 3):
        for each in (optimizer, expected, straight):
            write.step(each, seed)
    assert equal(bits(params_of(optimizer)), bits(params_of(expected)))
    assert equal(optimizer.state_dict(), expected.state_dict())
    if kind == "fp32 weights, fp32 momentum":  # the CPU that wrote the file may have rounded differently
        torch.testing.assert_close(bits(params_of(optimizer)), bits(params_of(straight)), rtol=0, atol=1e-5)
        # Momentum of zero would show.
        forgetful = write.build(kind)
        set_weights(forgetful, saved["weights"])
        write.step(forgetful, write.STEPS)
        write.step(other := assembled(kind), write.STEPS)
        pairs = zip(bits(params_of(forgetful)), bits(params_of(other)), strict=True)
        assert min(float((a - b).abs().max()) for a, b in pairs) > 1e-3


def test_old_optimizers_over_ready_made_groups():
    """Load the optimizer that LLaMA-Factory's PPO and LoRA+ build over their own param groups."""
    optimizer, expected = pickle.loads(content("of_groups.pickle.gz")), write.trained_of_groups()[0]
    assert type(optimizer) is type(expected)
    assert optimizer.param_groups[0]["param_names"] == expected.param_groups[0]["param_names"]
    for seed in range(write.STEPS, write.STEPS + 3):
        write.step(optimizer, seed)
        write.step(expected, seed)
    torch.testing.assert_close(bits(params_of(optimizer)), bits(params_of(expected)), rtol=1e-5, atol=1e-6)


# --- copies, and groups of another optimizer


def other_value(option):
    """Return a value of an option other than its default."""
    if option.type.choices:
        return next(word for word in option.type.choices if word not in (option.default, "accelerator"))
    return {bool: lambda: not option.default, int: lambda: option.default + 3}[type(option.default)]()


OTHER = {name: other_value(option) for name, option in OPTIMIZER_OPTIONS.items()}
COPIES = [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer)), copy.copy]


@pytest.mark.parametrize(
    "way", [*COPIES, lambda optimizer: optimizer.load_state_dict(build()[1].state_dict()) or optimizer]
)
def test_every_option_is_carried_over(way, tmp_path):
    optimizer = stepped(**OTHER, diagnostics_file=str(tmp_path / "elsewhere.jsonl"))[1]
    twin = way(optimizer)
    assert {name: getattr(twin, name) for name in OTHER} == OTHER


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("environment", [False, True])
def test_a_copy_does_not_write_into_the_originals_file(way, environment, tmp_path, monkeypatch):
    """Compare with a run that is not copied."""
    if environment:
        monkeypatch.setenv("HF_MUON_DIAGNOSTICS_EVERY", "1")
    counts = []
    for name in ("alone", "copied"):
        file = tmp_path / name
        optimizer = stepped(diagnostics_file=str(file), **({} if environment else {"diagnostics_every": 1}))[1]
        if name == "copied":
            step(way(optimizer), 5)
        if way is not copy.copy:
            step(optimizer, 1)
        counts.append(len([line for line in file.read_text().splitlines() if line]))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", [*GROUP_OPTIONS, *OPTIMIZER_OPTIONS])
def test_a_pickle_that_lacks_an_option_gets_its_default(name):
    """Load a pickle from before the option existed."""
    optimizer = stepped()[1]
    state = optimizer.__getstate__()
    state.pop(name, None)
    state["defaults"] = {key: value for key, value in state["defaults"].items() if key != name}
    state["param_groups"] = [{k: v for k, v in group.items() if k != name} for group in state["param_groups"]]
    old = Muon.__new__(Muon)
    old.__setstate__(state)
    if name in OPTIMIZER_OPTIONS:
        assert getattr(old, name) == OPTIMIZER_OPTIONS[name].default
    else:
        assert [group[name] for group in old.param_groups] == [GROUP_OPTIONS[name].default] * 2
    step(old)


def test_groups_of_a_loaded_optimizer():
    """Start the steps from zero: the groups count steps whose moments the new optimizer does not have."""
    model, optimizer = stepped()
    optimizer.load_state_dict(optimizer.state_dict())
    twin = copy.deepcopy(model)
    fresh, expected = Muon(optimizer.param_groups), build_optimizer(twin, lr=0.01, ns_dtype="fp32")
    step(fresh)
    step(expected)
    assert equal(bits(model.parameters()), bits(twin.parameters()))
    assert [group["step"] for group in optimizer.param_groups] == [STEPS] * 2
    groups = [{**group, "differentiable": False} for group in optimizer.param_groups]  # of older versions
    assert "differentiable" not in Muon(groups).param_groups[0]
