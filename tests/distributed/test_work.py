"""Ranks share the work and send nothing twice: the tests count, and do not time."""

from __future__ import annotations

import pytest

from tests.distributed.work_cases import counted_step, events


@pytest.mark.parametrize(
    ("layout", "ranks"), [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp-tp", 4)]
)
def test_newton_schulz_is_shared(pools, layout, ranks):
    single = counted_step(0, "single")["flops"]
    counts = pools[ranks].run(counted_step, layout=layout)
    assert sum(count["flops"] for count in counts) == single
    for count in counts:
        assert abs(count["flops"] * ranks / single - 1) < 0.1


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
    for max_bucket_bytes in (2**28, 2**19):
        counts = pools[ranks].run(counted_step, layout=layout, max_bucket_bytes=max_bucket_bytes)
        for count in counts:
            assert count["bytes"] <= 1.02 * most * count["updates"]
            assert count["calls"] == count["buckets"] * (1 if layout == "ddp" else 2)
            assert count["words"] == 1
        assert (counts[0]["buckets"] > 3) == (max_bucket_bytes == 2**19)


def test_experts_that_a_rank_stores_whole_do_not_travel(pools):
    counts = pools[2].run(counted_step, layout="fsdp", shapes=[(4, 8, 12), (6, 12, 8)])
    assert [count["calls"] for count in counts] == [0, 0]
    assert counts[0]["flops"] == counts[1]["flops"]


def test_rounds_overlap_within_the_bound(pools):
    limit = 2**20
    for log, in_flight in pools[2].run(events, max_bucket_bytes=limit):
        place = {(what, k): i for i, (what, k, _) in enumerate(log)}
        count = len(log) // 3
        assert len(place) == len(log)
        assert count > 4
        for k in range(1, count - 1):
            # In order: gather the next round, orthogonalize this one, complete the previous one.
            assert place["gather", k + 1] < place["orthogonalize", k] < place["complete", k]
            assert place["orthogonalize", k] < place["complete", k - 1]
        assert all(nbytes <= limit for _, nbytes in in_flight)
        assert max(rounds for rounds, _ in in_flight) == 3


def test_a_round_beyond_the_bound_travels_in_buckets_and_all_owners_work_at_once(pools):
    for log, in_flight in pools[2].run(events, max_bucket_bytes=1):
        rounds = [[(what, bucket) for what, k, bucket in log if k == which] for which in range(log[-1][1] + 1)]
        for each in rounds:
            count = len(each) // 3
            assert each[:count] == [("gather", i) for i in range(count)]
            assert each[count : 2 * count] == [("orthogonalize", i) for i in range(count)]
            assert each[2 * count :] == [("complete", i) for i in range(count)]
        assert max(map(len, rounds)) == 2 * 3
        assert all(number == 1 for number, _ in in_flight)
