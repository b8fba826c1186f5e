"""Reports before a step go between exactly the ranks that shared parameters connect, however groups overlap.

Ranks import functions by name.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from hf_muon import Muon
from hf_muon.distributed import groups as groups_module
from hf_muon.distributed import ranks as ranks_module
from tests.distributed.cases import assert_equal, given_gradients, given_gradients_prepared_alone, make, whole_state
from tests.distributed.pool import Pool
from tests.equality.counted import Counted
from tests.equality.placed import stored

LONGEST = 20  # seconds that a thread waits for the others of a group
WORLD = 8


class Group:
    def __init__(self, name):
        self.group_name = name


class Ranks:
    """Ranks as threads of this process; their groups wait for all members, as collectives do."""

    def __init__(self, groups):
        self.members = {Group(str(i)): sorted(ranks) for i, ranks in enumerate(groups)}
        self.rank = threading.local()
        self.barriers = {group: threading.Barrier(len(ranks)) for group, ranks in self.members.items()}
        self.reports, self.rounds = defaultdict(dict), defaultdict(int)
        self.get_world_size = lambda: WORLD
        self.get_rank = lambda: self.rank.number
        self.get_process_group_ranks = self.members.__getitem__

    def of_group(self, group, device):
        return SimpleNamespace(numbers=lambda own: self.gather(group, own))

    def gather(self, group, own):
        self.reports[group][self.rank.number] = own
        self.rounds[group, self.rank.number] += 1
        self.barriers[group].wait(LONGEST)
        gathered = [self.reports[group][rank] for rank in self.members[group]]
        assert len(set(map(len, gathered))) == 1
        self.barriers[group].wait(LONGEST)
        return gathered

    def connected(self):
        """Return what each rank that is in a group learns; ranks do not name their groups in the same order."""
        results = {}

        def act(number):
            self.rank.number = number
            own = [group for group, ranks in self.members.items() if number in ranks]
            results[number] = groups_module.connected(own[::-1] if number % 2 else own)

        threads = [threading.Thread(target=act, args=(number,), daemon=True) for number in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LONGEST)
        return results


def components(groups):
    """Return the connected ranks of every rank, by merging sets of ranks; none for a rank without a group."""
    sets = [{rank} for rank in range(WORLD)]
    for ranks in groups:
        joined = set(ranks).union(*(some for some in sets if some & set(ranks)))
        sets = [some for some in sets if not some & joined] + [joined]
    grouped = set().union(*groups)
    return {
        rank: sorted(next(some for some in sets if rank in some)) if rank in grouped else [] for rank in range(WORLD)
    }


CHAIN = [{i, i + 1} for i in range(7)]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sets(st.integers(0, WORLD - 1), min_size=1), max_size=6))
@example(CHAIN)
@example([*CHAIN, {0, 7}])
@example([{0, 1}, {2, 3}, {4, 5}, {6, 7}, {0, 2}, {1, 3}, {4, 6}, {5, 7}])  # pipeline stages
@example([{0, 1, 2}, {0, 1, 2}, {2, 3}])
def test_ranks_learn_whom_they_are_connected_with(groups):
    ranks = Ranks(groups)
    with mock.patch.multiple(groups_module, dist=ranks, Ranks=ranks.of_group):
        assert ranks.connected() == components(groups)


@pytest.mark.extended
def test_256_ranks_learn_it_in_few_rounds(monkeypatch):
    """Connect rows and columns of a mesh, and the stages of a pipeline with one another."""
    monkeypatch.setattr(sys.modules[__name__], "WORLD", 256)
    mesh = torch.arange(256).view(4, 8, 8)
    groups = [set(group.tolist()) for dim in range(3) for group in mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim])]
    ranks = Ranks(groups)
    with mock.patch.multiple(groups_module, dist=ranks, Ranks=ranks.of_group):
        assert ranks.connected() == components(groups)
    assert max(ranks.rounds.values()) <= 5  # one for each axis, one to learn that all know, and one more


@pytest.mark.parametrize("count", [0, 1, 61, 62, 63, 130])
def test_bits_are_packed_and_unpacked(count):
    bits = [bool(bit) for bit in torch.randint(2, (count,)).tolist()]
    packed = ranks_module.pack_bits(bits)
    assert ranks_module.unpack_bits(packed, count) == bits
    assert all(0 <= number < 2**62 for number in packed)


@contextlib.contextmanager
def naming(scheme):
    """Have torch name groups as before 2.14 (`joined`), since then (`asked`), or in an `other` way."""
    c10d = dist.distributed_c10d

    def hashed(ranks):
        world = c10d._world
        return f"{list(ranks)} {world.group_count if scheme == 'asked' else len(world.pg_names)}"

    def name_of(ranks, use_hashed_name):
        hashes = hashed if scheme == "other" else c10d._hash_ranks_to_str
        name = hashes(ranks) if use_hashed_name else str(c10d._world.group_count)
        c10d._world.group_count += scheme == "asked" or not use_hashed_name
        return name

    with mock.patch.multiple(c10d, _hash_ranks_to_str=hashed, _process_group_name=name_of):
        yield


def pipeline_under(rank, scheme, meshed=True):
    """Return what `pipeline` returns, or its error, after which all ranks create groups with one another."""
    with naming(scheme), mock.patch.multiple(groups_module, _groups={}, _roots={}):
        try:
            return pipeline(rank, meshed)
        except RuntimeError as error:
            return str(error)
        finally:
            dist.barrier(dist.new_group())


def pipeline(rank, meshed, steps=2):
    """Step a stage with data and tensor parallelism beside stages of one rank, and each stage in a single process.

    Args:
        rank: the rank of this process.
        meshed: whether all four ranks of the first stage store a part of one matrix.
        steps: number of steps.
    """
    others = range(4, dist.get_world_size())
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    dist.new_group([0, *others])  # tied embeddings: some ranks are in more groups than others
    shapes = [(7, 6), (9, 5), (6, 10), (4,)] if rank < 4 else [(5, 3), (7, 2)]

    def put(tensor, i):
        if rank >= 4 or i in (1, 3) or (i == 2 and not meshed):
            return tensor.clone()
        return stored(tensor, *((mesh["tp"], [Shard(0)]) if i == 0 else (mesh, [Shard(0), Shard(1)])))

    results = []
    for single in (False, True):
        place = (lambda tensor, i: tensor.clone()) if single else put
        params = [nn.Parameter(place(w, i)) for i, w in enumerate(make(shapes, 0))]
        groups = [{"params": [p for p in params if p.ndim == 2]}]
        groups += [{"params": [p for p in params if p.ndim == 1], "use_muon": False}]
        shared = mesh["dp"].get_group() if rank < 4 and not single else None
        optimizer = Muon(groups, ns_dtype="fp32", replicate_group=shared)
        for step in range(steps):
            for i, (param, grad) in enumerate(zip(params, make(shapes, step + 1), strict=True)):
                param.grad = place(grad, i)
            with Counted() as counted:
                optimizer.step()
        if not single:
            words = counted.words
        results.append(whole_state(params, optimizer))
    return results, words


@pytest.fixture(scope="module")
def five():
    pool = Pool(5, timeout=60, forks=True)
    yield pool
    pool.close(kill=True)


@pytest.mark.promise("pipeline")
@pytest.mark.first_tier("None-True")
@pytest.mark.parametrize(("scheme", "meshed"), [(None, False), (None, True), ("joined", True), ("asked", True)])
def test_stages_of_a_pipeline_step_by_themselves(five, scheme, meshed):
    """Overlap data and tensor parallel groups in one stage; the other stage has other parameters and sends nothing.

    However torch names groups.
    """
    results = five.run(pipeline_under, scheme=scheme) if scheme else five.run(pipeline, meshed=meshed)
    for rank, ((mine, single), words) in enumerate(results):
        assert words == (rank < 4)
        assert all(map(torch.equal, itertools.chain(*mine), itertools.chain(*single)))


def made_again(rank):
    """Make and destroy groups of this rank, and return how many groups are remembered."""
    with mock.patch.multiple(groups_module, _made=[], _roots={}):
        for number in range(5):
            made = [groups_module.new_group([rank], f"{rank} {number}"), groups_module.make_group([rank])]
            with mock.patch.object(groups_module, "connected", return_value=[rank]):
                groups_module.root_group(made[:1])
            for group in made:
                dist.destroy_process_group(group)
        return len(groups_module._made), len(groups_module._roots)


def test_groups_that_were_destroyed_are_forgotten(pools):
    assert pools[2].run(made_again) == [(1, 1)] * 2


def test_a_torch_that_names_groups_in_another_way_is_refused(five):
    *stage, (other, _) = five.run(pipeline_under, scheme="other")
    assert all(f"torch {torch.__version__} has no " in error and "[torch-changed]" in error for error in stage)
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
    group = SimpleNamespace(_device_types=types)
    assert ranks_module.report_device(group, torch.device(home)) == torch.device(expected)


def own_experts(rank, use_muon):
    """Step an expert that no other rank holds; return counts of steps, and whether it is as if stepped alone."""
    mesh = init_device_mesh("cpu", (2,))
    shared = nn.Parameter(stored(torch.ones(6, 5), mesh, [Shard(0)]))
    expert, alone = (nn.Parameter(torch.full((4, 3), float(rank))) for _ in range(2))

    def over(own, *others):
        return Muon([*({"params": [p]} for p in others), {"params": [own], "use_muon": use_muon}], ns_dtype="fp32")

    optimizer, reference = over(expert, shared), over(alone)
    for number in range(3):
        shared.grad = torch.ones_like(shared)
        for param in (expert, alone):  # the expert of rank 1 saw no token in the first step
            param.grad = None if rank == 1 and number == 0 else torch.full((4, 3), 1.0 + number)
        optimizer.step()
        reference.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return [group["step"] for group in optimizer.param_groups], torch.equal(expert, alone)


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_ranks_own_parameters_are_stepped_when_it_has_gradients(pools, use_muon):
    assert pools[2].run(own_experts, use_muon=use_muon) == [([3, 3], True)] * 2


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_rank_prepares_its_step_without_the_others(pools, layout):
    results = pools[2].run(given_gradients_prepared_alone, layout=layout)
    assert_equal(results, given_gradients(0, "single", normalize="rows"))
