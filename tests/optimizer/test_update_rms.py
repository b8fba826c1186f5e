"""`update_rms`, the constant of `match_rms_adamw`."""

from __future__ import annotations

import math

import pytest
import torch

from hf_muon import Muon
from hf_muon.math.coefficients import resolve
from hf_muon.math.update import lr_scale
from tests.optimizer.cases import gradients, parameters, run
from tests.reference import ReferenceMuon, relative_difference


@pytest.mark.parametrize("update_rms", [0.05, 0.18, 0.4])
def test_the_rms_of_updates(update_rms):
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "update_rms": update_rms}
    start, ours = parameters(), parameters()
    reference = ReferenceMuon(start, steps=resolve("polar_express"), adjust_lr_fn="match_rms_adamw", **options)
    run(Muon(ours, ns_dtype="fp32", **options), ours, gradients())
    for grads in gradients():
        reference.step(grads)
    assert relative_difference(start, reference.params, ours) < 1e-5 * max(1, 0.2 / update_rms)


def test_the_default_of_update_rms_does_not_change_a_bit():
    assert all(lr_scale("match_rms_adamw", (m, n)) == 0.2 * math.sqrt(max(m, n)) for m in (1, 48, 999) for n in (7, 64))
    one, other = parameters(), parameters()
    run(Muon(one), one, gradients())
    run(Muon(other, update_rms=0.2), other, gradients())
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
