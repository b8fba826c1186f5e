"""What a step counts and completes: each step of a param group once, whoever has gradients in it, and partitions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_muon import Muon
from hf_muon.optimizer.partitioned import attach_partitions, expect_partitions
from hf_muon.storage.partitions import Partition
from tests.optimizer.cases import bits, equal

SHAPES = [(8, 6), (6, 8), (4,), (8, 6), (5, 7), (3,)]  # of two stages


def ones(shapes=SHAPES):
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def optimizer_over(params):
    groups = [
        {"params": [param for param in params if param.ndim == 2]},
        {"params": [param for param in params if param.ndim == 1], "use_muon": False},
    ]
    return Muon([group for group in groups if group["params"]], lr=0.05, momentum_warmup=4, max_batch_bytes=1)


def counts(optimizer):
    return [group["step"] for group in optimizer.param_groups]


def trained(cuts, dtype, steps=6):
    """Return the weights after steps of an optimizer for each part of the parameters, without gradients at times."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizers = [optimizer_over([params[i] for i in part]) for part in cuts]
    for step in range(steps):
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(dtype)
            without = (step in (1, 3) and i < 2) or (step == 2 and i >= 3) or step == 4 != i + 1
            param.grad = None if without else grad
        for optimizer in optimizers:
            optimizer.step()
    return bits(params), {count for optimizer in optimizers for count in counts(optimizer)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_of_a_pipeline_are_as_one_process(dtype):
    """In the second step the first stage has a gradient for a vector alone, in the third the second stage has none."""
    expected = trained([range(6)], dtype)
    for cuts in ([range(3), range(3, 6)], [[0, 1], [2], range(3, 6)]):
        results = trained(cuts, dtype)
        assert equal(results[0], expected[0])
        assert results[1] == expected[1]


class OutOfMemory(TorchDispatchMode):
    """Raises when something writes to a tensor."""

    def __init__(self, tensor):
        super().__init__()
        self.storage = tensor.untyped_storage()._cdata

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if torch.is_tensor(leaf)]
        if func._schema.is_mutable and any(tensor.untyped_storage()._cdata == self.storage for tensor in tensors):
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return func(*args, **(kwargs or {}))


def test_a_step_that_fails_and_is_taken_again_counts_once():
    params = ones()
    optimizer = optimizer_over(params)
    optimizer.step()
    for failing in (params[2], params[0]):  # in the step of AdamW's group; then in that of Muon's, which comes first
        with pytest.raises(torch.OutOfMemoryError), OutOfMemory(failing):
            optimizer.step()
        assert counts(optimizer) == [2, 1]


def test_a_step_without_gradients_before_the_first_one_makes_nothing_and_does_not_count():
    params = ones()
    optimizer = optimizer_over(params)
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.state
    params[2].grad = torch.ones(4)
    optimizer.step()
    assert counts(optimizer) == [1, 1]
    assert {*optimizer.state} == {*params}
    # AdamW counts for each parameter.
    assert [float(optimizer.state[params[i]]["step"]) for i in (2, 5)] == [1, 0]


def test_a_state_without_gradients_of_a_group_goes_on_from_a_checkpoint():
    """Compare with an uninterrupted run: the group has counted, and has moments of zero."""
    results = []
    for resumes in (False, True):
        params = ones()
        optimizer = optimizer_over(params)
        for step, (i, param) in itertools.product(range(2), enumerate(params)):
            param.grad = torch.full_like(param, 0.1 * (i + 1)) if param.ndim == 1 or step else None
            if param is params[-1]:
                optimizer.step()
                if resumes:
                    other = optimizer_over(params)
                    other.load_state_dict(optimizer.state_dict())
                    optimizer = other
        results.append(bits(params))
    assert equal(*results)


# --- the protocol with a framework that replaces parameters with flat partitions, without a framework


def partition(**facts):
    return Partition(group=None, rank=0, slices=[], device=torch.device("cpu"), **facts)


@pytest.fixture
def optimizer():
    (matrix, vector) = ones([(4, 4), (4,)])
    matrix.grad = None
    return Muon([{"params": [matrix], "views": ["rows 2+2"]}, {"params": [vector], "use_muon": False}])


def test_until_partitions_are_attached_steps_create_state_only(optimizer):
    matrix, vector = (group["params"][0] for group in optimizer.param_groups)
    expect_partitions(optimizer, "Framework")
    assert optimizer.partitioned.views[matrix].text == "rows 2+2"
    vector.grad.zero_()
    optimizer.step()
    assert set(optimizer.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}
    assert counts(optimizer) == [0, 0]
    attach_partitions(optimizer, None)
    optimizer.step()
    assert counts(optimizer) == [1, 1]


def test_steps_groups_and_gradients_of_partitions(optimizer):
    own = optimizer.partitioned
    flats = ones([(4,)] * 3)
    assert own.completes_step([{"params": flats[:1]}])  # nothing is attached
    assert own.completes_group({"params": flats[:1]})
    own.clear_stale_gradients([{"params": flats}])
    stale = {"last": False, "without_gradient": lambda: [slice(1, 3)]}
    attach_partitions(optimizer, {flats[0]: partition(**stale), flats[1]: partition(), flats[2]: partition()})

    def complete(*positions):
        return [own.completes_step([{"params": [flats[k]]}]) for k in positions]

    assert complete(0, 1, 2, 0, 1, 2) == [False, False, True] * 2
    assert complete(0, 1, 0, 1, 2) == [False] * 4 + [True]  # the first two were refused on the way
    assert own.completes_step([{"params": flats}])
    assert [own.completes_group({"params": part}) for part in (flats[:1], flats[1:2], flats[:2], [])] == [
        *(False, True, False, False),
    ]
    own.clear_stale_gradients([{"params": flats}])
    assert [flat.grad.tolist() for flat in flats] == [[1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
