"""The ranks of a step decide together whether elementwise functions are compiled: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics import log
from hf_muon.math import compiler
from hf_muon.math.compiler import Readiness
from hf_muon.math.precision import compute_dtype
from hf_muon.optimizer.layout import StepLayout
from hf_muon.storage.tensors import local_of

Group = Mapping[str, Any]
State = Mapping[Tensor, Mapping[str, Any]]


def readiness(groups: Sequence[Group], layout: StepLayout, state: State) -> tuple[Readiness, str]:
    """Return whether this rank compiles functions for a step, and why not; see `compiler.readiness`.

    Args:
        groups: param groups.
        layout: of these groups.
        state: of their parameters; complete.
    """
    devices = dict.fromkeys([*layout.devices, *(device for work in layout.works for device in work.devices)])
    untried = compiler.untried(devices)
    dtypes = dict.fromkeys(_dtypes(groups, state)) if untried else ()
    return compiler.readiness({device: [*dtypes, *_of_products(groups, device)] for device in untried})


def decide(
    ranks: Sequence[Readiness],
    own: Readiness,
    reason: str,
    of_all_ranks: Callable[[Sequence[str]], list[str]],
    stop: Callable[[Sequence[str]], None],
) -> None:
    """Have all ranks compile functions if all can, else none.

    Args:
        ranks: what each rank has said.
        own: what this rank has said.
        reason: why functions cannot be compiled here.
        of_all_ranks: puts the texts of all ranks together.
        stop: raises them.

    Raises:
        RuntimeError: some ranks have compiled functions in an earlier step, and others do not.
    """
    if all(rank & 1 for rank in ranks):
        if compiler.decide(compiled=True) and log.is_rank_zero():
            log.logger().info("compiling elementwise functions: the first step takes longer")
        return
    if Readiness.COMPILED in ranks:
        how = f"elementwise functions are {'compiled' if own & 1 else 'not compiled'} in this process"
        why = f": {reason}" if reason else ""
        stop(of_all_ranks([f"{how}{why} (TORCH_COMPILE_DISABLE=1 compiles on no rank) [compiled-differently]"]))
    if Readiness.CANNOT in ranks:
        reasons = of_all_ranks([reason] if reason else [])
        if log.is_rank_zero() and not all(text.endswith("=1 is set") for text in reasons):  # where it is set on all
            log.logger().warning(
                "Elementwise functions are not compiled, which makes steps slower: %s [not-compiled]",
                log.first_few(reasons, 3, "; "),
            )
    compiler.decide(compiled=False)


def _dtypes(groups: Sequence[Group], state: State) -> list[torch.dtype]:
    """Return the dtypes of parameters, gradients and moments, and of what is computed from them."""
    params = [param for group in groups for param in group["params"]]
    grads = [param.grad for param in params if param.grad is not None]
    moments = [local_of(value) for param in params for value in state.get(param, {}).values() if torch.is_tensor(value)]
    return [torch.float32, *(tensor.dtype for tensor in (*params, *grads, *moments))]


def _of_products(groups: Sequence[Group], device: torch.device) -> list[torch.dtype]:
    return [compute_dtype(group["ns_dtype"], device.type, device.index) for group in groups if group["use_muon"]]
