"""DeepSpeed on a GPU: fp16 with loss scaling, and offload from a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import json, sys
import torch
from torch import nn
from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed import initialize

stage, offload, options = json.loads(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
config = {
    "train_micro_batch_size_per_gpu": 8,
    "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
    "zero_optimization": zero,
}
optimizer = build_optimizer(model, lr=1e-2, ns_dtype="fp32", **options)
engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
data = torch.randn(8, 32, device="cuda", dtype=torch.float16)


def step(factor=1.0):
    engine.backward((engine(data).float() ** 2).mean() * factor)
    engine.step()


def tensors():
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone().cpu() for tensor in (*optimizer.partitioned.partitions, *moments)]


step()
before, steps, scale = tensors(), [g["step"] for g in optimizer.param_groups], engine.optimizer.loss_scale
step(torch.inf)
assert engine.skipped_steps == 1 and engine.optimizer.loss_scale < scale
assert all(torch.equal(one, other) for one, other in zip(tensors(), before, strict=True))
assert [g["step"] for g in optimizer.param_groups] == steps
step()
assert not torch.equal(tensors()[0], before[0])
torch.save(tensors(), sys.argv[2])
"""


def run(folder, stage, offload=False, **options):
    import torch

    from tests.e2e.harness import free_port

    path = folder / f"{stage}-{offload}.pt"
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environment = {**os.environ, **alone, "DS_ACCELERATOR": "cuda"}
    command = [sys.executable, "-c", SCRIPT, json.dumps([stage, offload, options]), str(path)]
    subprocess.run(command, env=environment, check=True, timeout=600)
    return torch.load(path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_fp16_skips_leaves_everything_as_it_was(stage, tmp_path):
    run(tmp_path, stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_offload_gives_the_same_wherever_it_is_computed(stage, tmp_path):
    import torch

    here = run(tmp_path, stage)
    for one, other in zip(here, run(tmp_path, stage, offload=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
