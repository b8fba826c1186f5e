"""Real training: every layout compared with one process, every resumed run with the uninterrupted one."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.bounds import beyond_rounding
from tests.distributed.training import train

LAYOUTS = [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("fsdp-keep", 2), ("hsdp", 4), ("tp", 2), ("fsdp-tp", 4)]


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """Record warnings: torch itself warns about single processes and gloo."""


@functools.cache
def one_process(*options):
    """Return the results of one process, the reference for layouts."""
    return train(0, "single", **dict(options))


def difference(one, other, key="weight"):
    """Return the largest relative difference of any parameter."""
    return max(
        float((one["states"][name][key] - state[key]).norm() / state[key].norm())
        for name, state in other["states"].items()
        if key in state
    )


def assert_same(one, other):
    assert one["losses"] == other["losses"]
    assert one["states"].keys() == other["states"].keys()
    for name, state in other["states"].items():
        assert one["states"][name].keys() == state.keys()
        for key, value in state.items():
            assert one["states"][name][key].dtype == value.dtype
            assert torch.equal(one["states"][name][key], value), f"{name} {key}"


def tensors(result):
    """Return losses, weights and moments by name."""
    by_name = {f"{name} {key}": value for name, state in result["states"].items() for key, value in state.items()}
    return {"losses": torch.tensor(result["losses"]), **by_name}


def assert_close(one, *options):
    """Compare within rounding: ranks sum a shared batch in another order, which Newton-Schulz amplifies."""
    controls = [tensors(one_process(*options, ("moved", seed))) for seed in (0, 1)]
    assert not beyond_rounding(tensors(one), tensors(one_process(*options)), controls)


@pytest.mark.extended(but="clipping")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipping": 0.3, "accumulate": 2},
        {"frozen": True},
        {"nesterov": False, "adjust_lr_fn": "original", "ns_coefficients": "cans"},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_every_layout_trains_as_one_process(pools, layout, ranks, options):
    single = one_process(*options.items())
    assert single["losses"][-1] < single["losses"][0] - 0.3
    results = pools[ranks].run(train, layout=layout, **options)
    for result in results:
        assert_close(result, *options.items())
        assert_same(result, results[0])


@pytest.mark.extended(but="single-1-float32|(ddp|fsdp|tp)-2-float32|(hsdp|fsdp-tp)-4-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layout", "ranks"), [("single", 1), *LAYOUTS])
def test_resume_is_exact(pools, layout, ranks, dtype, tmp_path):
    def run(**options):
        if layout == "single":
            return train(0, layout, dtype=dtype, **options)
        return pools[ranks].run(train, layout=layout, dtype=dtype, **options)[0]

    straight = run(last=8)
    run(last=4, save=str(tmp_path / "checkpoint"))
    assert_same(
        {**run(first=4, last=8, load=str(tmp_path / "checkpoint"))}, {**straight, "losses": straight["losses"][4:]}
    )
    momenta = [state["momentum_buffer"] for state in straight["states"].values() if "momentum_buffer" in state]
    assert len(momenta) == 12
    assert all(momentum.dtype is torch.float32 and momentum.any() for momentum in momenta)


@pytest.mark.extended(but="single|^fsdp-2")
@pytest.mark.parametrize(("layout", "ranks"), [("single", 1), *LAYOUTS])
def test_resume_without_moments_is_refused_or_seen(pools, layout, ranks, tmp_path):
    """Drop the moments, to prove that `test_resume_is_exact` would notice."""

    def run(**options):
        if layout == "single":
            return train(0, layout, **options)
        return pools[ranks].run(train, layout=layout, **options)[0]

    straight = run(last=6)
    path = str(tmp_path / "checkpoint")
    run(last=4, save=path)
    resumed = run(first=4, last=6, load=path, drop="everything")
    assert difference(resumed, straight) > 1e-3
    assert abs(resumed["losses"][-1] - straight["losses"][-1]) > 1e-4
    with pytest.raises((RuntimeError, AssertionError), match="has taken 4 steps and its moments are gone"):
        run(first=4, last=6, load=path, drop="state")
