"""Random models with random gradients, in random settings of ZeRO; the ranks of the pool import this module.

The loss of a parameter is its product with the gradient that it is to get, the same on both ranks. The mean of two
equal gradients is exact in every order and dtype, so that results are bit-identical to a single process.
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from hf_muon.integrations.deepspeed.engine import initialize
from tests.deepspeed.cases import rank_of_environment  # first: it sets DeepSpeed up for the CPU
from tests.distributed.chaos import STEPS, Model

CELLS = ("0", "1", "1-cpu", "2", "2-cpu", "3", "3-cpu")


class ZeroModel(Model):
    """A model of one dtype and a momentum dtype that DeepSpeed supports, and settings of ZeRO."""

    def __init__(self, seed, cell):
        super().__init__(seed)
        rng = self.rng
        self.shapes = [shape or (1,) for shape in self.shapes]
        self.dtypes = [torch.bfloat16 if cell != "0" and rng.random() < 0.3 else torch.float32] * len(self.shapes)
        if self.options["momentum_dtype"] == "int8":  # refused under DeepSpeed
            self.options["momentum_dtype"] = "bf16"
        for step in range(STEPS):
            if all((step, i) in self.missing for i in range(len(self.shapes))):
                self.missing.discard((step, 0))
        self.stage, _, device = cell.partition("-")
        self.zero = {
            "stage": int(self.stage),
            "contiguous_gradients": rng.random() < 0.7,
            "overlap_comm": rng.random() < 0.5,
            "reduce_scatter": rng.random() < 0.5,
            "reduce_bucket_size": rng.choice([50, 500, 10**6]),
        }
        if device:
            self.zero["offload_optimizer"] = {"device": device}
        if self.stage in "12":
            self.zero["round_robin_gradients"] = rng.random() < 0.5
            self.zero["allgather_bucket_size"] = rng.choice([50, 10**6])
        if self.stage == "3":
            self.zero |= {
                "memory_efficient_linear": False,
                "sub_group_size": rng.choice([1, 100, 10**9]),
                "stage3_param_persistence_threshold": rng.choice([0, 50, 10**5]),
                "stage3_prefetch_bucket_size": rng.choice([0, 10**6]),
            }
            if self.zero["sub_group_size"] < 10**9:
                # ZeRO steps one sub-group after the other, so that matrices of one shape form other batches.
                self.bounds["max_batch_bytes"] = 1

    def __repr__(self):
        return f"{self.zero}, {super().__repr__()}"


class Weight(nn.Module):
    """A parameter whose gradient is the input."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, grad):
        return (self.weight * grad).sum()


class Net(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.parts = nn.ModuleList(Weight(weight) for weight in weights)

    def forward(self, grads):
        return torch.stack([part(grad) for part, grad in zip(self.parts, grads, strict=True) if grad is not None]).sum()


def set_rates(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 0.02 / (step + 1)


def alone(model):
    """Return master weights and states of one process, in which a missing gradient is zeros."""
    params = [nn.Parameter(tensor.float()) for tensor in model.tensors(0)]
    optimizer = model.optimizer(params)
    for step in range(STEPS):
        set_rates(optimizer, step)
        for i, (param, grad) in enumerate(zip(params, model.tensors(step + 1), strict=True)):
            param.grad = torch.zeros_like(param) if (step, i) in model.missing else grad.float()
        optimizer.step()
    return [{"weight": param.detach(), **optimizer.state[param]} for param in params]


def in_zero(model):
    """Take the same steps under ZeRO; return the engine and its optimizer."""
    rank_of_environment()
    net = Net(model.tensors(0))
    optimizer = model.optimizer([part.weight for part in net.parts])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": model.dtypes[0] is torch.bfloat16},
        "zero_optimization": model.zero,
    }
    engine, *_ = initialize(model=net, optimizer=optimizer, config=config)
    for step in range(STEPS):
        set_rates(optimizer, step)
        grads = model.tensors(step + 1)
        engine.backward(engine([None if (step, i) in model.missing else grad for i, grad in enumerate(grads)]))
        engine.step()
    return engine, optimizer


def differences_of(engine, optimizer, expected):
    """Yield the differences of weights, and of this rank's master weights and moments, from one process."""
    for i, part in enumerate(engine.module.parts):
        with deepspeed.zero.GatheredParameters([part.weight], enabled=hasattr(part.weight, "ds_id")):
            if not torch.equal(part.weight.detach(), expected[i]["weight"].to(part.weight.dtype)):
                yield f"weight of parameter {i}"
    for flat, partition in (optimizer.partitioned.partitions or {}).items():
        for slice_ in partition.slices:
            i = int(slice_.name.split(".")[1])
            first, last = slice_.bounds[partition.rank]
            stored = {"weight": flat.detach(), **optimizer.state[flat]}
            if stored.keys() != expected[i].keys():
                yield f"parameter {i} has {sorted(stored)} in place of {sorted(expected[i])}"
            for key in stored.keys() - {"step"}:
                if not torch.equal(
                    stored[key][slice_.elements(partition.rank)], expected[i][key].reshape(-1)[first:last]
                ):
                    yield f"{key} of parameter {i}, elements {first} to {last}"


def compare(rank, runs):
    """Return the differences from one process, for runs `(seed, cell)`.

    Each rank makes a share of the references, and both take part in each run.
    """
    models = [ZeroModel(seed, cell) for seed, cell in runs]
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, {k: alone(models[k]) for k in range(rank, len(runs), len(shares))})
    references = {k: one for share in shares for k, one in share.items()}
    differences = []
    for k, (seed, cell) in enumerate(runs):
        try:
            engine, optimizer = in_zero(models[k])
        except Exception as error:
            raise AssertionError(f"seed {seed}, ZeRO-{cell}: {models[k]}") from error
        for line in differences_of(engine, optimizer, references[k]):
            differences.append(f"seed {seed}, ZeRO-{cell}: {line}; {models[k]}")
        engine.destroy()
    return differences
