"""What a step asks of an accelerator, counted on the meta device, is what the committed table says.

tests/studies/test_rehearsal.py has the rest of the table, and what counting rests on.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from benchmarks import rehearsal
from benchmarks.rehearsal import ADVICE, EXPERTS, LORA, QWEN, SMALL, Case, differences, read_table
from hf_muon import build_optimizer
from hf_muon.math.adamw import uses_fused_adamw
from tests.support.accelerated import META, accelerated

TABLE = read_table()
# One of each kind.
FIRST = [
    Case(),
    Case(momentum="int8"),
    Case(weights="fp32"),
    Case(weights="fp32", momentum="bf16", adamw="bf16"),
    Case(ns_dtype="fp16"),
    Case(EXPERTS),
    Case(LORA),
    Case(layout="DDP", ranks=2),
    Case(layout="FSDP2", ranks=8),
    Case(layout="ZeRO-1 or 2", ranks=8, weights="fp32"),
    Case(layout="ZeRO-3", ranks=8, weights="fp32"),
    Case(SMALL, layout="FSDP2", ranks=8, offload="CPUOffloadPolicy"),
]


@pytest.mark.extended
@pytest.mark.second_tier("30B|LoRA|DDP|ZeRO-3|CPUOffload|int8")
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_the_table_is_what_a_step_takes(case):
    if lines := differences(case, rehearsal.rehearse(case), TABLE.get(case)):
        pytest.fail("\n".join([*lines, ADVICE]), pytrace=False)


def test_launches_waits_and_traffic_are_within_their_aims():
    dense, experts, gram = TABLE[Case(QWEN)], TABLE[Case(EXPERTS)], TABLE[Case(QWEN, ns_dtype="fp16")]
    assert dense.launches <= 335
    assert gram.launches <= 330
    assert experts.launches <= 750
    assert dense.traffic <= 65
    assert gram.traffic <= 50
    assert all(figures.waits == 1 for case, figures in TABLE.items() if case.ranks == 1 and not case.offload)
    assert all(figures.waits <= 5 for case, figures in TABLE.items() if case.offload)  # whatever the number of matrices


# --- the branches of accelerators


def test_the_meta_device_takes_the_branches_of_cuda():
    cuda = torch.device("cuda")
    for device in (META, cuda):
        param = SimpleNamespace(device=device, dtype=torch.float32, shape=(4,), is_floating_point=lambda: True)
        assert uses_fused_adamw([param])


def test_a_step_with_values_reads_the_device_once(monkeypatch):
    """Take a step by the paths of accelerators on a CPU, where reads that are no operators are seen, too."""
    params = [nn.Parameter(torch.randn(shape)) for shape in [(20, 30), (30, 20), (40,)]]
    optimizer = build_optimizer(nn.ParameterList(params), {"muon_patterns": ".", "adamw_patterns": "2"})
    reads = []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__"):
        own = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, own=own, name=name: reads.append((name, self.ndim)) or own(self))
    with accelerated():
        for _ in range(2):
            for param in params:
                param.grad = torch.randn_like(param)
            reads.clear()
            optimizer.step()
    # AdamW's step counter is on the host.
    assert [name for name, _ in reads if name != "__float__"] == ["__bool__"]
