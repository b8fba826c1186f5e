"""Moments on the host: in bounded device memory, and by copies that never overtake the step.

On a stand-in for an accelerator, see tests/stand_in.py; `tests.equality.test_device` compares the bits of all layouts.
"""

from __future__ import annotations

import pytest
import torch

from hf_muon import MuonConfig
from hf_muon.plan.step_plan import plan_step
from hf_muon.storage import host
from tests.distributed.pool import Pool
from tests.distributed.stand_in_cases import Net, failing, train


@pytest.fixture(scope="module")
def stand_in():
    """Yield a pool of one rank, which has the stand-in."""
    pool = Pool(1, forks=True)
    yield pool
    pool.close()


# --- memory and traffic

STATES = {
    "fp32": {},
    "bf16": {"momentum_dtype": "bf16", "adamw_state_dtype": "bf16", "dtype": "bfloat16"},
    "int8": {"momentum_dtype": "int8", "adamw_state_dtype": "int8"},
}


@pytest.mark.first_tier("fp32")
@pytest.mark.parametrize("name", STATES)
def test_moments_are_on_the_host_and_travel_once_each_way(stand_in, name):
    (plain_run,) = stand_in.run(train, **STATES[name])
    ((weights, state, notes),) = stand_in.run(train, **STATES[name], momentum_offload="cpu")
    assert all(map(torch.equal, weights, plain_run[0]))
    assert_same_state(state, plain_run[1])
    assert notes["copied"] == {"in": notes["state bytes"], "out": notes["state bytes"]}
    assert {kind for n, (kind,) in notes["devices"].items() if n.endswith("weight")} == {"cpu"}
    assert {kind for n, (kind,) in notes["devices"].items() if n.endswith("bias")} == {"standin"}  # a few bytes
    assert not notes["races"]
    assert notes["after"] == 0


def assert_same_state(state, other):
    assert state["state"].keys() == other["state"].keys()
    for key, own in state["state"].items():
        assert own.keys() == other["state"][key].keys()
        assert all(torch.equal(value, other["state"][key][name]) for name, value in own.items())


@pytest.mark.first_tier("int8")
@pytest.mark.parametrize("name", STATES)
def test_a_step_has_two_turns_of_moments_on_the_device(stand_in, name):
    (plain_run,) = stand_in.run(train, **STATES[name])
    ((_, _, notes),) = stand_in.run(train, **STATES[name], momentum_offload="cpu")
    width = {"fp32": 4, "bf16": 2, "int8": 1.0625}[name]
    unit = 16 * 256 * 320 * width  # all matrices: small units move together
    chunk = 2 * 2 * 2**15 * width
    assert plain_run[2]["peak"] < notes["peak"] <= plain_run[2]["peak"] + 2 * max(unit, chunk) + 2**12


@pytest.mark.parametrize("name", STATES)
def test_a_plan_foretells_the_host_and_bounds_the_device(stand_in, name):
    options = dict(STATES[name])
    (without,), (notes,) = (
        [run[2] for run in stand_in.run(train, **options, **offload, chunk=2**22, compiles=True)]
        for offload in ({}, {"momentum_offload": "cpu"})
    )
    dtype = getattr(torch, options.pop("dtype", "float32"))
    plain, plan = (
        plan_step(Net(), MuonConfig(**options, **offload), "single", 1, dtype=dtype, ns_dtype=torch.float32)
        for offload in ({}, {"momentum_offload": "cpu"})
    )
    memory = plan.memory
    assert memory.host == [notes["state bytes"]]
    assert memory.state == [plan.state_bytes[0] - notes["state bytes"]]
    assert memory.step - plain.memory.step >= notes["peak"] - without["peak"]


@pytest.mark.first_tier("wait")
@pytest.mark.parametrize("broken", ["inward", "outward", "wait", "synchronize"])
def test_without_one_of_the_waits_copies_would_overtake(stand_in, broken):
    """Show that the tests above see what they are for."""
    ((_, _, notes),) = stand_in.run(train, momentum_offload="cpu", broken=broken)
    assert notes["races"]


def test_a_step_that_fails_leaves_no_copy_under_way(stand_in):
    assert stand_in.run(failing) == [[]]


# --- checkpoints


@pytest.mark.first_tier("fp32")
@pytest.mark.parametrize(("there", "here"), [("cpu", "cpu"), ("none", "cpu"), ("cpu", "none")])
@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_resume_is_exact_with_and_without(stand_in, name, there, here):
    options = STATES[name]
    (straight,) = stand_in.run(train, steps=4, **options)
    ((weights, state, _),) = stand_in.run(train, momentum_offload=there, **options)
    ((weights, state, notes),) = stand_in.run(train, first=2, state=(weights, state), momentum_offload=here, **options)
    assert all(map(torch.equal, weights, straight[0]))
    assert_same_state(state, straight[1])
    where = {"cpu": "cpu", "none": "standin"}[here]
    assert {kind for n, (kind,) in notes["devices"].items() if n.endswith("weight")} == {where}


def test_memory_that_cannot_be_pinned_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(host, "_PINS", ("cpu",))  # for which nothing can be pinned without an accelerator
    with pytest.raises(RuntimeError, match=r"momentum_offload=cpu .*0\.4 MB.*\[host-memory\]"):
        host.zeros_like(torch.empty(100, 1000), torch.float32)
