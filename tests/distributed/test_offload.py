"""Moments on the host: in bounded device memory, and by copies that never overtake the step.

On a stand-in for an accelerator, see tests/support/stand_in.py; `tests.equality.test_device` compares the bits of all
layouts.
"""

from __future__ import annotations

import pytest
import torch

from hf_muon.storage import host
from tests.distributed.pool import Pool
from tests.distributed.stand_in_cases import CHUNK, MATRICES, SHAPE, failing, train

STATES = {
    "fp32": {},
    "bf16": {"momentum_dtype": "bf16", "adamw_state_dtype": "bf16", "dtype": "bfloat16"},
    "int8": {"momentum_dtype": "int8", "adamw_state_dtype": "int8"},
}
WIDTH = {"fp32": 4, "bf16": 2, "int8": 1.0625}


@pytest.fixture(scope="module")
def stand_in():
    """Yield a function that runs another one on a rank that has the stand-in."""
    pool = Pool(1, forks=True)
    yield lambda function, **options: pool.run(function, **options)[0]
    pool.close()


def assert_same(one, other):
    """Compare weights and states of two runs, bit by bit."""
    assert all(map(torch.equal, one[0], other[0]))
    assert one[1]["state"].keys() == other[1]["state"].keys()
    for key, own in one[1]["state"].items():
        assert own.keys() == other[1]["state"][key].keys()
        assert all(torch.equal(value, other[1]["state"][key][name]) for name, value in own.items())


def kinds_of(notes, ending):
    return {kind for name, (kind,) in notes["devices"].items() if name.endswith(ending)}


@pytest.mark.first_tier("fp32|int8")
@pytest.mark.parametrize("name", STATES)
def test_moments_travel_once_each_way_and_two_turns_of_them_are_on_the_device(stand_in, name):
    plain, offloaded = (stand_in(train, **STATES[name], momentum_offload=where) for where in ("none", "cpu"))
    assert_same(offloaded, plain)
    notes = offloaded[2]
    assert notes["copied"] == {"in": notes["state bytes"], "out": notes["state bytes"]}
    assert kinds_of(notes, "weight") == {"cpu"}
    assert kinds_of(notes, "bias") == {"standin"}  # a few bytes
    assert not notes["races"]
    assert torch.float64 not in notes["dtypes"]  # some devices have none
    assert notes["after"] == 0
    unit = MATRICES * SHAPE[0] * SHAPE[1] * WIDTH[name]  # all matrices: small units move together
    chunk = 2 * 2 * CHUNK * WIDTH[name]
    assert plain[2]["peak"] < notes["peak"] <= plain[2]["peak"] + 2 * max(unit, chunk) + 2**12


def test_momentum_of_a_group_on_two_devices_moves_beside_its_parameters(stand_in):
    plain, offloaded = (stand_in(train, momentum_offload=where, on_host="back") for where in ("none", "cpu"))
    assert_same(offloaded, plain)
    notes = offloaded[2]
    on_host = MATRICES // 2 * SHAPE[0] * SHAPE[1] * 4
    assert not notes["races"]
    assert 0 < notes["copied"]["out"] <= notes["state bytes"] - on_host


@pytest.mark.first_tier("wait")
@pytest.mark.parametrize("broken", ["_inward", "_outward", "_wait", "synchronize"])
def test_without_one_of_the_waits_copies_would_overtake(stand_in, broken):
    """Show that the tests above see what they are for."""
    assert stand_in(train, momentum_offload="cpu", broken=broken)[2]["races"]


def test_a_step_that_fails_leaves_no_copy_under_way(stand_in):
    assert stand_in(failing) == []


@pytest.mark.first_tier("fp32")
@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_resume_is_exact_with_and_without(stand_in, name):
    options = STATES[name]
    straight = stand_in(train, steps=4, **options)
    halves = {where: stand_in(train, momentum_offload=where, **options)[:2] for where in ("cpu", "none")}
    for there, here in (("cpu", "cpu"), ("none", "cpu"), ("cpu", "none")):
        resumed = stand_in(train, first=2, state=halves[there], momentum_offload=here, **options)
        assert_same(resumed, straight)
        assert kinds_of(resumed[2], "weight") == {{"cpu": "cpu", "none": "standin"}[here]}


def test_memory_that_cannot_be_pinned_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(host, "_PINS", ("cpu",))  # for which nothing can be pinned without an accelerator
    with pytest.raises(RuntimeError, match=r"momentum_offload=cpu .*0\.4 MB.*\[host-memory\]"):
        host.zeros_like(torch.empty(100, 1000), torch.float32)
