"""Ranks share the work, and send nothing twice nor too late: counts, not times. Ranks import functions by name."""

from __future__ import annotations

import contextlib
from unittest import mock
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist

from hf_muon.distributed import exchange as exchange_module
from hf_muon.distributed import transfers
from hf_muon.distributed.exchange import Exchange
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.plan import under_way as planned_under_way
from tests.distributed.cases import make, muon_over, placed
from tests.equality.counted import Counted
from tests.support.accelerated import accelerated

LAYER = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32), "gate": (88, 32), "up": (88, 32), "down": (32, 88)}
DEEP = [shape for _ in range(24) for shape in LAYER.values()]
# The part of all updates that a rank sends: to owners, and back.
MOST = {
    ("ddp", 2): 1 / 2,
    ("ddp", 4): 3 / 4,
    ("fsdp", 2): 1 / 2,
    ("fsdp", 4): 2 * 3 / 16,
    ("fsdp-tp", 4): 2 * 3 / 16,
    ("hsdp", 4): (2 + 1 - 2 / 2) / 4,
}


def with_gradients(shapes, layout, **options):
    put, params = placed(make(shapes, 0), layout)
    for param, grad in zip(params, make(shapes, 1), strict=True):
        param.grad = put(grad)
    return muon_over(params, len(params), layout, **options)


def counted_step(rank, layout, shapes=DEEP, **options):
    """Return the FLOPs, bytes and collectives of a step, and the calls of its exchange."""
    optimizer = with_gradients(shapes, layout, **options)
    with logged(Exchange) as log, Counted() as counted:
        optimizer.step()
    return {name: getattr(counted, name) for name in ("flops", "bytes", "calls", "words")} | {"log": log}


@contextlib.contextmanager
def logged(exchange):
    """Note the calls of an exchange: what it does, and the number of the round.

    It gathers updates, or moves momentum where each owner has them; it orthogonalizes, returns directions, and waits
    for them.
    """
    log, places = [], {}
    names = {"_gather": "gather", "_orthogonalize": "orthogonalize", "_return": "return", "_complete": "complete"}

    def noted(name):
        original = getattr(exchange, name)

        def call(self, part, *args):
            if name == "_gather":  # of one round after the other
                places.update(dict.fromkeys([part, *part.ways_back], len(set(places.values()))))
            sends = part.gathers if name == "_gather" else getattr(part, "travels", True)
            stays = "move" if name == "_gather" else "stay"
            log.append((names[name] if sends else stays, places[part]))
            return original(self, part, *args)

        return call

    with mock.patch.multiple(exchange, **{name: noted(name) for name in names}):
        yield log


def assert_overlap(log):
    """Check the order of rounds: gather the next, orthogonalize this one, send it back, complete the one before."""
    last = {call: i for i, call in enumerate(log)}  # of a few returns of a round
    rounds = 1 + max(k for _, k in log)
    for k in range(rounds - 1):
        if ("gather", k + 1) in last:  # others need no data of other ranks
            assert last["gather", k + 1] < last["orthogonalize", k]
        if ("return", k) in last:
            assert last["orthogonalize", k] < last["return", k] < last["orthogonalize", k + 1] < last["complete", k]
    return rounds


@pytest.mark.promise("shared-work")
@pytest.mark.first_tier("ddp-2|fsdp-2")
@pytest.mark.second_tier("-2|hsdp|tp")
@pytest.mark.parametrize(("layout", "ranks"), MOST)
def test_work_is_shared_and_nothing_is_sent_twice(pools, layout, ranks):
    single = counted_step(0, "single")["flops"]
    for max_batch_bytes in (MAX_BATCH_BYTES, 9 * 2**14):
        counts = pools[ranks].run(counted_step, layout=layout, max_batch_bytes=max_batch_bytes)
        assert sum(count["flops"] for count in counts) == single
        for count in counts:
            assert abs(count["flops"] * ranks / single - 1) < 0.1
            assert count["bytes"] <= 1.02 * MOST[layout, ranks] * 4 * sum(m * n for m, n in DEEP)
            assert count["calls"] == sum(what in ("gather", "return") for what, _ in count["log"])
            assert count["words"] == 1
        rounds = 1 + counts[0]["log"][-1][1]
        assert (rounds > 3) == (max_batch_bytes == 9 * 2**14)


