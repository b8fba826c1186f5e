"""The cases of DeepSpeed's tests of its own Muon (`tests/unit/ops/muon`), with ours, compared with one process.

We rewrote them from its tables of cases, with fp32 and bf16 in place of fp16, which DeepSpeed lacks on a CPU. Its model
of partial training is in `test_gradients`; steps that overflow and exact resumes are in `test_training`.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

from hf_muon import build_optimizer
from tests.deepspeed.gradient_cases import start_engine, weights_of
from tests.deepspeed.test_training import CPU

pytestmark = pytest.mark.usefixtures("quiet")

CONFIGS = list(itertools.product([0.01, 0.05], [32, 128], [5, 10]))  # learning rate, width, layers
BATCH = 8


class Simple(nn.Module):
    """Linear layers of one width, and a cross-entropy over them."""

    def __init__(self, width, layers):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x, labels):
        for linear in self.linears:
            x = linear(x)
        return nn.functional.cross_entropy(x, labels)


def _build(width, layers, dtype):
    torch.manual_seed(7)
    return Simple(width, layers).to(dtype)


def _optimizer(model, lr):
    return build_optimizer(model, lr=lr, ns_dtype="fp32", muon_patterns="weight")


def _batch(step, width, dtype):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, width, generator=generator).to(dtype), torch.randint(
        0, width, (BATCH,), generator=generator
    )


@functools.cache
def one_process(lr, width, layers, dtype=torch.float32, steps=5):
    model, masters = _build(width, layers, dtype), _build(width, layers, dtype).float()
    optimizer = _optimizer(masters, lr)
    for step in range(steps):
        model.zero_grad()
        model(*_batch(step, width, dtype)).backward()
        for param, master in zip(model.parameters(), masters.parameters(), strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        for param, master in zip(model.parameters(), masters.parameters(), strict=True):
            param.data.copy_(master.data)
    return weights_of(model)


def in_zero(rank, configs, stage, zero=None, dtype=torch.float32, steps=5, reload_at=None, folder=None, **config):
    """Train with each config and return the weights; at step `reload_at` the engine saves and loads a checkpoint."""
    results = []
    for lr, width, layers in configs:
        model = _build(width, layers, dtype)
        engine = start_engine(
            model,
            stage,
            zero,
            batch=BATCH,
            optimizer=functools.partial(_optimizer, lr=lr),
            bf16={"enabled": dtype is torch.bfloat16},
            **config,
        )
        for step in range(steps):
            if step == reload_at:
                engine.save_checkpoint(folder)
                engine.load_checkpoint(folder)
            engine.backward(engine(*_batch(step, width, dtype)))
            engine.step()
        results.append(weights_of(model, stage == 3))
        engine.destroy()
    return results


def assert_one_process(results, configs, dtype=torch.float32, steps=5):
    for config, weights in zip(configs, results, strict=True):
        start = dict(_build(*config[1:], dtype).named_parameters())
        for name, weight in one_process(*config, dtype, steps).items():
            assert torch.equal(weights[name], weight), (config, name)
            assert not torch.equal(weight, start[name])


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_its_configs(ranks, stage):
    for results in ranks.run(in_zero, configs=CONFIGS, stage=stage):
        assert_one_process(results, CONFIGS)


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_in_bf16_loaded_by_the_engine_that_wrote_it(ranks, stage, tmp_path):
    options = {"dtype": torch.bfloat16, "steps": 6}
    configs = [(0.02, 64, 3)]
    for results in ranks.run(in_zero, configs=configs, stage=stage, reload_at=3, folder=str(tmp_path), **options):
        assert_one_process(results, configs, **options)


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_as_not(ranks, stage):
    configs = [(0.01, 32, 5)]
    for results in ranks.run(in_zero, configs=configs, stage=stage, zero={**CPU, "reduce_scatter": False}):
        assert_one_process(results, configs)


def test_bf16_with_gradients_in_fp32(ranks):
    options = {"dtype": torch.bfloat16, "steps": 2}
    configs = [(1e-3, 64, 2)]
    config = {"zero": {"reduce_scatter": False}, "data_types": {"grad_accum_dtype": "fp32"}}
    for results in ranks.run(in_zero, configs=configs, stage=2, **config, **options):
        assert_one_process(results, configs, **options)
