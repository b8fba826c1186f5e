"""A step from moments that a run has left, compared with the functional optimizers of torch."""

from __future__ import annotations

import pytest
import torch

from hf_muon import Muon
from tests.optimizer.cases import REST, SHAPES, gradients, parameters, run
from tests.support.reference import relative_difference

try:
    from torch.optim.functional import adamw, muon
except ImportError:  # before torch 2.15 they are where only its classes call them
    from torch.optim._muon import muon
    from torch.optim.adamw import adamw

BEFORE = 3


def interrupted(optimizer, params, shapes, *names):
    """Take one step more than `BEFORE`, and return parameters and moments as they were before it, and its gradients."""
    *before, last = gradients(shapes, BEFORE + 1)
    run(optimizer, params, before)
    copies = [param.detach().clone() for param in params]
    moments = [[optimizer.state[param][name].clone() for param in params] for name in names]
    run(optimizer, params, [last])
    return copies, moments, [grad.clone() for grad in last]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_muon(nesterov, adjust_lr_fn):
    options = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "weight_decay": 0.1}
    ours = parameters()
    optimizer = Muon(ours, ns_coefficients="original", ns_dtype="bf16", **options)
    theirs, (buffers,), grads = interrupted(optimizer, ours, SHAPES, "momentum_buffer")
    start = [weight.clone() for weight in theirs]
    coefficients = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7}
    muon(theirs, grads, buffers, has_complex=False, **coefficients, **options)
    assert relative_difference(start, theirs, ours) < 2e-2
    for param, buffer in zip(ours, buffers, strict=True):
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], buffer, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw(weight_decay):
    options = {"lr": 1e-2, "weight_decay": weight_decay}
    ours = parameters(REST)
    groups = [{"params": ours, "use_muon": False}]
    optimizer = Muon(groups, adamw_betas=(0.8, 0.95), adamw_eps=1e-6, **options)
    theirs, moments, grads = interrupted(optimizer, ours, REST, "exp_avg", "exp_avg_sq")
    steps = [torch.tensor(float(BEFORE)) for _ in ours]
    adamw(theirs, grads, *moments, [], steps, beta1=0.8, beta2=0.95, eps=1e-6, amsgrad=False, maximize=False, **options)
    for param, weight, *expected in zip(ours, theirs, *moments, strict=True):
        assert torch.equal(param, weight)
        for name, moment in zip(("exp_avg", "exp_avg_sq"), expected, strict=True):
            assert torch.equal(optimizer.state[param][name], moment)