def test_experts_that_a_rank_stores_whole_do_not_travel(pools):
    counts = pools[2].run(counted_step, layout="fsdp", shapes=[(4, 8, 12), (6, 12, 8)])
    assert [count["calls"] for count in counts] == [0, 0]
    assert counts[0]["flops"] == counts[1]["flops"]


@pytest.mark.first_tier("fsdp")
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_rounds_overlap_within_the_bound(pools, layout):
    bound = 9 * 2 ** (15 if layout == "fsdp" else 14)
    for count in pools[2].run(counted_step, layout=layout, max_batch_bytes=bound):
        assert assert_overlap(count["log"]) > 4
    for count in pools[2].run(counted_step, layout=layout, max_batch_bytes=1):
        log = count["log"]
        rounds = [[what for what, k in log if k == which] for which in range(log[-1][1] + 1)]
        assert [what for each in rounds for what in each] == [what for what, _ in log]
        for each in rounds:
            assert each[:2] == ["gather" if layout == "fsdp" else "move", "orthogonalize"]
            assert sorted(each[2:]) == ["complete", "complete", "return", "return"]  # of one owner after the other


def under_way(rank, layout, ns_dtype):
    """Return the most bytes that leave or arrive at once in a step of an accelerator, and those that a plan counts."""
    optimizer = with_gradients(DEEP, layout, ns_dtype=ns_dtype, max_batch_bytes=9 * 2**14)
    now, most = [], []

    def noted(start):
        def started(send, *sizes):
            wait, nbytes = start(send, *sizes), send.nbytes + sum(sizes[-2]) * send.itemsize
            now.append(nbytes)
            most.append(sum(now))
            return lambda: now.remove(nbytes) or wait()

        return started

    functions = {name: noted(getattr(exchange_module, name)) for name in ("exchanged", "copied")}
    with accelerated(), mock.patch.multiple(exchange_module, **functions):
        optimizer.step()
        (exchange,) = optimizer._plan(optimizer.param_groups).layout.works[0].exchanges
    return max(most), planned_under_way(exchange.schedule, {"fp32": 4, "bf16": 2}[ns_dtype])


@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_a_plan_bounds_what_is_under_way_in_every_dtype_of_directions(pools, layout, ns_dtype):
    for measured, planned in pools[2].run(under_way, layout=layout, ns_dtype=ns_dtype):
        assert 0 < measured <= planned


def idle(rank):
    """Count collectives and states of a step without gradients, and of one with those of AdamW alone."""
    _, params = placed(make([(7, 5), (10, 16), (9,)], 0), "fsdp")
    optimizer = muon_over(params, 2, "fsdp")
    with Counted() as nothing:
        optimizer.step()
    before = len(optimizer.state)
    params[-1].grad = torch.ones_like(params[-1])
    with Counted() as vectors:
        optimizer.step()
    return nothing.calls, vectors.calls, before, len(optimizer.state)


def test_a_group_without_gradients_sends_nothing(pools):
    assert pools[2].run(idle) == [(0, 0, 0, 3)] * 2


def all_to_alls(rank, layout):
    """Return the elements and the process group of each all-to-all of two optimizers' steps, as on an accelerator."""
    calls, original = [], dist.all_to_all_single

    def noted(received, send, *args, group, **kwargs):
        calls.append((send.numel(), group.group_name))
        return original(received, send, *args, group=group, **kwargs)

    with (
        accelerated(),
        mock.patch.object(dist, "all_to_all_single", noted),
        mock.patch.object(transfers, "_connected", WeakSet()),
    ):
        for _ in range(2):
            optimizer = with_gradients([(8, 6)] * 3, layout)
            optimizer.step()
            optimizer.step()
    return calls


@pytest.mark.parametrize(("layout", "ranks"), [("fsdp", 2), ("hsdp", 4)])
def test_ranks_connect_before_their_first_exchange_once_for_a_group(pools, layout, ranks):
    """Expect one element for each rank first, as on an accelerator, then updates and directions."""
    for calls in pools[ranks].run(all_to_alls, layout=layout):
        for name in {name for _, name in calls}:
            sizes = [size for size, own in calls if own == name]
            assert sizes[0] == ranks
            assert ranks not in sizes[1:]
            assert len(sizes) > 4
