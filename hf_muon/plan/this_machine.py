"""The CPU at hand, measured for some seconds: products of given shapes, elementwise kernels, the host's time a call."""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hf_muon.build import groups_of, muon_options
from hf_muon.config import MuonConfig
from hf_muon.math.precision import compute_dtype
from hf_muon.optimizer.muon import Muon
from hf_muon.plan.calls import Call, Operand, Product
from hf_muon.plan.recorded_step import record_step
from hf_muon.routing.route import route_parameters

_BUDGET = 4.0  # seconds for products
_SHORTEST = 0.02  # seconds of one measurement
_SIZES = tuple(2**k for k in range(14, 28, 2))  # bytes of three tensors: from a core's own cache to memory
_TINY = 8  # rows of matrices whose step takes as long as its calls


@dataclass(frozen=True)
class ThisMachine:
    """A CPU. Whatever it is asked to do, it does before it goes on: nothing overlaps.

    Attributes:
        name: for people.
        products: seconds of the products that were measured.
        traffic: bytes that kernels read and write, ascending, and the seconds of a byte in them.
        launch: seconds of host time for each call.
        peak: FLOP/s of the fastest product.
        auto: dtype that `ns_dtype: auto` is on it.
        utilization: share of `peak` that a forward and backward pass reach.
    """

    name: str
    products: Mapping[Product, float]
    traffic: Sequence[tuple[int, float]]
    launch: float
    peak: float
    auto: str
    utilization: float = 0.5

    @property
    def basis(self) -> str:
        """Where the rates come from, for people."""
        return (
            f"Rates are those that this CPU was measured to have (up to {self.peak / 1e9:.3g} GFLOP/s in products, "
            f"{self.launch * 1e6:.2g} us a call); one call follows the other."
        )

    def product_seconds(self, product: Product) -> float:
        """Return the seconds of a product: measured, or at the rate of the measured one that is nearest in size."""
        if product in self.products:
            return self.products[product]
        near = min(self.products, key=lambda own: (own.dtype != product.dtype, _distance(own, product)))
        return self.products[near] * product.flops / near.flops

    def traffic_seconds(self, nbytes: float) -> float:
        """Return the seconds in which an elementwise kernel reads and writes some bytes."""
        sizes = [size for size, _ in self.traffic]
        right = min(max(1, bisect.bisect(sizes, nbytes)), len(sizes) - 1)
        (low, slow), (high, fast) = self.traffic[right - 1], self.traffic[right]
        part = (math.log(max(nbytes, 1)) - math.log(low)) / (math.log(high) - math.log(low))
        return nbytes * (slow + (fast - slow) * min(1.0, max(0.0, part)))

    def call_seconds(self, call: Call) -> float:
        """Return the seconds of a call, without its launch."""
        return self.traffic_seconds(call.traffic) if call.product is None else self.product_seconds(call.product)


def _distance(one: Product, other: Product) -> float:
    return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(one.sizes, other.sizes, strict=True))


def measure_this_machine(calls: Sequence[Call]) -> ThisMachine:
    """Measure the CPU at hand, with the threads that torch has.

    Args:
        calls: of a step; the shapes of its products are measured, those first that take most.
    """
    counts = Counter(call.product for call in calls if call.product is not None)
    heaviest = sorted(counts, key=lambda product: -counts[product] * product.flops)
    products: dict[Product, float] = {}
    end = time.perf_counter() + _BUDGET
    for product in heaviest:
        if products and time.perf_counter() > end:
            break
        products[product] = _seconds(_multiplication(product))
    return ThisMachine(
        name="this CPU",
        products=products,
        traffic=[(size, _seconds(_addition(size)) / size) for size in _SIZES],
        launch=_seconds_of_a_call(),
        peak=max((product.flops / seconds for product, seconds in products.items()), default=1.0),
        auto="bf16" if compute_dtype("auto", "cpu") == torch.bfloat16 else "fp32",
    )


def _seconds(function: Callable[[], Any]) -> float:
    """Return the median seconds of a call; of one thread, its processor time, to which other programs do not add."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def several(times: int) -> float:
        start = now()
        for _ in range(times):
            function()
        return (now() - start) / times

    function()
    times = max(1, math.ceil(_SHORTEST / max(several(1), 1e-7)))
    return median(several(times) for _ in range(3))


def _filled(operand: Operand, dtype: torch.dtype) -> Tensor:
    numel = 1 + sum((size - 1) * stride for size, stride in zip(*operand, strict=True))
    return torch.full((numel,), 0.01, dtype=dtype).as_strided(*operand)


def _multiplication(product: Product) -> Callable[[], Any]:
    left, right, out, *added = (_filled(operand, product.dtype) for operand in product.operands)
    batched = left.ndim == 3
    if added:
        add = torch.baddbmm if batched else torch.addmm
        return lambda: add(added[0], left, right, beta=0.5, alpha=0.5, out=out)
    multiply = torch.bmm if batched else torch.mm
    return lambda: multiply(left, right, out=out)


def _addition(nbytes: int) -> Callable[[], Any]:
    a, b = (torch.ones(nbytes // 12) for _ in range(2))
    return lambda: a + b


def _seconds_of_a_call() -> float:
    """Return the host's seconds for a call of an operator: those of a step of tiny matrices, in which all are alike."""
    config = MuonConfig(ns_dtype="fp32", muon_patterns=[r"\.weight$"])
    model = nn.ModuleList(nn.Linear(_TINY, _TINY * (1 + k % 4)) for k in range(32))
    routes = route_parameters(model, config)
    optimizer = Muon(groups_of(routes, config), **muon_options(config))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    calls = record_step(routes, config, ns_dtype=torch.float32, device="cpu").calls
    return _seconds(optimizer.step) / len(calls)
