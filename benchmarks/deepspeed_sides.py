"""Optimizers under DeepSpeed ZeRO, each over the same model: ours, DeepSpeed's own Muon, and AdamW."""

from __future__ import annotations

import datetime
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

# Set before the imports of torch and DeepSpeed; ranks inherit it. Ranks share cores, and DeepSpeed's torch.compile
# would take minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"}

import deepspeed
import deepspeed.ops
import meters
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.muon import original_muon
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import initialize

# Otherwise DeepSpeed compiles a C++ extension for collectives in shared memory.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.setLevel(logging.ERROR)
logging.getLogger("hf_muon").setLevel(logging.ERROR)

OURS, NATIVE, ADAMW = "hf_muon", "DeepSpeed's Muon", "AdamW"
NATIVE_STANDARD = "DeepSpeed's Muon, standard form"  # NATIVE uses the Gram form, its default, which has fewer products
LR, DECAY, MOMENTUM, BETAS, EPS, STEPS = 1e-3, 0.1, 0.95, (0.9, 0.95), 1e-8, 5
VOCABULARY = 64


class Mlp(nn.Module):
    """A language model without attention: an embedding, residual pairs of matrices, a norm and a head.

    Args:
        width: of the embedding.
        widths: inner width of each pair.
    """

    def __init__(self, width: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.up = nn.ModuleList(nn.Linear(width, inner, bias=False) for inner in widths)
        self.down = nn.ModuleList(nn.Linear(inner, width, bias=False) for inner in widths)
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each token of ``(batch, length)`` from the one before."""
        x = self.embed(tokens[:, :-1])
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def tokens(step: int, batch: int, length: int) -> Tensor:
    """Return tokens ``(batch, length + 1)`` of an artificial language, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (batch, 1), generator=generator)
    stride = torch.randint(1, 4, (batch, 1), generator=generator)
    return (start + stride * torch.arange(length + 1)) % VOCABULARY


def engine(side: str, model: nn.Module, stage: int, zero: Mapping[str, Any], clipping: float, batch: int) -> Any:
    """Return a DeepSpeed engine that steps the model.

    Args:
        side: `OURS`, `NATIVE`, `NATIVE_STANDARD` or `ADAMW`. The last is DeepSpeedCPUAdam where the optimizer is
            offloaded, and torch's AdamW elsewhere.
        stage: of ZeRO.
        zero: further keys of ``zero_optimization``.
        clipping: maximum norm of all gradients together; 0 for no clipping.
        batch: sequences per step and rank.
    """
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": clipping,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1_000_000,  # DeepSpeed allocates the largest bucket at once
            "allgather_bucket_size": 1_000_000,
            "reduce_scatter": stage < 3 or side not in (NATIVE, NATIVE_STANDARD),  # refused in ZeRO-3
            **({"stage3_param_persistence_threshold": 100, "memory_efficient_linear": False} if stage == 3 else {}),
            **zero,
        },
    }
    if side == OURS:
        options = {"lr": LR, "weight_decay": DECAY, "adamw_betas": BETAS, "adamw_eps": EPS, "ns_dtype": "fp32"}
        optimizer = build_optimizer(model, {**options, "ns_coefficients": "original", "momentum": MOMENTUM})
        deepspeed_engine: Any = initialize(model=model, optimizer=optimizer, config=config)[0]
        return deepspeed_engine
    shared = {"lr": LR, "weight_decay": DECAY, "betas": list(BETAS), "eps": EPS}
    if side in (NATIVE, NATIVE_STANDARD):
        # torch_adam: its other parameters use torch's AdamW, too.
        method = "gram" if side == NATIVE else "standard"
        params = {**shared, "momentum": MOMENTUM, "ns_method": method, "torch_adam": True}
        config["optimizer"] = {"type": "Muon", "params": params}
    else:
        config["optimizer"] = {"type": "AdamW", "params": {**shared, "torch_adam": "offload_optimizer" not in zero}}
    return deepspeed.initialize(model=model, config=config)[0]


def whole_weights(wrapped: Any) -> dict[str, Tensor]:
    """Return copies of the whole parameters of an engine, on all ranks."""
    weights = {}
    for name, param in wrapped.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            weights[name] = param.detach().clone()
    return weights


def is_muon(name: str) -> bool:
    """Return whether both sides step a parameter of `Mlp` with Muon."""
    return name.startswith(("up.", "down."))


def start(rank: int, ranks: int, folder: str) -> None:
    """Join the process group of a run."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=8),
    )
    deepspeed.init_distributed(dist_backend="gloo")
    # On a CPU DeepSpeed reports bf16 even if the hardware does not multiply it.
    original_muon.ns_compute_dtype = lambda ns_method="gram": torch.float32


def machine() -> dict[str, Any]:
    """Return the machine and the versions that the figures depend on."""
    return meters.machine(deepspeed=deepspeed.__version__)
