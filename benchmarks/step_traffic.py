"""Count the memory traffic of a step, in bytes a weight, for each dtype of weights and moments: printed as a table.

python benchmarks/step_traffic.py

Each call of an aten operation reads its input tensors and writes its outputs once; views, and what an operation
overwrites without reading it, are not read. No cache is assumed. The calls are those of the second step of one weight
of 1024x2048, without Newton-Schulz. *CPU* is a step on the CPU with all checks. *Accelerator* is one on the meta device
with an accelerator's chunks and its fused AdamW kernel; it computes nothing, and does not check gradients, which reads
them once more. *Least* is what every step has to move: read weights, gradients and moments, write weights and moments.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_muon import Muon
from hf_muon.math import adamw
from hf_muon.math.newton_schulz import Orthogonalizer
from hf_muon.optimizer import state as state_of

SHAPE = (1024, 2048)
WEIGHTS: dict[str, tuple[torch.dtype, str]] = {
    "fp32": (torch.float32, "auto"),
    "bf16 `nearest`": (torch.bfloat16, "nearest"),
    "bf16 `stochastic`": (torch.bfloat16, "stochastic"),
}
MOMENTS = ("fp32", "bf16", "int8")
OVERWRITES = {"copy_", "fill_", "zero_"}


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, and their calls, without views.

    Attributes:
        nbytes: read and written.
        calls: of operations that read or write.
        is_on: whether to count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.calls = 0
        self.is_on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.is_on:
            nbytes = _traffic(func, (args, kwargs), out)
            self.nbytes += nbytes
            self.calls += nbytes > 0
        return out


def _traffic(func: Any, arguments: Any, out: Any) -> int:
    schema = zip(arguments[0], func._schema.arguments, strict=False)
    # The fused AdamW kernel writes gradients only where it divides them by the scale of a GradScaler.
    written = [a for a, of in schema if of.alias_info and of.alias_info.is_write and of.name != "grads"]
    inputs, outputs = _tensors(arguments), _tensors(out)
    if not written and {_storage(t) for t in outputs} & {_storage(t) for t in inputs}:
        return 0  # a view
    name = func.__name__.partition(".")[0]
    if name.startswith(("empty", "new_empty")):
        return 0
    name = name.removeprefix("_foreach_")
    read = inputs[len(_tensors(written)) :] if name in OVERWRITES else inputs
    return _nbytes(read) + _nbytes(_tensors(written) or outputs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def fused_on_meta(params: Sequence[Tensor]) -> bool:
    """Return whether parameters are to be stepped by a fused kernel."""
    return all(param.device.type == "meta" for param in params)


def counted(use_muon: bool, weights: str, moments: str, device: str) -> tuple[float, float, int]:
    """Return the bytes that a step moves and has to move, each a weight, and its calls."""
    dtype, rounding = WEIGHTS[weights]
    weight = nn.Parameter(torch.randn(SHAPE, device=device).to(dtype))
    option = {"momentum_dtype" if use_muon else "adamw_state_dtype": moments}
    group = {"params": [weight], "use_muon": use_muon, "weight_rounding": rounding, **option}
    optimizer = Muon([group], weight_decay=0.1, ns_dtype="fp32", ns_steps=1)
    traffic, orthogonalize = Traffic(), Orthogonalizer.__call__

    def uncounted(self: Orthogonalizer, matrices: Tensor) -> Tensor:
        traffic.is_on = False
        try:
            return orthogonalize(self, matrices)
        finally:
            traffic.is_on = True

    Orthogonalizer.__call__ = uncounted  # type: ignore[method-assign]
    try:
        for _ in range(2):
            weight.grad = torch.randn(SHAPE, device=device).to(dtype)
            traffic.nbytes = traffic.calls = 0
            with traffic:
                optimizer.step()
    finally:
        Orthogonalizer.__call__ = orthogonalize  # type: ignore[method-assign]
    state = _nbytes([value for key, value in optimizer.state[weight].items() if key != "step"])
    return traffic.nbytes / weight.numel(), (3 * _nbytes([weight]) + 2 * state) / weight.numel(), traffic.calls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    adamw.uses_fused_adamw = state_of.uses_fused_adamw = fused_on_meta
    logging.getLogger("hf_muon").setLevel(logging.ERROR)  # that rounding to nearest loses updates is no news here
    torch.set_num_threads(1)
    heads = ["least / CPU / accelerator (calls)", *(f"moments in {moments}" for moments in MOMENTS)]
    print(f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|", sep="\n")
    for use_muon in (False, True):
        for weights in WEIGHTS:
            cells = [f"{'Muon' if use_muon else 'AdamW half'}, {weights} weights"]
            for moments in MOMENTS:
                cpu, least, _ = counted(use_muon, weights, moments, "cpu")
                accelerator, _, calls = counted(use_muon, weights, moments, "meta")
                cells.append(f"{least:.0f} / {cpu:.0f} / {accelerator:.0f} ({calls})")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
