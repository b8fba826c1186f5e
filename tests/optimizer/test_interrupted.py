"""Runs that are saved, loaded, copied, pickled and refused at random equal the run that never was; mutated states are
refused or complete.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from hf_muon import Muon
from hf_muon.optimizer.state import ALL_STATE_KEYS
from tests.optimizer.cases import bits, build, equal, params_of, step, stepped

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
STORED = st.sampled_from(["fp32", "bf16", "int8"])
WIDE = 96  # rows that are long enough for int8


class Run:
    """A model and its optimizer, and what has been done to them: steps, frozen parameters, added groups, rates."""

    def __init__(self, dtype, options):
        torch.manual_seed(0)
        layers = {"up": nn.Linear(WIDE, 5), "late": nn.Linear(WIDE, 4), "last": nn.Linear(4, 6)}
        self.model = nn.ModuleDict(layers).to(dtype)
        self.optimizer = Muon(self.groups("up"), ns_dtype="fp32", **options)

    def groups(self, layer):
        named = [(f"{layer}.{name}", param) for name, param in self.model[layer].named_parameters()]
        return [{"params": named[:1], "momentum": 0.8}, {"params": named[1:], "use_muon": False}]

    def step(self, seed, without):
        generator = torch.Generator().manual_seed(seed)
        for k, param in enumerate(self.model.parameters()):
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if k in without or not param.requires_grad else grad
        self.optimizer.step()

    def add(self, layer):
        for group in self.groups(layer):
            self.optimizer.add_param_group(group)

    def freeze(self, k):
        param = list(self.model.parameters())[k]
        param.requires_grad_(not param.requires_grad)

    def rate(self, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def do(self, events):
        for name, *arguments in events:
            getattr(self, name)(*arguments)
        return self


class Interrupted(RuleBasedStateMachine):
    """Interrupt a run in every way that a program can; compare with a run that does only what counts."""

    @initialize(
        dtype=DTYPES,
        momentum_dtype=STORED,
        adamw_state_dtype=STORED,
        extra=st.sampled_from([{}, {"nesterov": False}, {"max_batch_bytes": 1}]),
    )
    def start(self, dtype, momentum_dtype, adamw_state_dtype, extra):
        options = {"momentum_dtype": momentum_dtype, "adamw_state_dtype": adamw_state_dtype, "weight_decay": 0.1}
        self.new = functools.partial(Run, dtype, {**options, **extra})
        self.run, self.events, self.saved = self.new(), [], None

    def event(self, *event):
        self.run.do([event])
        self.events.append(event)

    @rule(seed=st.integers(0, 99), without=st.sets(st.integers(0, 5), max_size=3))
    def step(self, seed, without):
        self.event("step", seed, without)

    @rule(k=st.integers(0, 5))
    def freeze_or_train(self, k):
        self.event("freeze", k)

    @rule(lr=st.sampled_from([0.0, 1e-3, 0.1]))
    def schedule(self, lr):
        self.event("rate", lr)

    @precondition(lambda self: len(self.run.optimizer.param_groups) < 6)
    @rule()
    def add_param_group(self):
        self.event("add", "late" if ("add", "late") not in self.events else "last")

    @rule()
    def save(self):
        torch.save((self.run.model.state_dict(), self.run.optimizer.state_dict()), file := io.BytesIO())
        self.saved = file.getvalue(), len(self.events)

    @precondition(lambda self: self.saved)
    @rule(into_a_new_one=st.booleans())
    def load(self, into_a_new_one):
        content, count = self.saved
        events = self.events[:count]
        same_groups = not any(event[0] == "add" for event in self.events[count:])
        if into_a_new_one or not same_groups:
            # What is no part of a checkpoint: which groups there are, and what is frozen.
            self.run = self.new().do(event for event in events if event[0] in ("add", "freeze"))
        else:
            self.run.do(event for event in self.events[count:] if event[0] == "freeze")  # back
        weights, state = torch.load(io.BytesIO(content), weights_only=True)
        self.run.model.load_state_dict(weights)
        self.run.optimizer.load_state_dict(state)
        self.events = events

    @rule(way=st.sampled_from([copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))]))
    def copy(self, way):
        self.run = way(self.run)

    @rule()
    def get_and_set_as_torchs_checkpoints_do(self):
        model, optimizer = self.run.model, self.run.optimizer
        params = params_of(optimizer)
        # torch makes state where there is none at all, and leaves frozen parameters out.
        if len(optimizer.state) in (0, len(params)) and all(param.requires_grad for param in params):
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))

    @rule()
    def take_a_group_out_and_put_it_back(self):
        optimizer = self.run.optimizer
        optimizer.add_param_group(optimizer.param_groups.pop())

    @rule(bad=st.sampled_from([float("nan"), float("inf")]))
    def refuse_a_step(self, bad):
        param = params_of(self.run.optimizer)[0]
        param.grad = torch.full_like(param, bad)
        with pytest.raises(RuntimeError, match="gradient-not-finite"):
            self.run.optimizer.step()

    @rule()
    def refuse_a_state(self):
        state_dict = copy.deepcopy(self.run.optimizer.state_dict())
        state_dict["param_groups"][-1]["step"] = -1
        with pytest.raises(ValueError, match="nothing was changed"):
            self.run.optimizer.load_state_dict(state_dict)

    def teardown(self):
        if not hasattr(self, "run"):
            return
        twin = self.new().do(self.events)
        for run in (self.run, twin):
            run.optimizer.init_state()  # as torch has done before it gets a state
            for group in run.optimizer.param_groups:
                group.pop("differentiable", None)  # torch's False, in groups that are added to a copy
        assert equal(bits(self.run.model.parameters()), bits(twin.model.parameters()))
        assert equal(self.run.optimizer.state_dict(), twin.optimizer.state_dict())


TestInterrupted = Interrupted.TestCase
TestInterrupted.settings = settings(stateful_step_count=30)


CHANGES = {
    "other dtypes": {"momentum_dtype": "int8", "adamw_state_dtype": "bf16"},
    "a rule less": {"normalize": "none"},
    "another rule": {"cautious": True},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("bad", [float("nan"), None], ids=["gradient", "memory"])
def test_a_refused_step_leaves_state_as_it_was_also_where_options_have_changed(change, bad, monkeypatch):
    run = Run(torch.float32, {"normalize": "rows"})
    run.step(0, ())
    before = {param: dict(state) for param, state in run.optimizer.state.items()}
    values = {param: copy.deepcopy(state) for param, state in before.items()}
    for group in run.optimizer.param_groups:
        group.update(change)
    if bad is None:
        monkeypatch.setattr("hf_muon.optimizer.step_plan.hyperparameters", raise_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run.step(1, ())
    else:
        params_of(run.optimizer)[0].grad.fill_(bad)
        with pytest.raises(RuntimeError, match="weights and moments are as they were"):
            run.optimizer.step()
    assert run.optimizer.state.keys() == before.keys()
    for param, state in run.optimizer.state.items():
        assert all(state[key] is value for key, value in before[param].items())
        assert equal(state, values[param])


def raise_out_of_memory(*_):
    raise torch.OutOfMemoryError


# --- mutated states

VALUES = [
    None, True, False, 0, 1, -1, 2, 2.5, -0.0, 1e-300, 1e30, float("nan"), float("inf"), 10**400, "", "2", "auto",
    "int8", b"x", [], [1], (), (0.9, 0.95), [0.9, 0.95], {}, {"a": 1}, {1, 2}, object, 3 + 4j,
    torch.tensor(1.0), torch.tensor(3), torch.tensor(float("nan")), torch.tensor(-2.0), torch.tensor(True),
    torch.ones(2), torch.ones(0), torch.ones(8, 18), torch.ones(3, 8), torch.ones(8), -torch.ones(8),
    torch.ones(8) * 3e38, torch.ones(8, 18, dtype=torch.int8), torch.ones(8, 18).double() * 1e200,
    torch.ones(8, 18, device="meta"), torch.ones(8, 18).to_sparse(), torch.ones(8, 1), nn.Parameter(torch.ones(8)),
    torch.ones(8, 18, dtype=torch.complex64),
]  # fmt: skip
NEW_KEYS = ["momentum_buffer", "momentum_scale", "exp_avg", "step", "foreach", "views", 77, "initial_lr"]
ENTRIES = [0.0, -1.0, 100.0, 1e38]


def paths(tree, prefix=()):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*prefix, key)
        yield from paths(value, (*prefix, key))


def holder_of(tree, path):
    return functools.reduce(lambda holder, key: holder[key], path[:-1], tree)


places = st.sampled_from(list(paths(stepped(momentum_dtype="int8")[1].state_dict())))
values = st.sampled_from(VALUES)
mutations = st.one_of(
    st.tuples(st.just("put"), places, values),
    st.tuples(st.just("delete"), places, st.none()),
    st.tuples(st.just("add"), places, st.tuples(st.sampled_from(NEW_KEYS), values)),
    st.tuples(st.just("swap"), places, places),
    st.tuples(st.just("entry"), places, st.tuples(st.integers(0, 143), st.sampled_from(ENTRIES))),
)


def mutate(saved, kind, path, what):
    """Change one place of a state, if it still has that place."""
    holder = holder_of(saved, path)
    if not isinstance(holder, (dict, list)):
        return
    value = holder[path[-1]]
    if kind == "put":
        holder[path[-1]] = copy.deepcopy(what)
    elif kind == "delete":
        del holder[path[-1]]
    elif kind == "add" and isinstance(holder, dict):
        holder[what[0]] = copy.deepcopy(what[1])
    elif kind == "swap" and path[: len(what)] != what and what[: len(path)] != path:
        there = holder_of(saved, what)
        holder[path[-1]], there[what[-1]] = there[what[-1]], value
    elif kind == "entry" and isinstance(value, torch.Tensor) and value.numel():
        position, entry = what
        if value.dtype.is_floating_point or abs(entry) < 128:
            value.detach().view(-1)[position % value.numel()] = entry


@functools.cache
def subjects(dtype, momentum_dtype):
    """Return a saved state; a model and its optimizer, which loads; and the state that it begins with."""
    saved = copy.deepcopy(stepped(dtype, momentum_dtype=momentum_dtype)[1].state_dict())
    model, optimizer = build(dtype, momentum_dtype=momentum_dtype)
    step(optimizer)
    return saved, model, optimizer, copy.deepcopy(optimizer.state_dict())


def test_mutated_states():
    """Require that every state is refused, or loaded whole and as it was saved; then a step can be taken."""
    outcomes = collections.Counter()

    @given(DTYPES, STORED, st.lists(st.lists(mutations, min_size=1, max_size=3), min_size=10, max_size=20))
    def check(dtype, momentum_dtype, states):
        for changes in states:
            outcomes[load(*subjects(dtype, momentum_dtype), changes)] += 1

    check()
    assert min(outcomes["refused"], outcomes["loaded"]) > 60


def load(saved, model, optimizer, before, changes):
    """Load a mutated state, take a step, and return what has become of it."""
    state_dict = copy.deepcopy(saved)
    for change in changes:
        with contextlib.suppress(KeyError, IndexError, TypeError):  # another change has taken the place away
            mutate(state_dict, *change)
    snapshot = copy.deepcopy(state_dict)
    try:
        optimizer.load_state_dict(state_dict)
    except ValueError as error:
        refusal = str(error)
        assert "nothing was changed" in refusal
        assert "[unreadable-state]" not in refusal
        assert equal(optimizer.state_dict(), before)
        return "refused"
    for param, key in zip(
        params_of(optimizer), (k for g in snapshot["param_groups"] for k in g["params"]), strict=True
    ):
        for name, value in own_moments(snapshot["state"].get(key)).items():
            if name in optimizer.state[param]:  # not the scales of a template
                number = optimizer.state[param][name]
                expected = torch.as_tensor(value).detach().float().reshape(number.shape).to(number.dtype)
                assert torch.equal(number, expected), name
    weights = copy.deepcopy(model.state_dict())
    step(optimizer, seed=3)
    for key in range(6):  # a load does not change the state dict
        assert equal(*(own_moments(each["state"].get(key)) for each in (snapshot, state_dict)))
    model.load_state_dict(weights)
    optimizer.load_state_dict(before)
    assert equal(optimizer.state_dict(), before)
    return "loaded"


def own_moments(moments):
    """Return the moments without foreign keys, whose values may be NaN or lack data, and so equal nothing."""
    return {k: v for k, v in moments.items() if k in ALL_STATE_KEYS} if isinstance(moments, dict) else {}
