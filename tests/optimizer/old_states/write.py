"""Write the files of this folder: states of a Muon in each dtype of parameters and momentum, by the installed version.

The files were written by version 0.1.0 at commit 77bb339, the last one before the package had folders, with torch
2.13.0. They stay as they are. To add a version, write its files into a folder of its own: `python write.py FOLDER`.
"""

from __future__ import annotations

import gzip
import io
import itertools
import pickle
import sys
from pathlib import Path

import torch
from torch import nn

from hf_muon.optimizer import Muon

STEPS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = [
    f"{dtype} weights, {momentum_dtype} momentum"
    for dtype, momentum_dtype in itertools.product(DTYPES, ("fp32", "bf16", "int8"))
]


def build(kind):
    """Return an optimizer over a matrix of two blocks of int8 momentum, a stack of fused matrices and a bias."""
    dtype, momentum_dtype = kind.split()[0], kind.split()[2]
    generator = torch.Generator().manual_seed(0)
    shapes = {"up.weight": (2, 70), "experts.gate_up": (2, 4, 16), "up.bias": (2,)}
    params = {name: nn.Parameter(torch.randn(s, generator=generator).to(DTYPES[dtype])) for name, s in shapes.items()}
    matrices, rest = list(params.items())[:2], list(params.items())[2:]
    muon = {"params": matrices, "views": ["", "rows 2+2"], "momentum_dtype": momentum_dtype, "momentum": 0.9}
    optimizer = Muon([muon, {"params": rest, "use_muon": False, "adamw_betas": (0.9, 0.95)}], lr=0.02, ns_dtype="fp32")
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # leaves `initial_lr` in the groups
    return optimizer


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params_of(optimizer):
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def stepped(optimizer):
    """Return an optimizer that has taken `STEPS` steps."""
    for seed in range(STEPS):
        step(optimizer, seed)
    for param in params_of(optimizer):
        param.grad = None
    return optimizer


def trained(kind):
    return stepped(build(kind))


def trained_of_groups():
    """Return an optimizer over ready-made groups."""
    from hf_muon.ready_groups import MuonOfGroups

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 10), nn.Linear(10, 6))
    return stepped(MuonOfGroups(model.parameters(), lr=0.02, ns_dtype="fp32"))


def write(folder):
    """Write state dicts with weights, and whole optimizers in the manner of torch.save and of pickle."""
    optimizers = {kind: trained(kind) for kind in KINDS}
    states = {
        kind: {"weights": [param.detach() for param in params_of(optimizer)], "state_dict": optimizer.state_dict()}
        for kind, optimizer in optimizers.items()
    }
    for name, content in (("state_dicts.pt.gz", states), ("optimizers.pt.gz", optimizers)):
        file = io.BytesIO()
        torch.save(content, file)
        Path(folder, name).write_bytes(gzip.compress(file.getvalue(), mtime=0))
    Path(folder, "optimizers.pickle.gz").write_bytes(gzip.compress(pickle.dumps(optimizers), mtime=0))
    of_groups = pickle.dumps(trained_of_groups())
    Path(folder, "of_groups.pickle.gz").write_bytes(gzip.compress(of_groups, mtime=0))


if __name__ == "__main__":
    write(sys.argv[1])
