"""What the parts of `gpu.py` share: where they run, and how they write tables."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_muon.math.precision import compute_dtype

NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


@dataclass(frozen=True)
class Where:
    """Where to run.

    Attributes:
        kind: ``cuda``, or ``cpu`` for small sizes.
        dion: a checkout of microsoft/dion, or None.
        say: prints a line of progress.
    """

    kind: str
    dion: str | None
    say: Callable[[str], None]

    @property
    def on_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.on_cuda else torch.device("cpu")

    @property
    def ns_dtype(self) -> torch.dtype:
        """What `ns_dtype: auto` is here."""
        return compute_dtype("auto", self.kind, self.device.index)

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    @property
    def products(self) -> tuple[str, ...]:
        """Values of `ns_dtype` that this device multiplies fast enough to be tried."""
        return ("fp16", "bf16", "fp32") if self.on_cuda else ("fp32",)


def begin(where: Where) -> None:
    """Prepare the process of a part.

    Raises:
        SystemExit: there is no such device.
    """
    if where.on_cuda and not torch.cuda.is_available():
        raise SystemExit(
            f"--device cuda: torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees no CUDA device. "
            f"{driver() or 'There is no nvidia-smi'}. Install a torch that this driver supports into {sys.prefix}, or "
            "run benchmarks/gpu.py with another Python"
        )
    logging.getLogger("hf_muon").setLevel(logging.ERROR)
    torch.manual_seed(0)
    if not where.on_cuda:
        torch.set_num_threads(1)


def driver() -> str:
    """Return what nvidia-smi says of the cards; empty without it."""
    fields = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True)
        return "; ".join(asked.stdout.decode(errors="replace").split("\n")).strip("; ")
    return ""


def name_of(dtype: torch.dtype) -> str:
    """Return the short name of a dtype."""
    text = str(dtype).removeprefix("torch.")
    return NAMES.get(text, text)


def entry(text: str, length: int = 240) -> str:
    """Return a text as the entry of a table."""
    return " ".join(text.split())[:length].replace("|", "\\|")


def words_of(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor as integers, so that NaN equals NaN and zero differs from minus zero."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.itemsize])


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(bits(one), bits(other).to(one.device))


def digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's bits, computed on its device: a sum modulo 2**64, whose order does not matter."""
    flat = bits(tensor).view(-1)
    total = 0
    for start in range(0, len(flat), 2**24):
        part = flat[start : start + 2**24].long()
        factors = torch.arange(start, start + len(part), device=part.device).mul_(-7046029254386353131).bitwise_or_(1)
        total += int((part * factors).sum())
    return hashlib.blake2b(f"{total} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=6).hexdigest()


def judged(count: int, different: list[str], what: str = "cases") -> str:
    """Return the verdict on some comparisons."""
    if not different:
        return f"{count} {what}, all equal"
    return f"{len(different)} of {count} {what} differ: {entry('; '.join(different), 300)}"
