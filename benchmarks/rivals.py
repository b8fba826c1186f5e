"""Other packages' orthogonalizations, called as they are installed or checked out, on the same matrices.

Some name a half precision in their code. Where the hardware has none, that name is given another dtype while they run:
the functions stay theirs, and all sides multiply in one dtype.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import meters
import torch
from torch import Tensor

from hf_muon import orthogonalize
from hf_muon.math.coefficients import PRESETS, Triple, resolve

STEPS = 5
TORCH, OURS, OURS_SAME = "torch.optim.Muon", "hf_muon", "hf_muon, original"


@dataclass(frozen=True)
class Side:
    """One way to orthogonalize.

    Attributes:
        run: ``(B, m, n)`` to what it makes of it; nothing is written to.
        coefficients: of its steps, from which its band follows.
        version: of the package or the checkout.
        preset: of ours.
    """

    run: Callable[[Tensor], Tensor]
    coefficients: tuple[Triple, ...]
    version: str

    preset: str = ""

    @functools.cached_property
    def band(self) -> tuple[float, float]:
        """What a preset promises; of others, what their steps make of ``[1e-3, 1]`` in exact arithmetic."""
        if self.preset:
            return PRESETS[self.preset].singular_range
        values = torch.logspace(-3, 0, 200_001, dtype=torch.float64)
        for a, b, c in self.coefficients:
            values = values * (a + values**2 * (b + c * values**2))
        return float(values.min()), float(values.max())


class _Torch:
    """The module torch, in which names of half precisions mean another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.bfloat16 = self.float16 = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def bfloat16_is(dtype: torch.dtype) -> Iterator[None]:
    """``tensor.bfloat16()`` makes copies in this dtype."""
    if dtype is torch.bfloat16:
        yield
        return
    own = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self: self.to(dtype, copy=True)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = own  # type: ignore[method-assign]


