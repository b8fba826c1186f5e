"""`load_state_dict`: the forms of a state that it loads, its log, hooks, and torch.distributed.checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from hf_muon import Muon, build_optimizer
from hf_muon.optimizer.state import zero_state
from tests.optimizer.small_run import STEPS, build, equal, step, stepped


class TestFormsOfTheSameState:
    """A run that loads the state in another form continues bit-identical to the uninterrupted run."""

    def continued(self, change, dtype=torch.float32, **options):
        model, optimizer = stepped(dtype, **options)
        saved = copy.deepcopy(optimizer.state_dict())
        other, into = build(dtype, **options)
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
        _, into = build()
        into.load_state_dict(saved)
        assert not any(value.requires_grad for state in into.state.values() for value in state.values())

    def test_state_of_parameters_that_no_group_holds(self):
        """Drop state of unknown parameters, which torch would load: it may belong to another pipeline stage."""

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
        """Save it, as torch does; a step ignores it, and a load drops it and logs that."""
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
        model, optimizer = build()
        twin, other = build()
        optimizer.state[model[0].weight]["my_ema"] = torch.ones(3)
        optimizer.load_state_dict(optimizer.state_dict())
        for run in ((model, optimizer), (twin, other)):
            step(*run)
        assert equal(optimizer.state_dict(), other.state_dict())

    def test_param_groups_of_the_oldest_format(self, caplog):
        """Load groups without `step`, which the oldest versions did not have."""

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
        """Count beyond 256, where bf16 stops."""
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
            zero = zero_state(nn.Parameter(torch.ones(3)), "step", {})
        finally:
            torch.set_default_dtype(before)
        assert zero.dtype is torch.float32


class TestCopiesOfGroups:
    def test_groups_of_a_loaded_optimizer(self):
        """Start the steps from zero: the groups count steps whose moments the new optimizer does not have."""
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
    """Learning rates of the checkpoint and of this run, compared before any schedule."""

    NOTICE = "the checkpoint's learning rates win over those of this run"

    @staticmethod
    def scheduled(optimizer, steps=0):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for _ in range(steps):
            scheduler.step()
        return optimizer

    @pytest.mark.parametrize(("lr", "message"), [(0.01, None), (0.5, "Muon's 0.01, not 0.5; AdamW's 0.01, not 0.5")])
    @pytest.mark.parametrize("schedule", [False, True])
    def test_a_changed_rate_is_named(self, lr, message, schedule, caplog):
        _, optimizer = stepped()
        _, into = build(lr=lr)
        if schedule:
            self.scheduled(optimizer, steps=3)
            self.scheduled(into)
        into.load_state_dict(optimizer.state_dict())
        assert caplog.text.count(self.NOTICE) == (message is not None)
        if message:
            assert message in caplog.text.replace(", unless a schedule has made it so", "")
            assert ("unless a schedule" in caplog.text) is not schedule

    def test_the_rate_of_muon_alone(self, caplog):
        _, optimizer = stepped()
        _, into = build(muon_lr=0.5)
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
        other, into = build()
        other, into = accelerate.Accelerator(cpu=True).prepare(other, into)
        into = into.optimizer
        state = get_optimizer_state_dict(other, into)
        dcp.load({"o": state}, checkpoint_id=tmp_path)
        set_optimizer_state_dict(other, into, state)
        assert equal(optimizer.state_dict(), into.state_dict())


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
    """Load the result of the last pre-hook, and show post-hooks the momentum in this run's dtype."""
    _, optimizer = stepped(torch.bfloat16)
    saved = copy.deepcopy(optimizer.state_dict())
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
