"""State that moves between numbers of ranks, between layouts and through templates, and must not get lost."""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed.test_training import assert_close, assert_same

MOVES = [
    ("fsdp", 4, "fsdp", 2),
    ("fsdp", 2, "fsdp", 4),
    ("fsdp", 2, "single", 1),
    ("single", 1, "ddp", 2),
    ("ddp", 2, "hsdp", 4),
    ("hsdp", 4, "tp", 2),
    ("tp", 2, "fsdp-tp", 4),
    ("fsdp-tp", 4, "single", 1),
]


@pytest.mark.extended(but="fsdp-4-fsdp-2|fsdp-2-single|ddp-2-hsdp-4-sharded")
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize(("layout", "ranks", "other", "others"), MOVES)
def test_from_layout_to_layout(run, layout, ranks, other, others, full, tmp_path):
    path = str(tmp_path / "checkpoint")
    saved = run(layout, ranks, last=4, save=path, full=full)
    # The loaded state is bit-identical; later steps agree within the rounding between layouts.
    loaded = run(other, others, first=4, last=4, load=path, full=full)
    assert_same({**loaded, "losses": []}, {**saved, "losses": []})
    straight, resumed = run(layout, ranks, last=8), run(other, others, first=4, last=8, load=path, full=full)
    for results in (straight, {**resumed, "losses": straight["losses"][:4] + resumed["losses"]}):
        assert_close(results, ("last", 8))


@pytest.mark.parametrize(("layout", "ranks"), [("single", 1), ("fsdp", 2)])
def test_flattened_state(run, layout, ranks, tmp_path):
    path = str(tmp_path / "checkpoint")
    straight = run(layout, ranks, last=8)
    run(layout, ranks, last=4, save=path, flat=True)
    resumed = run(layout, ranks, first=4, last=8, load=path, flat=True)
    assert_same(resumed, {**straight, "losses": straight["losses"][4:]})


@pytest.mark.parametrize(("layout", "ranks"), [("single", 1), ("fsdp", 2)])
def test_an_empty_template_does_not_drop_moments(run, layout, ranks, tmp_path):
    """Expect an error: with stale gradients torch creates no state to load into, and would load nothing."""
    path = str(tmp_path / "checkpoint")
    run(layout, ranks, last=4, save=path)
    with pytest.raises((RuntimeError, ValueError, AssertionError)) as error:
        run(layout, ranks, first=4, last=8, load=path, stale_gradients=True)
    assert re.search(r"moments are missing|Missing optimizer state|moments are gone", str(error.value))


def test_saving_before_the_first_step_changes_nothing(run, tmp_path):
    """Do not count the step with zero gradients by which torch creates the state that it saves."""
    path = str(tmp_path / "checkpoint")
    straight = run("fsdp", 2, last=3)
    run("fsdp", 2, last=0, save=path)
    assert_same(run("fsdp", 2, last=3, load=path), straight)


@pytest.mark.parametrize(("layout", "ranks"), [("single", 1), ("fsdp", 2)])
def test_momentum_of_another_dtype_loads_and_trains(run, layout, ranks, tmp_path):
    path = tmp_path / "checkpoint"
    run(layout, ranks, last=4, save=str(path), full=True, dtype="bfloat16")
    state = torch.load(path, weights_only=True)
    moments = [s["momentum_buffer"] for s in state["optimizer"]["state"].values() if "momentum_buffer" in s]
    assert all(moment.dtype is torch.float32 for moment in moments)
    for results in state["optimizer"]["state"].values():
        if "momentum_buffer" in results:
            results["momentum_buffer"] = results["momentum_buffer"].bfloat16()
    torch.save(state, path)
    resumed = run(layout, ranks, first=4, last=6, load=str(path), full=True, dtype="bfloat16")
    straight = run(layout, ranks, last=6, dtype="bfloat16")
    for name, results in resumed["states"].items():
        if "momentum_buffer" in results:
            assert results["momentum_buffer"].dtype is torch.float32
            # bf16 has 8 significant bits.
            expected = straight["states"][name]["momentum_buffer"]
            assert (results["momentum_buffer"] - expected).norm() < 2**-7 * expected.norm()


@pytest.mark.parametrize(("layout", "ranks"), [("single", 1), ("fsdp", 2)])
def test_a_changed_routing_is_refused(run, layout, ranks, tmp_path):
    path = str(tmp_path / "checkpoint")
    run(layout, ranks, last=4, save=path, full=True, adamw_patterns="blocks.0.qkv|blocks.1.up.weight")
    resume = {"load": path, "full": True, "direct": True}
    with pytest.raises((RuntimeError, ValueError, AssertionError)) as error:
        run(layout, ranks, first=4, last=4, **resume)
    assert re.search(r"routing changed for blocks.0.qkv.weight \(AdamW there\), .*muon_patterns", str(error.value))