def one_by_one(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function of ``(m, n)`` that calls ``.bfloat16()``, on a batch."""

    def run(matrices: Tensor) -> Tensor:
        with bfloat16_is(dtype):
            found = [function(matrix) for matrix in matrices]
        return torch.stack(found) if len(found) > 1 else found[0].unsqueeze(0)

    return run


def _torch(dtype: torch.dtype) -> Side:
    zeropower = importlib.import_module("torch.optim._muon")._zeropower_via_newtonschulz
    ((a, b, c),) = PRESETS["original"].steps

    def run(matrix: Tensor) -> Tensor:
        return zeropower(matrix, (a, b, c), STEPS, 1e-7)  # type: ignore[no-any-return]

    return Side(one_by_one(run, dtype), resolve("original", STEPS), torch.__version__)


def _keller_jordan(dtype: torch.dtype) -> Side:
    """The algorithm of https://kellerjordan.github.io/posts/muon/, as plainly as it can be said."""
    coefficients = resolve("original", STEPS)

    def run(matrices: Tensor) -> Tensor:
        tall = matrices.size(-2) > matrices.size(-1)
        x = matrices.to(dtype)
        x = x.mT if tall else x
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for a, b, c in coefficients:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.mT if tall else x

    return Side(run, coefficients, "written anew")


def llamafactory_muon() -> ModuleType:
    """LLaMA-Factory's file alone; its package imports what is not needed here.

    Raises:
        ImportError: it is not installed.
    """
    found = importlib.util.find_spec("llamafactory")
    if found is None or not found.submodule_search_locations:
        raise ImportError("llamafactory is not installed")
    path = Path(found.submodule_search_locations[0]) / "third_party" / "muon" / "muon.py"
    spec = importlib.util.spec_from_file_location("llamafactory_muon", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _llamafactory(dtype: torch.dtype) -> Side:
    zeropower = llamafactory_muon().zeropower_via_newtonschulz5
    run = one_by_one(lambda matrix: zeropower(matrix, STEPS), dtype)
    return Side(run, resolve("original", STEPS), importlib.metadata.version("llamafactory"))


def _deepspeed(device: str, dtype: torch.dtype) -> Side:
    if device == "cpu":
        os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"}
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    muon = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    if not hasattr(muon, "zeropower_via_gram_newtonschulz"):
        raise ImportError(f"deepspeed {deepspeed.__version__} has no Gram form; 0.19.8 has")
    if device == "cpu":  # where it says that it has half precision, whatever the hardware
        muon.ns_compute_dtype = lambda ns_method="gram": dtype
    run = functools.partial(muon.zeropower_via_gram_newtonschulz, steps=STEPS)
    return Side(run, resolve("original", STEPS), deepspeed.__version__)


def _dion(device: str, dtype: torch.dtype, checkout: str | None) -> Side:
    if checkout:
        sys.path.insert(0, checkout)
    try:
        module = importlib.import_module("dion.newton_schulz_triton")
    except ImportError as error:
        raise ImportError(f"{error}; name a checkout of microsoft/dion with --dion or HF_MUON_BENCH_DION") from error
    if device == "cpu":
        module.torch = _Torch(dtype)
        run = module.zeropower_via_newtonschulz5
    else:
        run = module.newton_schulz_triton
    version = meters.commit(checkout) if checkout else importlib.metadata.version("dion")
    return Side(run, resolve("you_jiacheng", STEPS), version)


def _gram_newton_schulz(device: str, dtype: torch.dtype) -> Side:
    package = importlib.import_module("gram_newton_schulz")
    if device == "cpu":
        importlib.import_module("gram_newton_schulz.gram_newton_schulz").torch = _Torch(dtype)
        made = package.GramNewtonSchulz(ns_use_kernels=False, compile_kwargs=None)
    else:
        # Graphs that the next call overwrites would hand out memory that is not the caller's.
        made = package.GramNewtonSchulz(compile_kwargs={"fullgraph": True})
    return Side(made, tuple(map(tuple, package.POLAR_EXPRESS_COEFFICIENTS)), package.__version__)


def _ours(preset: str, version: str) -> Side:
    def run(matrices: Tensor) -> Tensor:
        return orthogonalize(matrices, ns_coefficients=preset, ns_steps=STEPS)

    return Side(run, resolve(preset, STEPS), version, preset)


def sides(
    device: str, dtype: torch.dtype, dion: str | None = None, only: Collection[str] = ()
) -> tuple[dict[str, Side], dict[str, str]]:
    """The sides that run here by name, and why the others do not.

    Args:
        device: ``cpu`` or ``cuda``.
        dtype: of our products, which on a CPU is that of all sides. On CUDA the others keep their own.
        dion: a checkout of microsoft/dion, where it is not installed.
        only: names of sides; all without any.
    """
    version = meters.commit(str(Path(__file__).parent))
    found = {OURS: _ours("polar_express", version), OURS_SAME: _ours("original", version)}
    missing = {}
    # torch's, Keller Jordan's and LLaMA-Factory's are bf16 as written, which every GPU that is measured has.
    half = dtype if device == "cpu" else torch.bfloat16
    makers: dict[str, Callable[[], Side]] = {
        TORCH: lambda: _torch(half),
        "Keller Jordan": lambda: _keller_jordan(half),
        "LLaMA-Factory": lambda: _llamafactory(half),
        "DeepSpeed, Gram form": lambda: _deepspeed(device, dtype),
        "dion": lambda: _dion(device, dtype, dion),
        "gram-newton-schulz": lambda: _gram_newton_schulz(device, dtype),
    }
    for name, make in makers.items():
        if only and name not in only:
            continue
        try:
            found[name] = make()
        except ImportError as error:
            missing[name] = f"not installed: {error}"
        except Exception as error:  # noqa: BLE001 another package's trouble is a line in the report
            missing[name] = f"does not run here: {type(error).__name__}: {error}"
    return {name: side for name, side in found.items() if not only or name in only}, missing
