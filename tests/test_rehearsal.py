"""What a step asks of an accelerator, counted on the meta device, is what the committed table says.

tests/studies/test_rehearsal.py has the rest of the table, and what counting rests on.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import hf_muon
from benchmarks import rehearsal
from benchmarks.rehearsal import ADVICE, EXPERTS, LORA, QWEN, Case, differences, read_table
from hf_muon import build_optimizer
from hf_muon.math import elementwise, newton_schulz
from hf_muon.math.adamw import uses_fused_adamw
from hf_muon.storage import host, transport
from tests.support.accelerated import accelerated
from tests.support.accelerator import META, as_accelerator

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
    Case(offload="momentum_offload=cpu"),
]


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

DEVICE_TYPES = {"cuda", "xpu", "meta"}
# The files of a step that ask for a type of device, and how the rehearsal takes the branch of CUDA there.
ASKING = {
    "math/adamw.py": "uses_fused_adamw has the meta device",
    "math/compiler.py": "nothing is compiled for the meta device",
    "math/elementwise.py": "counting() stands for compiled functions",
    "math/newton_schulz.py": "_WITH_FP64 has the meta device; autocast launches nothing",
    "math/precision.py": "cases name the dtype of products",
    "storage/dtensor.py": "moments of meta DTensors are wrapped as those of the mesh's device",
    "storage/host.py": "as_accelerator() offloads from the meta device, and has streams",
    "storage/tensors.py": "as_accelerator() has values be read",
    "optimizer/reports.py": "a warning",
}


def test_each_place_that_asks_for_a_type_of_device_is_known():
    """If a file is new here, say how `tests/support/accelerator.py` takes its branch."""
    root = Path(hf_muon.__file__).parent
    asking = {
        str(path.relative_to(root))
        for folder in ("math", "storage", "distributed", "optimizer")
        for path in (root / folder).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in DEVICE_TYPES
    }
    assert asking == ASKING.keys()


def test_the_meta_device_takes_the_branches_of_cuda():
    cuda = torch.device("cuda")
    assert elementwise.is_accelerator(META)
    assert elementwise.is_accelerator(cuda)
    assert {"cuda", "meta"} <= newton_schulz._WITH_FP64
    for device in (META, cuda):
        param = SimpleNamespace(device=device, dtype=torch.float32, shape=(4,), is_floating_point=lambda: True)
        assert uses_fused_adamw([param])
    param = nn.Parameter(torch.empty(256, 512, device=META))
    with as_accelerator():
        assert host.moments_device(param, "cpu") == torch.device("cpu")
        assert transport.Transport(META, [])._module is not torch.cpu
    assert host.moments_device(param, "cpu") == META


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
