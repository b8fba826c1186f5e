"""Ranks share the work and send nothing twice: the tests count, and do not time."""

from __future__ import annotations

import pytest

from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from tests.distributed.work_cases import all_to_alls, counted_step, events


@pytest.mark.promise("shared-work")
@pytest.mark.parametrize(
    ("layout", "ranks"), [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp-tp", 4)]
)
def test_newton_schulz_is_shared(pools, layout, ranks):
    single = counted_step(0, "single")["flops"]
    counts = pools[ranks].run(counted_step, layout=layout)
    assert sum(count["flops"] for count in counts) == single
    for count in counts:
        assert abs(count["flops"] * ranks / single - 1) < 0.1


@pytest.mark.promise("shared-work")
@pytest.mark.parametrize(
    ("layout", "ranks", "most"),
    [
        ("ddp", 2, 1 / 2),
        ("ddp", 4, 3 / 4),
        ("fsdp", 2, 1 / 2),
        ("fsdp", 4, 2 * 3 / 16),
        ("fsdp-tp", 4, 2 * 3 / 16),
        ("hsdp", 4, (2 + 1 - 2 / 2) / 4),
    ],
)
def test_bytes_and_collectives(pools, layout, ranks, most):
    for max_batch_bytes in (MAX_BATCH_BYTES, 9 * 2**14):
        counts = pools[ranks].run(counted_step, layout=layout, max_batch_bytes=max_batch_bytes)
        for count in counts:
            assert count["bytes"] <= 1.02 * most * count["updates"]
            assert count["calls"] == count["returns"] + (0 if layout == "ddp" else count["rounds"])
            assert count["words"] == 1
        assert (counts[0]["rounds"] > 3) == (max_batch_bytes == 9 * 2**14)


def test_experts_that_a_rank_stores_whole_do_not_travel(pools):
    counts = pools[2].run(counted_step, layout="fsdp", shapes=[(4, 8, 12), (6, 12, 8)])
    assert [count["calls"] for count in counts] == [0, 0]
    assert counts[0]["flops"] == counts[1]["flops"]


def test_rounds_overlap_within_the_bound(pools):
    for log in pools[2].run(events, layout="fsdp", max_batch_bytes=9 * 2**15):
        last = {call: i for i, call in enumerate(log)}  # of a few returns of a round
        count = 1 + max(k for _, k in log)
        assert count > 4
        for k in range(count - 1):
            # In order: gather the next round, orthogonalize this one, send it back, complete the previous one.
            assert last["gather", k + 1] < last["orthogonalize", k] < last["return", k]
            assert last["return", k] < last["orthogonalize", k + 1] < last["complete", k]


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_rounds_beyond_the_bound_do_not_overlap(pools, layout):
    for log in pools[2].run(events, layout=layout, max_batch_bytes=1):
        rounds = [[what for what, k in log if k == which] for which in range(log[-1][1] + 1)]
        assert [what for each in rounds for what in each] == [what for what, _ in log]
        for each in rounds:
            assert each[:2] == ["gather" if layout == "fsdp" else "move", "orthogonalize"]
            assert sorted(each[2:]) == ["complete", "complete", "return", "return"]  # of one owner after the other


def test_directions_of_copies_travel_while_the_next_round_is_orthogonalized(pools):
    for log in pools[2].run(events, layout="ddp", max_batch_bytes=9 * 2**14):
        last = {call: i for i, call in enumerate(log)}  # of a few returns of a round
        count = 1 + max(k for _, k in log)
        assert count > 4
        for k in range(count - 1):
            assert last["return", k] < last["orthogonalize", k + 1] < last["complete", k]


@pytest.mark.parametrize(("layout", "ranks"), [("fsdp", 2), ("hsdp", 4)])
def test_ranks_connect_before_their_first_exchange_once_for_a_group(pools, layout, ranks):
    """Expect one element for each rank first, as on an accelerator, then updates and directions."""
    for calls in pools[ranks].run(all_to_alls, layout=layout):
        groups = list(dict.fromkeys(name for _, name in calls))
        for name in groups:
            sizes = [size for size, own in calls if own == name]
            assert sizes[0] == ranks
            assert ranks not in sizes[1:]
            assert len(sizes) > 4
