"""When a matrix's step is bit-identical whatever else the optimizer holds, and when it is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_muon import Muon
from tests.reference import moved

# So small that batched products round differently from single ones.
SHAPES = [(5, 25), (26, 5), (11, 23), (13, 23), (3, 5, 25)] * 4


def stepped(parts, nudge=False, steps=3, wrap=lambda step: step, **options):
    """Return the change of each matrix, with one optimizer for each of `parts`.

    With `nudge`, gradients differ by one unit in the last place.
    """
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    start = [param.detach().clone() for param in params]
    optimizers = [Muon(params[part], lr=0.1, ns_dtype="fp32", **options) for part in parts]
    calls = [wrap(optimizer.step) for optimizer in optimizers]
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
            if nudge:
                param.grad = torch.nextafter(param.grad, torch.full_like(param.grad, torch.inf))
        for call in calls:
            call()
    return [param.detach() - before for param, before in zip(params, start, strict=True)]


WHOLE = [slice(0, None)]
STAGES = [slice(0, 7), slice(7, 12), slice(12, None)]


def test_stages_of_a_model_are_within_rounding_of_the_whole():
    """Compare stages, which batch other matrices together; the control moves gradients by one ulp."""
    whole = stepped(WHOLE)
    control = moved(stepped(WHOLE, nudge=True), whole)
    assert moved(stepped(STAGES), whole) <= 10 * control


def test_matrices_that_are_computed_one_by_one_do_not_depend_on_what_else_is_there():
    whole, stages = (stepped(parts, max_batch_bytes=1) for parts in (WHOLE, STAGES))
    assert all(map(torch.equal, stages, whole))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_the_step():
    assert all(map(torch.equal, stepped(WHOLE, wrap=torch.compile), stepped(WHOLE)))
