"""What `load_state_dict` takes, what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from hf_muon import Muon, build_optimizer
from hf_muon.optimizer.state import zero_state

STEPS = 2


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(18, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def made(dtype=torch.float32, **options):
    model = net(dtype)
    return model, build_optimizer(model, {"lr": 0.01, "ns_dtype": "fp32", **options})


def step(model, optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def stepped(dtype=torch.float32, **options):
    model, optimizer = made(dtype, **options)
    for k in range(STEPS):
        step(model, optimizer, k)
    return model, optimizer


def equal(one, other):
    """Whether two state dicts, or parts of them, are the same, types included."""
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and (one.dtype, one.layout) == (other.dtype, other.layout)
        return alike and torch.equal(one.to_dense(), other.to_dense())
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


class TestFormsOfTheSameState:
    """Each is loaded as the state that it is; compared with the run that went on."""

    def continued(self, change, dtype=torch.float32, **options):
        model, optimizer = stepped(dtype, **options)
        saved = copy.deepcopy(optimizer.state_dict())
        other, into = made(dtype, **options)
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        into.load_state_dict(change(saved) or saved)
        step(model, optimizer, seed=7)
        step(other, into, seed=7)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert equal(optimizer.state_dict(), into.state_dict())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
    def test_as_it_was_saved(self, dtype, momentum_dtype):
        self.continued(lambda saved: None, dtype, momentum_dtype=momentum_dtype)

    @pytest.mark.parametrize(
        "form",
        [
            lambda count: torch.tensor([count]),
            lambda count: torch.tensor(int(count)),
            lambda count: torch.tensor(count, dtype=torch.float64),
            int,
            float,
        ],
    )
    def test_steps_as_numbers_of_other_kinds(self, form):
        def change(saved):
            for state in saved["state"].values():
                if "step" in state:
                    state["step"] = form(float(state["step"]))
            for group in saved["param_groups"]:
                group["step"] = form(float(group["step"]))

        self.continued(change)

    def test_lists_and_tuples(self):
        def change(saved):
            for group in saved["param_groups"]:
                group.update({key: list(value) for key, value in group.items() if isinstance(value, tuple)})
                group["params"] = tuple(group["params"])
            saved["param_groups"] = tuple(saved["param_groups"])

        self.continued(change)

    def test_moments_that_require_gradients(self):
        def change(saved):
            for state in saved["state"].values():
                for key in state:
                    state[key] = nn.Parameter(state[key].float())

        self.continued(change)
        _, optimizer = stepped()
        saved = optimizer.state_dict()
        change(saved)
        _, into = made()
        into.load_state_dict(saved)
        assert not any(value.requires_grad for state in into.state.values() for value in state.values())

    def test_state_of_parameters_that_no_group_holds(self):
        """As of another pipeline stage; torch would carry it along."""

        def change(saved):
            saved["state"]["stage 2"] = {"momentum_buffer": torch.ones(3, 3)}

        self.continued(change)

    def test_a_key_that_torch_once_put_into_groups(self):
        def change(saved):
            for group in saved["param_groups"]:
                group["differentiable"] = False

        self.continued(change)

    def test_options_that_an_older_version_did_not_have(self, caplog):
        def change(saved):
            for group in saved["param_groups"]:
                del group["ns_dtype"], group["momentum_dtype"]

        self.continued(change)
        assert "the checkpoint does not say ns_dtype; this run's stay" in caplog.text

    @pytest.mark.parametrize("value", [torch.ones(3), 0.5, {"of": "the user"}])
    def test_what_a_user_keeps_in_the_state_of_parameters(self, value, caplog):
        """torch saves it; a step does not look at it, and a load leaves it out and says so."""
        model, optimizer = stepped()
        twin, other = stepped()
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param]["my_ema"] = value
        for run in ((model, optimizer), (twin, other)):
            step(*run, seed=4)
        saved = optimizer.state_dict()
        assert "my_ema" in saved["state"][0]
        optimizer.load_state_dict(saved)
        assert equal(optimizer.state_dict(), other.state_dict())
        assert "my_ema in the state of parameters, which Muon does not keep, is left out" in caplog.text

    def test_what_a_user_keeps_there_before_the_first_step(self):
        model, optimizer = made()
        twin, other = made()
        optimizer.state[model[0].weight]["my_ema"] = torch.ones(3)
        optimizer.load_state_dict(optimizer.state_dict())
        for run in ((model, optimizer), (twin, other)):
            step(*run)
        assert equal(optimizer.state_dict(), other.state_dict())

    def test_param_groups_of_the_oldest_format(self, caplog):
        """They did not count steps."""

        def change(saved):
            for group in saved["param_groups"]:
                del group["step"]

        self.continued(change)
        assert f"do not say how many steps they have taken; {STEPS} are assumed" in caplog.text

    def test_the_oldest_format_of_muon_alone(self):
        weight = nn.Parameter(torch.ones(4, 3))
        optimizer = Muon([weight])
        weight.grad = torch.ones(4, 3)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        del saved["param_groups"][0]["step"]
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["step"] == 0
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], saved["state"][0]["momentum_buffer"])

    @pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
    def test_steps_are_counted_in_fp32_whatever_the_default_dtype(self, default):
        """bf16 counts to 256."""
        _, optimizer = stepped()
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            if "step" in state:
                state["step"].fill_(257.0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            with torch.device("meta"):
                optimizer.load_state_dict(saved)
        finally:
            torch.set_default_dtype(before)
        counters = [state["step"] for state in optimizer.state.values() if "step" in state]
        assert {(c.dtype, c.device.type, float(c)) for c in counters} == {(torch.float32, "cpu", 257.0)}

    def test_zero_states_are_counted_in_fp32(self):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            zero = zero_state(nn.Parameter(torch.ones(3)), "step")
        finally:
            torch.set_default_dtype(before)
        assert zero.dtype is torch.float32


class TestCopiesOfGroups:
    def test_groups_of_a_loaded_optimizer(self):
        """They have counted steps whose moments the new optimizer does not have."""
        model, optimizer = stepped()
        optimizer.load_state_dict(optimizer.state_dict())
        twin = copy.deepcopy(model)
        fresh, expected = Muon(optimizer.param_groups), build_optimizer(twin, lr=0.01, ns_dtype="fp32")
        step(model, fresh)
        step(twin, expected)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        assert [group["step"] for group in optimizer.param_groups] == [STEPS] * 2

    def test_groups_of_older_versions(self):
        _, optimizer = stepped()
        groups = [{**group, "differentiable": False} for group in optimizer.param_groups]
        assert "differentiable" not in Muon(groups).param_groups[0]
        with pytest.raises(ValueError, match="'differentiable' is not an option"):
            Muon([{**group, "differentiable": True} for group in optimizer.param_groups])

    def test_a_group_that_is_taken_out_and_put_back_keeps_its_moments(self):
        model, optimizer = stepped()
        twin, other = stepped()
        optimizer.add_param_group(optimizer.param_groups.pop())
        step(model, optimizer)
        step(twin, other)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


class TestRates:
    """Compared before what schedules make of them."""

    SAID = "the checkpoint's learning rates win over those of this run"

    @staticmethod
    def scheduled(optimizer, steps=0):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for _ in range(steps):
            scheduler.step()
        return optimizer

    @pytest.mark.parametrize(("lr", "said"), [(0.01, None), (0.5, "Muon's 0.01, not 0.5; AdamW's 0.01, not 0.5")])
    @pytest.mark.parametrize("schedule", [False, True])
    def test_a_changed_rate_is_named(self, lr, said, schedule, caplog):
        _, optimizer = stepped()
        _, into = made(lr=lr)
        if schedule:
            self.scheduled(optimizer, steps=3)
            self.scheduled(into)
        into.load_state_dict(optimizer.state_dict())
        assert caplog.text.count(self.SAID) == (said is not None)
        if said:
            assert said in caplog.text.replace(", unless a schedule has made it so", "")
            assert ("unless a schedule" in caplog.text) is not schedule

    def test_one_half(self, caplog):
        _, optimizer = stepped()
        _, into = made(muon_lr=0.5)
        into.load_state_dict(optimizer.state_dict())
        assert "Muon's 0.01, not 0.5, unless" in caplog.text
        assert "AdamW's" not in caplog.text


class TestDistributedCheckpoint:
    @pytest.mark.parametrize("flat", [False, True])
    def test_loads_as_often_as_one_likes(self, flat, tmp_path):
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optimizer = stepped()
        before = copy.deepcopy(optimizer.state_dict())
        dcp.save({"o": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path)
        for _ in range(3):
            step(model, optimizer)
            state = get_optimizer_state_dict(model, optimizer, options=options)
            dcp.load({"o": state}, checkpoint_id=tmp_path)
            set_optimizer_state_dict(model, optimizer, state, options=options)
            assert equal(optimizer.state_dict(), before)

    def test_into_an_optimizer_that_accelerate_has_prepared(self, tmp_path):
        accelerate = pytest.importorskip("accelerate")
        model, optimizer = stepped()
        dcp.save({"o": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
        other, into = made()
        other, into = accelerate.Accelerator(cpu=True).prepare(other, into)
        into = into.optimizer
        state = get_optimizer_state_dict(other, into)
        dcp.load({"o": state}, checkpoint_id=tmp_path)
        set_optimizer_state_dict(other, into, state)
        assert equal(optimizer.state_dict(), into.state_dict())


def refused(state_dict, message, optimizer=None):
    optimizer = optimizer or stepped()[1]
    before, (state, groups) = copy.deepcopy(optimizer.state_dict()), (optimizer.state, optimizer.param_groups)
    with pytest.raises(ValueError, match=message) as error:
        optimizer.load_state_dict(state_dict)
    assert str(error.value).startswith("This optimizer state cannot be loaded, and nothing was changed:\n  - ")
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert equal(optimizer.state_dict(), before)


ADAMW = 4  # the position of the first AdamW parameter's state, a bias

REFUSED = {
    "step of a shape": (("state", 2, "step"), torch.tensor([1.0, 2.0]), r"its step is a tensor of shape \(2,\)"),
    "negative step": (
        ("state", 2, "step"),
        torch.tensor(-1.0),
        r"its step is tensor\(-1.\), and not a number of steps",
    ),
    "fractional step": (("state", 2, "step"), torch.tensor(0.5), r"its step is tensor\(0.5"),
    "endless step": (("state", 2, "step"), torch.tensor(float("inf")), r"its step is tensor\(inf\)"),
    "step as text": (("state", 2, "step"), "2", "its step is '2', and not a number of steps"),
    "group step none": (("param_groups", 0, "step"), None, "its param group 0 has step=None, and not a number"),
    "group step fraction": (("param_groups", 1, "step"), 0.5, "its param group 1 has step=0.5"),
    "group step text": (("param_groups", 0, "step"), "2", "its param group 0 has step='2'"),
    "group step below zero": (("param_groups", 0, "step"), -1, "its param group 0 has step=-1"),
    "lr": (("param_groups", 0, "lr"), float("nan"), "one of its param groups has lr=nan is not valid"),
    "tensor lr": (("param_groups", 0, "lr"), torch.tensor(float("nan")), r"has lr=tensor\(nan\) is not valid"),
    "huge lr": (("param_groups", 0, "lr"), 10**400, r"has lr=10+\.\.\. is not valid"),
    "initial_lr": (("param_groups", 0, "initial_lr"), None, "param group 0 has initial_lr=None, and not a number"),
    "use_muon": (("param_groups", 0, "use_muon"), "yes", "param group 0 has use_muon='yes'. Valid: true or false"),
    "a group": (("param_groups", 1), [1], r"its param group 1 is \[1\], and not a mapping"),
    "params": (("param_groups", 0, "params"), None, "param group 0 has params=None, and not a list"),
    "params of lists": (("param_groups", 0, "params"), [[0], [1]], r"param group 0 has params=\[\[0\], \[1\]\]"),
    "params twice": (("param_groups", 0, "params"), [0, 0], "its param groups name a parameter twice"),
    "names": (("param_groups", 0, "param_names"), 3, "has param_names=3, and not a text for each parameter"),
    "a name too many": (("param_groups", 0, "views"), ["", "", ""], "it has 3 views for 2 parameters"),
    "groups": (("param_groups",), None, "not an optimizer's state_dict: its keys are"),
    "state": (("state",), None, "not an optimizer's state_dict: its keys are"),
    "a parameter's state": (("state", 0), torch.ones(2), r"0.weight \(8, 18\): its state is a tensor of shape \(2,\)"),
    "text for a moment": (("state", 2, "exp_avg"), "zeros", "its exp_avg is 'zeros', and not a tensor"),
    "numbers for a moment": (("state", 2, "exp_avg"), [0.0] * 8, "its exp_avg is .*, and not a tensor"),
    "sparse": (("state", 0, "momentum_buffer"), torch.zeros(8, 18).to_sparse(), "layout torch.sparse_coo"),
    "float8": (
        ("state", 0, "momentum_buffer"),
        torch.zeros(8, 18).to(torch.float8_e5m2),
        "has dtype torch.float8_e5m2",
    ),
    "meta": (("state", 0, "momentum_buffer"), torch.zeros(8, 18, device="meta"), "is on the meta device"),
    "negative squares": (("state", 2, "exp_avg_sq"), torch.full((8,), -1.0), "its exp_avg_sq has negative entries, -1"),
    "too large": (("state", 0, "momentum_buffer"), torch.full((8, 18), 3e38), r"has entries as large as 3e\+38"),
    "too large in fp64": (
        ("state", 2, "exp_avg"),
        torch.full((8,), 1e300, dtype=torch.float64),
        r"has entries as large as 1e\+300",
    ),
    "the other half's": (("state", 2, "momentum_buffer"), torch.ones(8), "holds momentum_buffer, which AdamW .* not"),
    "AdamW's": (("state", 0, "exp_avg"), torch.ones(8, 18), "holds exp_avg, which Muon .* not keep"),
    "differentiable": (("param_groups", 0, "differentiable"), True, "has differentiable=True"),
}


def put(state_dict, path, value):
    *most, last = path
    for key in most:
        state_dict = state_dict[key]
    state_dict[last] = value


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_a_sentence(what):
    path, value, message = REFUSED[what]
    _, optimizer = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    put(saved, path, value)
    refused(saved, message)
    refused(saved, message, made()[1])


@pytest.mark.parametrize("state_dict", [None, 3, [], "state", torch.ones(2)])
def test_what_is_no_mapping(state_dict):
    refused(state_dict, "and not an optimizer's state_dict")


def test_a_missing_step():
    saved = stepped()[1].state_dict()
    del saved["param_groups"][1]["step"]
    refused(saved, "its param group 1 lacks `step`")


def test_codes_and_scales():
    _, optimizer = stepped(momentum_dtype="int8")
    saved = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(saved)
    wrong["state"][0]["momentum_buffer"][0, 0] = -128
    refused(wrong, "its momentum_buffer has entries as large as 128")
    saved["state"][0]["momentum_scale"][0, 0] = -1.0
    refused(saved, "its momentum_scale has negative entries")


@pytest.mark.parametrize("where", ["hook before", "hook after"])
def test_a_hook_that_fails_changes_nothing(where):
    _, optimizer = stepped()
    other = stepped(momentum=0.5)[1].state_dict()

    def fail(*_):
        raise KeyError("of the user")

    register = {
        "hook before": optimizer.register_load_state_dict_pre_hook,
        "hook after": optimizer.register_load_state_dict_post_hook,
    }[where]
    register(fail)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(KeyError, match="of the user"):
        optimizer.load_state_dict(other)
    assert equal(optimizer.state_dict(), before)


def test_hooks_run_around_the_load():
    """Pre-hooks decide what is loaded, post-hooks find the momentum as this run keeps it."""
    _, optimizer = stepped(torch.bfloat16)
    saved = copy.deepcopy(optimizer.state_dict())
    _, into = made(torch.bfloat16)
    dtypes = []
    into.register_load_state_dict_pre_hook(lambda _, state_dict: state_dict.update(state="replaced by the next hook"))
    into.register_load_state_dict_pre_hook(lambda _, state_dict: copy.deepcopy(saved))
    into.register_load_state_dict_post_hook(
        lambda loaded: dtypes.append(loaded.state_dict()["state"][0]["momentum_buffer"].dtype)
    )
    into.load_state_dict({})
    assert dtypes == [torch.float32]
    assert equal(into.state_dict(), saved)
