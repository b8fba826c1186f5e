"""Moments on the host: the same bits as without, in bounded device memory, and copies that never overtake the step.

All of it on a stand-in for an accelerator, see tests/stand_in.py.
"""

from __future__ import annotations

import pytest
import torch

from hf_muon import MuonConfig
from hf_muon.plan.step_plan import plan_step
from hf_muon.storage import host
from tests.distributed.cases import VIEWS, WIDE, given_gradients
from tests.distributed.pool import Pool
from tests.distributed.stand_in_cases import Net, failing, stand_in_gradients, train
from tests.distributed.test_layouts import assert_equal

OPTIONS = {
    "fp32": {"viewed": VIEWS},
    "bf16": {"viewed": VIEWS, "dtype": "bfloat16", "momentum_dtype": "bf16", "adamw_state_dtype": "bf16"},
    "int8": {"viewed": WIDE, "tables": [(9, 150)], "momentum_dtype": "int8", "adamw_state_dtype": "int8"},
    "no nesterov": {"nesterov": False},
}
OPTIONS = {name: {"steps": 2, **options} for name, options in OPTIONS.items()}
BOTH, ACCELERATOR = ("cpu", "standin"), ("standin",)


@pytest.fixture(scope="module")
def stand_ins():
    """Yield pools by number of ranks, whose processes have the stand-in."""
    by_size = {size: Pool(size, forks=True) for size in (1, 2, 4)}
    yield by_size
    for pool in by_size.values():
        pool.close()


@pytest.fixture(scope="module")
def plain(stand_ins):
    """Return what one process computes on the device without offload, by the name of the options."""
    results = {}

    def of(name):
        if name not in results:
            results[name] = stand_ins[2].run(stand_in_gradients, layout="single", **OPTIONS[name])[0][0]
        return results[name]

    return of


@pytest.mark.extended(but="fp32-fsdp-both|int8-ddp-accelerator")
@pytest.mark.parametrize(
    ("layout", "backends"),
    [
        pytest.param("single", BOTH, id="single-both"),
        pytest.param("ddp", ACCELERATOR, id="ddp-accelerator"),
        pytest.param("fsdp", BOTH, id="fsdp-both"),
        pytest.param("fsdp", ACCELERATOR, id="fsdp-accelerator"),
        pytest.param("last", BOTH, id="last-both"),
    ],
)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_layout_gives_the_bits_of_a_run_without_offload(stand_ins, plain, name, layout, backends):
    options = {**OPTIONS[name], "momentum_offload": "cpu"}
    if name == "int8" and layout == "last":
        pytest.skip("these shards cut blocks")
    for states, races, copied in stand_ins[2].run(stand_in_gradients, layout=layout, backends=backends, **options):
        assert_equal([states], plain(name))
        assert not races
        assert min(copied.values()) > 0


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["hsdp", "fsdp-tp", "fsdp-tp-row", "experts"])
def test_every_mesh_gives_the_bits_of_a_run_without_offload(stand_ins, plain, layout):
    options = {**OPTIONS["fp32"], "momentum_offload": "cpu"}
    for states, races, _ in stand_ins[4].run(stand_in_gradients, layout=layout, **options):
        assert_equal([states], plain("fp32"))
        assert not races


@pytest.mark.extended(but="fp32")
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_parameters_on_the_host_too_as_fsdp2s_cpu_offload_has_them(stand_ins, name):
    """Let the device be as a CPU: on a real one the host's elementwise steps of these parameters round differently."""
    options = {**OPTIONS[name], "parameters_on_host": True, "as_host": True}
    expected = stand_ins[2].run(stand_in_gradients, layout="single", as_host=True, **OPTIONS[name])[0][0]
    for backends in (BOTH, ACCELERATOR):
        for states, races, _ in stand_ins[2].run(stand_in_gradients, layout="fsdp", backends=backends, **options):
            assert_equal([states], expected)
            assert not races


# --- memory and traffic

STATES = {
    "fp32": {},
    "bf16": {"momentum_dtype": "bf16", "adamw_state_dtype": "bf16", "dtype": "bfloat16"},
    "int8": {"momentum_dtype": "int8", "adamw_state_dtype": "int8"},
}


