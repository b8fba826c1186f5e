"""Count the memory traffic of a step, in bytes a weight, for each dtype of weights and moments: printed as a table.

python benchmarks/step_traffic.py

`count.py` says what is counted: each call of an operator reads its inputs and writes its outputs once, and no cache is
assumed. The calls are those of the second step of one weight of 1024x2048, without Newton-Schulz. *CPU* is a step on
the CPU with all checks. *Accelerator* is one on the meta device, which takes an accelerator's path, computes nothing,
and does not check gradients, which reads them once more. *Least* is what every step has to move: read weights,
gradients and moments, write weights and moments.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
from count import counting
from torch import Tensor, nn

from hf_muon import Muon
from hf_muon.math.newton_schulz import Orthogonalizer

SHAPE = (1024, 2048)
WEIGHTS: dict[str, tuple[torch.dtype, str]] = {
    "fp32": (torch.float32, "auto"),
    "bf16 `nearest`": (torch.bfloat16, "nearest"),
    "bf16 `stochastic`": (torch.bfloat16, "stochastic"),
}
MOMENTS = ("fp32", "bf16", "int8")


def counted(use_muon: bool, weights: str, moments: str, device: str) -> tuple[float, float, int]:
    """Return the bytes that a step moves and has to move, each a weight, and its launches."""
    dtype, rounding = WEIGHTS[weights]
    weight = nn.Parameter(torch.randn(SHAPE, device=device).to(dtype))
    option = {"momentum_dtype" if use_muon else "adamw_state_dtype": moments}
    group = {"params": [weight], "use_muon": use_muon, "weight_rounding": rounding, **option}
    optimizer = Muon([group], weight_decay=0.1, ns_dtype="fp32", ns_steps=1)
    orthogonalize = Orthogonalizer.__call__

    def uncounted(self: Orthogonalizer, *args: Any, **kwargs: Any) -> Tensor:
        before = count.launches.copy(), count.traffic.copy()
        try:
            return orthogonalize(self, *args, **kwargs)
        finally:
            count.launches, count.traffic = before

    Orthogonalizer.__call__ = uncounted  # type: ignore[method-assign]
    try:
        for _ in range(2):
            weight.grad = torch.randn(SHAPE, device=device).to(dtype)
            with counting(device) as count:
                optimizer.step()
    finally:
        Orthogonalizer.__call__ = orthogonalize  # type: ignore[method-assign]
    state = sum(value.nbytes for key, value in optimizer.state[weight].items() if key != "step")
    least = 3 * weight.nbytes + 2 * state
    return count.traffic.total() / weight.numel(), least / weight.numel(), count.launches.total()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    logging.getLogger("hf_muon").setLevel(logging.ERROR)  # that rounding to nearest loses updates is no news here
    torch.set_num_threads(1)
    heads = ["least / CPU / accelerator (launches)", *(f"moments in {moments}" for moments in MOMENTS)]
    print(f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|", sep="\n")
    for use_muon in (False, True):
        for weights in WEIGHTS:
            cells = [f"{'Muon' if use_muon else 'AdamW half'}, {weights} weights"]
            for moments in MOMENTS:
                cpu, least, _ = counted(use_muon, weights, moments, "cpu")
                accelerator, _, launches = counted(use_muon, weights, moments, "meta")
                cells.append(f"{least:.0f} / {cpu:.0f} / {accelerator:.0f} ({launches})")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
