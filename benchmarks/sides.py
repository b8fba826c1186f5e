"""The sides of the comparison: ways to take a Muon step on several ranks, all with the same mathematics.

All sides average gradients with Nesterov momentum, take the same number of Newton-Schulz steps with the same
coefficients, scale by ``0.2 sqrt(max(out, in))``, and apply decoupled weight decay. If a side differs in one of these,
its weights differ from ours after a step.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import hf_muon.math.newton_schulz
from hf_muon import Muon
from hf_muon.math.coefficients import resolve
from hf_muon.math.update import lr_scale

LR, DECAY, MOMENTUM, STEPS = 0.02, 0.1, 0.95, 5
COEFFICIENTS = "original"  # the only preset that torch.optim.Muon supports, too

Orthogonalize = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """The ranks, the storage and the products of a comparison.

    Attributes:
        mesh: one-dimensional, over all ranks.
        sharded: whether parameters are DTensors, or plain and replicated.
        dtype: of the products.
        timed: wraps the function whose time counts as Newton-Schulz.
        dion: a checkout of microsoft/dion, or None.
    """

    mesh: Any
    sharded: bool
    dtype: torch.dtype
    timed: Callable[[Callable[..., Any]], Callable[..., Any]]
    dion: str | None = None

    @property
    def dtype_name(self) -> str:
        return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]

    def orthogonalize(self) -> Orthogonalize:
        """Return our Newton-Schulz for ``(m, n)`` or ``(B, m, n)``, timed; then sides differ in distribution alone."""
        coefficients = resolve(COEFFICIENTS, STEPS)

        def run(matrices: Tensor) -> Tensor:
            batch = matrices if matrices.ndim == 3 else matrices.unsqueeze(0)
            return hf_muon.math.newton_schulz.newton_schulz(batch, coefficients, self.dtype).view(matrices.shape)

        return run


def prepare(setting: Setting) -> None:
    """Time every call of our Newton-Schulz in this process."""
    hf_muon.math.newton_schulz.newton_schulz = setting.timed(hf_muon.math.newton_schulz.newton_schulz)


def ours(params: Sequence[nn.Parameter], setting: Setting, **options: Any) -> Callable[[], Any]:
    """Return the step of this package's optimizer."""
    group = None if setting.sharded else setting.mesh.get_group()
    return Muon(
        params,
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        ns_coefficients=COEFFICIENTS,
        ns_steps=STEPS,
        ns_dtype=setting.dtype_name,
        replicate_group=group,
        **options,
    ).step


def full_tensor(params: Sequence[nn.Parameter], setting: Setting, *, scatter: bool) -> Callable[[], Any]:
    """Return a step in which every rank gathers every update and orthogonalizes all of them.

    With `scatter`, rank 0 distributes the direction again, the default of `distribute_tensor` and the way of
    LLaMA-Factory; without it, each rank keeps its own part of the direction that it has computed.
    """
    orthogonalize = setting.orthogonalize()
    buffers = [torch.zeros_like(param) for param in params]

    def own_part(whole: Tensor, like: DTensor) -> DTensor:
        source = 0 if scatter else None
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=source)

    @torch.no_grad()
    def step() -> None:
        for param, buffer in zip(params, buffers, strict=True):
            buffer.mul_(MOMENTUM).add_(param.grad)
            update = param.grad.add(buffer, alpha=MOMENTUM)
            sharded = isinstance(update, DTensor)
            direction = orthogonalize(update.full_tensor() if sharded else update)
            param.mul_(1 - LR * DECAY)
            scale = LR * lr_scale("match_rms_adamw", param.shape)
            param.add_(own_part(direction, param) if sharded else direction, alpha=-scale)

    return step


def torch_muon(params: Sequence[nn.Parameter], setting: Setting) -> Callable[[], Any]:
    """Return the step of torch.optim.Muon, in which DTensor chooses what to gather.

    Its products are in bf16 on any hardware; for another dtype of the setting, the same formulas run in that dtype.
    """
    module = importlib.import_module("torch.optim._muon")

    def in_dtype(grad: Tensor, ns_coefficients: Any, ns_steps: int, eps: float) -> Tensor:
        a, b, c = ns_coefficients
        tall = grad.size(0) > grad.size(1)
        x = grad.to(setting.dtype, copy=True)
        x = x.T if tall else x
        x.div_(x.norm().clamp(min=eps))
        for _ in range(ns_steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x

    if not hasattr(module, "_untimed"):
        module._untimed = module._zeropower_via_newtonschulz
    own = module._untimed if setting.dtype is torch.bfloat16 else in_dtype
    module._zeropower_via_newtonschulz = setting.timed(own)
    return torch.optim.Muon(
        params, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, ns_steps=STEPS, adjust_lr_fn="match_rms_adamw"
    ).step


def dion(params: Sequence[nn.Parameter], setting: Setting) -> Callable[[], Any]:
    """Return the step of microsoft/dion's Muon, from a checkout, with our Newton-Schulz as its `newton_schulz_func`.

    It always sends bf16 in both directions. Our function returns the dtype of its input, as dion's own functions do.
    """
    if setting.dion not in sys.path:
        sys.path.insert(0, setting.dion)
    orthogonalize = setting.orthogonalize()

    def newton_schulz(matrices: Tensor, epsilon: Any = None) -> Tensor:
        return orthogonalize(matrices).to(matrices.dtype)

    return (
        importlib.import_module("dion.muon")
        .Muon(
            params,
            setting.mesh if setting.sharded else setting.mesh.get_group(),
            lr=LR,
            mu=MOMENTUM,
            weight_decay=DECAY,
            nesterov=True,
            adjust_lr="rms_norm",
            use_triton=False,
            newton_schulz_func=newton_schulz,
        )
        .step
    )


def sides(setting: Setting) -> dict[str, Callable[[Sequence[nn.Parameter], Setting], Callable[[], Any]]]:
    """Return all sides by name, ours first."""
    by_name: dict[str, Any] = {
        "hf_muon": ours,
        "hf_muon, bf16 wire": lambda params, setting: ours(params, setting, comm_dtype="bf16"),
        "full_tensor": lambda params, setting: full_tensor(params, setting, scatter=True),
    }
    if setting.sharded:
        by_name["full_tensor, no scatter"] = lambda params, setting: full_tensor(params, setting, scatter=False)
    by_name["torch.optim.Muon"] = torch_muon
    if setting.dion:
        by_name["dion"] = dion
    return by_name


def whole(param: Tensor) -> Tensor:
    """Return the whole value of a parameter, on all ranks."""
    value = param.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def stored(tensor: Tensor, setting: Setting) -> Tensor:
    """Return a tensor that all ranks have whole, stored as the setting stores parameters."""
    if not setting.sharded:
        return tensor.clone()
    from torch.distributed.tensor import Shard

    return distribute_tensor(tensor, setting.mesh, [Shard(0)], src_data_rank=None)


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
