"""What a param group's `step` counts: each step that the optimizer takes, once, whoever has gradients in it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from hf_muon import Muon
from hf_muon.optimizer import prepared_steps

SHAPES = [(8, 6), (6, 8), (4,), (8, 6), (5, 7), (3,)]  # of two stages
OPTIONS = {"momentum_warmup": 4, "max_batch_bytes": 1}


def optimizer_over(params, **options):
    groups = [
        {"params": [param for param in params if param.ndim == 2]},
        {"params": [param for param in params if param.ndim == 1], "use_muon": False},
    ]
    return Muon([group for group in groups if group["params"]], lr=0.05, **OPTIONS, **options)


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
    steps_of = [group["step"] for optimizer in optimizers for group in optimizer.param_groups]
    return params, steps_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_of_a_pipeline_are_as_one_process(dtype):
    """In the second step the first stage has a gradient for a vector alone, in the third the second stage has none."""
    expected, (count, _) = trained([range(6)], dtype)
    for cuts in ([range(3), range(3, 6)], [[0, 1], [2], range(3, 6)]):
        results, counts = trained(cuts, dtype)
        assert counts == [count] * len(counts)
        assert all(map(torch.equal, results, expected))


def test_a_step_that_fails_and_is_taken_again_counts_once(monkeypatch):
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = optimizer_over(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    adamw_step = prepared_steps.adamw_step

    def fail(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(prepared_steps, "adamw_step", fail)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 1]
    monkeypatch.setattr(prepared_steps, "adamw_step", adamw_step)
    monkeypatch.setattr(prepared_steps.MuonStep, "take", fail)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 1]


def test_a_step_without_gradients_before_the_first_one_makes_nothing_and_does_not_count():
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = optimizer_over(params)
    optimizer.step()
    assert not optimizer.state
    params[2].grad = torch.ones(4)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    assert {*optimizer.state} == {*params}
    # AdamW counts for each parameter.
    assert [float(optimizer.state[params[i]]["step"]) for i in (2, 5)] == [1, 0]


def test_a_state_without_gradients_of_a_group_goes_on_from_a_checkpoint():
    """Compare with an uninterrupted run: the group has counted, and has moments of zero."""
    results = []
    for resumes in (False, True):
        params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        optimizer = optimizer_over(params)
        for step, i in itertools.product(range(2), range(6)):
            params[i].grad = torch.full(SHAPES[i], 0.1 * (i + 1)) if SHAPES[i][1:] == () or step else None
            if i == 5:
                optimizer.step()
                if resumes:
                    other = optimizer_over(params)
                    other.load_state_dict(optimizer.state_dict())
                    optimizer = other
        results.append(params)
    assert all(map(torch.equal, *results))
