"""The orthogonalization functions of other packages, as they are installed or checked out.

Some name bf16 or fp16 in their code. On hardware without it that name refers to another dtype while they run, so that
all functions multiply in one dtype.
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
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measure import commit
from hf_muon import orthogonalize
from hf_muon.math.coefficients import PRESETS, Triple, resolve

STEPS = 5
_YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
TORCH, OURS, OURS_SAME = "torch.optim.Muon", "hf_muon", "hf_muon, original"


@dataclass(frozen=True)
class Side:
    """One way to orthogonalize.

    Attributes:
        run: returns the directions of matrices ``(B, m, n)``, without writing to them.
        coefficients: of its steps.
        version: of the package or the checkout.
        preset: one of our presets; empty for another package.
    """

    run: Callable[[Tensor], Tensor]
    coefficients: tuple[Triple, ...]
    version: str
    preset: str = ""

    @functools.cached_property
    def band(self) -> tuple[float, float]:
        """The range of singular values: declared for our presets, else the image of ``[1e-3, 1]`` in float64."""
        if self.preset:
            return PRESETS[self.preset].singular_range
        values = torch.logspace(-3, 0, 200_001, dtype=torch.float64)
        for a, b, c in self.coefficients:
            values = values * (a + values**2 * (b + c * values**2))
        return float(values.min()), float(values.max())


class _Torch:
    """The module torch, in which `bfloat16` and `float16` are another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.bfloat16 = self.float16 = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def bfloat16_is(dtype: torch.dtype) -> Iterator[None]:
    """Make ``tensor.bfloat16()`` return a copy in this dtype within the context."""
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
    """Return a function of ``(B, m, n)`` from one of ``(m, n)`` that calls ``.bfloat16()``."""

    def run(matrices: Tensor) -> Tensor:
        with bfloat16_is(dtype):
            directions = [function(matrix) for matrix in matrices]
        return torch.stack(directions) if len(directions) > 1 else directions[0].unsqueeze(0)

    return run


def _torch(dtype: torch.dtype) -> Side:
    module = importlib.import_module("torch.optim._muon")
    ((a, b, c),) = PRESETS["original"].steps

    def run(matrix: Tensor) -> Tensor:
        with mock.patch.object(module, "torch", _Torch(dtype)):  # torch 2.15 writes `to(dtype=torch.bfloat16)`
            return module._zeropower_via_newtonschulz(matrix, (a, b, c), STEPS, 1e-7)  # type: ignore[no-any-return]

    return Side(one_by_one(run, dtype), resolve("original", STEPS), torch.__version__)


def llamafactory_muon() -> ModuleType:
    """Import LLaMA-Factory's file without its package, which imports much more.

    Raises:
        ImportError: LLaMA-Factory is not installed.
    """
    package = importlib.util.find_spec("llamafactory")
    if package is None or not package.submodule_search_locations:
        raise ImportError("llamafactory is not installed")
    path = Path(package.submodule_search_locations[0]) / "third_party" / "muon" / "muon.py"
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
    if device == "cpu":  # DeepSpeed reports half precision on every CPU
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
    version = commit(checkout) if checkout else importlib.metadata.version("dion")
    return Side(run, _YOU, version)


def _gram_newton_schulz(device: str, dtype: torch.dtype) -> Side:
    package = importlib.import_module("gram_newton_schulz")
    if device == "cpu":
        importlib.import_module("gram_newton_schulz.gram_newton_schulz").torch = _Torch(dtype)
        run = package.GramNewtonSchulz(ns_use_kernels=False, compile_kwargs=None)
    else:
        # Without CUDA graphs, whose results the next call would overwrite.
        run = package.GramNewtonSchulz(compile_kwargs={"fullgraph": True})
    return Side(run, tuple(map(tuple, package.POLAR_EXPRESS_COEFFICIENTS)), package.__version__)


def _pytorch_optimizer(dtype: torch.dtype) -> Side:
    module = importlib.import_module("pytorch_optimizer.optimizer.utils.matrix")
    run = functools.partial(module.zero_power_via_newton_schulz_5, num_steps=STEPS, dtype=dtype)
    return Side(run, resolve("original", STEPS), importlib.metadata.version("pytorch_optimizer"))


def _ours(preset: str, version: str) -> Side:
    def run(matrices: Tensor) -> Tensor:
        return orthogonalize(matrices, ns_coefficients=preset, ns_steps=STEPS)

    return Side(run, resolve(preset, STEPS), version, preset)


def sides(
    device: str, dtype: torch.dtype, dion: str | None = None, only: Collection[str] = ()
) -> tuple[dict[str, Side], dict[str, str]]:
    """Return the functions that run here by name, and the reasons why the others do not.

    Args:
        device: ``cpu`` or ``cuda``.
        dtype: of our products, and on a CPU of all products. On CUDA the others keep their own.
        dion: a checkout of microsoft/dion if it is not installed.
        only: names to return; empty for all.
    """
    version = commit()
    available = {OURS: _ours("polar_express", version), OURS_SAME: _ours("original", version)}
    missing = {}
    # The code of torch and LLaMA-Factory says bf16, which every measured GPU has.
    half = dtype if device == "cpu" else torch.bfloat16
    makers: dict[str, Callable[[], Side]] = {
        TORCH: lambda: _torch(half),
        "LLaMA-Factory": lambda: _llamafactory(half),
        "DeepSpeed, Gram form": lambda: _deepspeed(device, dtype),
        "pytorch_optimizer": lambda: _pytorch_optimizer(half),
        "dion": lambda: _dion(device, dtype, dion),
        "gram-newton-schulz": lambda: _gram_newton_schulz(device, dtype),
    }
    for name, make in makers.items():
        if only and name not in only:
            continue
        try:
            available[name] = make()
        except ImportError as error:
            missing[name] = f"not installed: {error}"
        except Exception as error:  # noqa: BLE001 another package's trouble is a line in the report
            missing[name] = f"does not run here: {type(error).__name__}: {error}"
    return {name: side for name, side in available.items() if not only or name in only}, missing
