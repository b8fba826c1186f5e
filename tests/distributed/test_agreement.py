"""Reports before a step go between exactly the ranks that shared parameters connect, however groups overlap."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_muon.distributed import agreement
from hf_muon.distributed import groups as groups_module
from hf_muon.distributed.select import comm_device
from tests.distributed.agreement_cases import idle, own_experts, pipeline, pipeline_under
from tests.distributed.pool import Pool

LONGEST = 20  # seconds that a thread waits for the others of a group


class Ranks:
    """Ranks as threads of this process; their groups wait for all members, as collectives do."""

    def __init__(self, world, groups):
        self.world = world
        self.members = {SimpleGroup(name): list(ranks) for name, ranks in groups.items()}
        self.rank = threading.local()
        self.barriers = {group: threading.Barrier(len(ranks)) for group, ranks in self.members.items()}
        self.reports = defaultdict(dict)
        self.rounds = 0
        self.get_world_size = lambda: world
        self.get_rank = lambda: self.rank.number
        self.get_process_group_ranks = self.members.__getitem__

    def gather(self, group, device_type, mine):
        self.reports[group][self.rank.number] = mine.tolist()
        self.barriers[group].wait(LONGEST)
        gathered = [self.reports[group][rank] for rank in self.members[group]]
        assert len(set(map(len, gathered))) == 1
        self.barriers[group].wait(LONGEST)
        return gathered

    def run(self, function):
        results, threads = {}, []

        def act(number):
            self.rank.number = number
            results[number] = function([g for g, ranks in self.members.items() if number in ranks])

        for number in range(self.world):
            threads.append(threading.Thread(target=act, args=(number,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(2 * LONGEST)
        return results


class SimpleGroup:
    def __init__(self, name):
        self.group_name = name


def components(world, groups):
    """Return the connected ranks of every rank, by merging sets of ranks."""
    sets = [{rank} for rank in range(world)]
    for ranks in groups.values():
        joined = set(ranks).union(*(some for some in sets if some & set(ranks)))
        sets = [some for some in sets if not some & joined] + [joined]
    return {rank: sorted(next(some for some in sets if rank in some)) for rank in range(world)}


CHAIN = {str(i): (i, i + 1) for i in range(7)}
RING = {**CHAIN, "7": (0, 7)}
PIPELINE = {str(ranks): ranks for ranks in [(0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (1, 3), (4, 6), (5, 7)]}
TWICE = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (2, 3)}


def check(monkeypatch, world, groups):
    ranks = Ranks(world, groups)
    with monkeypatch.context() as patch:
        patch.setattr(groups_module, "dist", ranks)
        patch.setattr(groups_module, "gather", ranks.gather)
        results = ranks.run(lambda own: groups_module.connected(own[::-1] if ranks.rank.number % 2 else own))
    expected = components(world, groups)
    alone = {rank for rank in range(world) if not any(rank in members for members in groups.values())}
    assert results == {rank: expected[rank] if rank not in alone else [] for rank in range(world)}


@pytest.mark.parametrize("groups", [CHAIN, RING, PIPELINE, TWICE], ids=["chain", "ring", "pipeline", "twice"])
def test_ranks_learn_whom_they_are_connected_with(monkeypatch, groups):
    check(monkeypatch, 8, groups)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sets(st.integers(0, 6), min_size=1), max_size=6))
def test_any_groups(groups):
    with pytest.MonkeyPatch.context() as monkeypatch:
        check(monkeypatch, 7, {f"{i}": tuple(sorted(ranks)) for i, ranks in enumerate(groups)})


def test_bits_are_packed_and_unpacked():
    for count in (0, 1, 61, 62, 63, 130):
        bits = [bool(bit) for bit in torch.randint(2, (count,)).tolist()]
        packed = agreement.pack_bits(bits)
        assert agreement.unpack_bits(packed, count) == bits
        assert all(0 <= number < 2**62 for number in packed)


@pytest.fixture(scope="module")
def five():
    pool = Pool(5, timeout=60, forks=True)
    yield pool
    pool.close(kill=True)


@pytest.mark.promise("pipeline")
@pytest.mark.parametrize("meshed", [False, True])
def test_stages_of_a_pipeline_step_by_themselves(five, meshed):
    """Overlap data and tensor parallel groups in one stage; the other stage has other parameters and sends nothing."""
    for rank, ((results, single), words) in enumerate(five.run(pipeline, meshed=meshed)):
        assert words == (rank < 4)
        for mine, expected in zip(itertools.chain(*results), itertools.chain(*single), strict=True):
            assert torch.equal(mine, expected)


@pytest.mark.parametrize("scheme", ["joined", "asked"])
def test_stages_step_however_torch_names_groups(five, scheme):
    for (results, single), _ in five.run(pipeline_under, scheme=scheme):
        for mine, expected in zip(itertools.chain(*results), itertools.chain(*single), strict=True):
            assert torch.equal(mine, expected)


def test_a_torch_that_names_groups_in_another_way_is_refused(five):
    *stage, (other, _) = five.run(pipeline_under, scheme="other")
    assert all(f"torch {torch.__version__} names process groups in a way" in error for error in stage)
    assert len(other) == 2


@pytest.mark.parametrize(
    ("types", "home", "expected"),
    [
        (["cuda"], "cuda:3", "cuda:3"),  # "cuda" alone would be the current device, by default the first
        (["cpu", "cuda"], "cuda:1", "cuda:1"),
        (["cpu", "cuda"], "cpu", "cpu"),
        (["cuda"], "cpu", "cuda"),
        (["cpu"], "cuda:2", "cpu"),
    ],
)
def test_a_rank_talks_over_the_device_of_its_parameters(types, home, expected):
    """Matrices are computed on a device, and data travels from there if the group has no backend for where it lies."""
    group = SimpleNamespace(_device_types=types)
    assert agreement.report_device(group, torch.device(home)) == torch.device(expected)
    if home != "cuda:2":
        assert comm_device(group, torch.device(home), torch.device("cuda", 0)).type == torch.device(expected).type


def test_texts_of_any_length_travel(five):
    assert five.run(texts) == [TEXTS] * 5


TEXTS = [["a line", "\u00e9 \ud800"], [], ["long" * 1000, "b"], [""], ["\n "]]


def texts(rank):
    """Exchange texts without `all_gather_object`, which gathers over the current device."""
    import torch.distributed as dist

    with mock.patch.object(dist, "all_gather_object"):
        return agreement.exchange_texts(dist.group.WORLD, torch.device("cpu"), TEXTS[rank])


def test_a_group_without_gradients_sends_nothing(pools):
    assert pools[2].run(idle, layout="fsdp") == [(0, 0, 0, True)] * 2


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_ranks_own_parameters_are_stepped_when_it_has_gradients(pools, use_muon):
    assert pools[2].run(own_experts, use_muon=use_muon) == [([3, 3], True)] * 2