@pytest.mark.extended(but="fp32")
@pytest.mark.parametrize("name", STATES)
def test_moments_are_on_the_host_and_travel_once_each_way(stand_ins, name):
    (plain_run,) = stand_ins[1].run(train, **STATES[name])
    ((weights, state, notes),) = stand_ins[1].run(train, **STATES[name], momentum_offload="cpu")
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


@pytest.mark.extended(but="int8")
@pytest.mark.parametrize("name", STATES)
def test_a_step_has_two_turns_of_moments_on_the_device(stand_ins, name):
    (plain_run,) = stand_ins[1].run(train, **STATES[name])
    ((_, _, notes),) = stand_ins[1].run(train, **STATES[name], momentum_offload="cpu")
    width = {"fp32": 4, "bf16": 2, "int8": 1.0625}[name]
    unit = 16 * 256 * 320 * width  # all matrices: small units move together
    chunk = 2 * 2 * 2**15 * width
    assert plain_run[2]["peak"] < notes["peak"] <= plain_run[2]["peak"] + 2 * max(unit, chunk) + 2**12


@pytest.mark.parametrize("name", STATES)
def test_a_plan_foretells_the_host_and_bounds_the_device(stand_ins, name):
    options = dict(STATES[name])
    (without,), (notes,) = (
        [run[2] for run in stand_ins[1].run(train, **options, **offload, chunk=2**22, compiles=True)]
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


@pytest.mark.extended(but="wait")
@pytest.mark.parametrize("broken", ["inward", "outward", "wait", "synchronize"])
def test_without_one_of_the_waits_copies_would_overtake(stand_ins, broken):
    """Show that the tests above see what they are for."""
    ((_, _, notes),) = stand_ins[1].run(train, momentum_offload="cpu", broken=broken)
    assert notes["races"]


def test_a_step_that_fails_leaves_no_copy_under_way(stand_ins):
    assert stand_ins[1].run(failing) == [[]]


# --- checkpoints


@pytest.mark.extended(but="fp32")
@pytest.mark.parametrize(("there", "here"), [("cpu", "cpu"), ("none", "cpu"), ("cpu", "none")])
@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_resume_is_exact_with_and_without(stand_ins, name, there, here):
    options = STATES[name]
    (straight,) = stand_ins[1].run(train, steps=4, **options)
    ((weights, state, _),) = stand_ins[1].run(train, momentum_offload=there, **options)
    ((weights, state, notes),) = stand_ins[1].run(
        train, first=2, state=(weights, state), momentum_offload=here, **options
    )
    assert all(map(torch.equal, weights, straight[0]))
    assert_same_state(state, straight[1])
    where = {"cpu": "cpu", "none": "standin"}[here]
    assert {kind for n, (kind,) in notes["devices"].items() if n.endswith("weight")} == {where}


@pytest.mark.extended
def test_a_checkpoint_of_other_dtypes_is_converted_onto_the_host(stand_ins):
    ((weights, state, _),) = stand_ins[1].run(train)
    results = [
        stand_ins[1].run(
            train, first=2, state=(weights, state), momentum_dtype="int8", adamw_state_dtype="bf16", momentum_offload=to
        )[0]
        for to in ("none", "cpu")
    ]
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert_same_state(results[0][1], results[1][1])


def test_memory_that_cannot_be_pinned_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(host, "_PINS", ("cpu",))  # for which nothing can be pinned without an accelerator
    with pytest.raises(
        RuntimeError, match=r"momentum_offload=cpu cannot have 0\.4 MB more of the host.s memory, pinned: "
    ):
        host.zeros_like(torch.empty(100, 1000), torch.float32)


def test_on_a_cpu_there_is_nothing_to_offload():
    results = [given_gradients(0, "single", momentum_offload=to) for to in ("none", "cpu")]
    assert_equal(results[:1], results[1])


def test_other_words_are_refused():
    with pytest.raises(ValueError, match=r"momentum_offload='gpu' is not valid\. Valid: none or cpu"):
        MuonConfig(momentum_offload="gpu")
