"""The rest of the table of what a step asks of an accelerator, and the counting behind it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import rehearsal
from benchmarks.rehearsal import ADVICE, CASES, differences
from hf_muon import Muon
from hf_muon.math import newton_schulz
from tests.support.accelerated import META
from tests.support.count import counting
from tests.test_rehearsal import FIRST, TABLE


@pytest.mark.extended
@pytest.mark.parametrize("case", [case for case in CASES if case not in FIRST], ids=str)
def test_the_rest_of_the_table_is_what_a_step_takes(case):
    if lines := differences(case, rehearsal.rehearse(case), TABLE.get(case)):
        pytest.fail("\n".join([*lines, ADVICE]), pytrace=False)


def test_what_is_copied_inside_is_what_torch_copies():
    """Operators that CPUs and CUDA share: what a profiler sees. What else is counted shows in each row of the table."""
    x = torch.randn(4, 16, 16)
    for call in (
        lambda t, out: torch.baddbmm(t, t, t, beta=0.5, out=out),
        lambda t, out: torch.baddbmm(t, t, t, beta=0, out=out),
        lambda t, out: torch.bmm(t, t, out=out),
        lambda t, out: torch.linalg.vector_norm(t, dim=(-2, -1), dtype=torch.float64),
        lambda t, out: torch.linalg.vector_norm(t, dim=(-2, -1)),
    ):
        with counting() as count:
            call(x.to("meta"), torch.empty_like(x, device="meta"))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call(x, torch.empty_like(x))
        copies = sum(event.name == "aten::copy_" for event in profile.events())
        assert copies == count.launches["copy inside"]


# Bytes a weight and launches of a step without Newton-Schulz, for moments in fp32, bf16 and int8: docs/bf16-weights.md.
TRAFFIC = {
    (False, "fp32"): [(28, 2), (20, 1), (16, 1)],
    (False, "nearest"): [(22, 1), (14, 1), (10, 1)],
    (False, "stochastic"): [(22, 1), (14, 1), (10, 1)],
    (True, "fp32"): [(28, 2), (24, 2), (22, 2)],
    (True, "nearest"): [(22, 2), (18, 2), (16, 2)],
    (True, "stochastic"): [(22, 2), (18, 2), (16, 2)],
}


@pytest.mark.parametrize(("use_muon", "weights"), TRAFFIC, ids=str)
def test_traffic_of_a_step_without_products(use_muon, weights, monkeypatch):
    """AdamW moves only what it has to: weights, gradients and moments read, weights and moments written."""
    dtype, rounding = (torch.float32, "auto") if weights == "fp32" else (torch.bfloat16, weights)
    orthogonalize = newton_schulz.newton_schulz

    def uncounted(*args, **kwargs):
        before = count.launches.copy(), count.traffic.copy()
        try:
            return orthogonalize(*args, **kwargs)
        finally:
            count.launches, count.traffic = before

    monkeypatch.setattr(newton_schulz, "newton_schulz", uncounted)
    found = []
    for moments in ("fp32", "bf16", "int8"):
        weight = nn.Parameter(torch.empty(1024, 2048, dtype=dtype, device=META))
        option = {"momentum_dtype" if use_muon else "adamw_state_dtype": moments}
        group = {"params": [weight], "use_muon": use_muon, "weight_rounding": rounding, **option}
        optimizer = Muon([group], weight_decay=0.1, ns_dtype="fp32", ns_steps=1)
        for _ in range(2):
            weight.grad = torch.empty_like(weight)
            with counting() as count:
                optimizer.step()
        traffic = count.traffic.total() / weight.numel()
        found.append((round(traffic), count.launches.total()))
        state = sum(value.nbytes for key, value in optimizer.state[weight].items() if key != "step")
        least = (3 * weight.nbytes + 2 * state) / weight.numel()
        assert traffic > least - 0.5 if use_muon else traffic == pytest.approx(least, abs=0.5)
    assert found == TRAFFIC[use_muon, weights]
