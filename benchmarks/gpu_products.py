"""Whether the kernel of `symmetric.py` belongs into the package: a part of `gpu.py`, which stops at the first "no".

In this order: is it right, and does a matrix have the same bits in any batch; at which rate does it multiply, compared
with cuBLAS; how long does Newton-Schulz take. The verdict says what follows from it.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.tables import table
from hf_muon.distributed.exchange import exchanges_of
from hf_muon.distributed.units import Matrix
from hf_muon.math.coefficients import resolve
from hf_muon.math.newton_schulz import newton_schulz
from hf_muon.storage.boxes import replicated
from hf_muon.storage.views import WHOLE

LEAST_RATE = 0.65
"""Of cuBLAS's FLOP rate; a slower kernel gains less than blocks of cuBLAS do."""
LEAST_GAIN = 1.15
"""By which Newton-Schulz must be faster."""
_LAYER = [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024), (1024, 3072)]
_TITLES = ("Right, and the same bits in any batch", "Rate", "Newton-Schulz of the batches of Qwen3-0.6B")


class AnswerIsNo(Exception):  # noqa: N818
    """An answer after which nothing else needs to be measured."""


def products_of(where: Any, body: Any) -> None:
    """Answer the questions in their order, and write the verdict."""
    tile = tile_on(where)
    if tile is None:
        body.verdict("There is no Triton here, or no tile is known for this card. Not run.")
        return
    trial = _Trial(where, tile)
    try:
        for title, ask in zip(_TITLES, (trial.is_right, trial.rates, trial.newton_schulz), strict=True):
            where.say(title)
            body[title] = [f"### {title}", "", *ask()]
        body.verdict(trial.verdict)
    except AnswerIsNo as no:
        body.verdict(f"No: {no}")
    except Exception as error:
        if where.on_cuda or type(error).__name__ != "InterpreterError":  # of Triton 3.6 with NumPy 2.5
            raise
        body.verdict(f"Triton's interpreter does not run here. Not run: {error}")


def tile_on(where: Any) -> Any:
    """Return the largest tile for a card, or a small one for the interpreter; None if there is none."""
    if importlib.util.find_spec("triton") is None:
        return None
    from benchmarks import symmetric

    if not where.on_cuda:
        return symmetric.Tile(16, 16, 4, 2)
    major, minor = torch.cuda.get_device_capability(where.device)
    return [None, *symmetric.TABLE.get(10 * major + minor, {}).values()][-1]


class _Trial:
    """The questions, for one tile of the kernel. On a CPU they are small, and only the answer to the first is one."""

    def __init__(self, where: Any, tile: Any) -> None:
        from benchmarks import symmetric

        self._kernels = symmetric
        self._where, self._tile = where, tile
        self._clock = measure.Clock(where.device)
        self._rounds = 7 if where.on_cuda else 1
        self._sizes = [(32, 1024), (8, 2048), (1, 4096), (2, 4096), (1, 8192)] if where.on_cuda else [(3, 32), (2, 40)]
        # Triton's interpreter cannot multiply bf16.
        self._dtypes = (torch.float16, torch.bfloat16) if where.on_cuda else (torch.float16,)
        self.verdict = ""

    def _random(self, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        generator = torch.Generator(self._where.device).manual_seed(0)
        x = torch.randn(*shape, device=self._where.device, generator=generator) / shape[-1] ** 0.5
        return x.to(dtype)

    def _seconds(self, **calls: Callable[[], Any]) -> dict[str, list[float]]:
        return measure.taking_turns(calls, self._clock, self._rounds)

    def _gram(self, x: Tensor) -> Tensor:
        return self._kernels.Products(self._tile)(x.new_empty(*x.shape[:2], x.shape[1]), x, x)

    def is_right(self) -> list[str]:
        """Compare with float64; ask whether bits depend on the batch, here and in torch's own products.

        Raises:
            AnswerIsNo: the kernel's do, or are wrong.
        """
        wrong, rows = [], []
        for size, dtype in itertools.product(dict.fromkeys(size for _, size in self._sizes), self._dtypes):
            x = self._random(28 if size <= 2048 else 2, size, size, dtype=dtype)
            own, theirs = self._gram(x), torch.bmm(x, x.mT)
            exact = x[0].double() @ x[0].double().mT
            off = ((own[0].double() - exact).abs().max() / exact.abs().max()).item()
            counts = [count for count in (1, 2, 8, 28) if count <= len(x)] * 2
            same = all(torch.equal(self._gram(x[:count]), own[:count]) for count in counts)
            theirs_same = all(torch.equal(torch.bmm(x[:count], x[:count].mT), theirs[:count]) for count in counts)
            name = f"X X^T of {size} in {dtype}"
            if not off < torch.finfo(dtype).eps or not torch.equal(own, own.mT):
                wrong.append(f"{name} is off by {off:.3g} of its largest element, or not symmetric")
            if not same:
                wrong.append(f"{name}: bits depend on the batch")
            words = ["=" if equal else "other" for equal in (same, theirs_same)]
            rows.append([str(size), str(dtype).removeprefix("torch."), f"{off:.1e}", *words])
        if wrong:
            raise AnswerIsNo("; ".join(wrong))
        return table(["size", "dtype", "error", "bits in batches of 1, 2, 8, 28: kernel", "torch's bmm"], rows)

    def _rate(self, x: Tensor) -> float:
        """Return the FLOP rate of the kernel's ``X X^T`` over that of cuBLAS, on the FLOPs that each computes."""
        own, theirs = (x.new_empty(*x.shape[:2], x.shape[1]) for _ in range(2))
        kernel, n = self._kernels.Products(self._tile), -(-x.shape[1] // self._tile.side)
        seconds = self._seconds(kernel=lambda: kernel(own, x, x), cublas=lambda: torch.bmm(x, x.mT, out=theirs))
        share = n * (n + 1) / 2 * self._tile.side**2 / x.shape[1] ** 2
        return share * statistics.median(measure.ratios(seconds["cublas"], seconds["kernel"]))

    def rates(self) -> list[str]:
        """Measure the rate of ``X X^T``.

        Raises:
            AnswerIsNo: it is below `LEAST_RATE` for all sizes.
        """
        rates = [self._rate(self._random(count, size, 3 * size)) for count, size in self._sizes]
        if max(rates) < LEAST_RATE and self._where.on_cuda:
            raise AnswerIsNo(f"rates of {min(rates):.2f} to {max(rates):.2f} of cuBLAS's; blocks of cuBLAS give more")
        rows = [[f"{count} x {size}", f"{rate:.2f}"] for (count, size), rate in zip(self._sizes, rates, strict=True)]
        return table(["X X^T, X of s x 3s in fp16", "of cuBLAS's FLOP rate"], rows)

    def newton_schulz(self) -> list[str]:
        """Measure Newton-Schulz with the kernel and without, and decide."""
        rows, gains, coefficients = [], [], resolve("polar_express", 5)
        shapes = dict.fromkeys(batches(small=not self._where.on_cuda))
        for dtype, shape in itertools.product(self._dtypes, shapes):
            x = self._random(*shape, dtype=torch.float32)

            def now(x: Tensor = x, dtype: torch.dtype = dtype) -> Tensor:
                return newton_schulz(x, coefficients, dtype)

            def own(now: Callable[[], Tensor] = now) -> Tensor:
                with self._kernels.multiplying(self._tile):
                    return now()

            seconds = self._seconds(now=now, own=own)
            gains.append(statistics.median(measure.ratios(seconds["now"], seconds["own"])))
            medians = [f"{1e3 * statistics.median(seconds[name]):.3g}" for name in ("now", "own")]
            hosts = [f"{self._host_ms(call):.2g}" for call in (now, own)]
            words = ["x".join(map(str, shape)), str(dtype).removeprefix("torch.")]
            rows.append([*words, *medians, f"{gains[-1]:.2f}", *hosts])
        mean = statistics.geometric_mean(gains)
        answer = "Yes" if mean >= LEAST_GAIN and min(gains) >= 1 else "No"
        self.verdict = (
            f"{answer}: Newton-Schulz is {mean:.2f} times as fast with the kernel, at least {min(gains):.2f} times. "
            f"It belongs into the package from {LEAST_GAIN} on, if no batch is slower."
        )
        head = ["batch", "products", "ms now", "ms, kernel", "times as fast", "host ms now", "host ms, kernel"]
        return table(head, rows)

    def _host_ms(self, call: Callable[[], Any]) -> float:
        """Return the milliseconds in which the host prepares a call."""
        begin = time.perf_counter()
        call()
        milliseconds = 1e3 * (time.perf_counter() - begin)
        if self._where.on_cuda:
            torch.cuda.synchronize()
        return milliseconds


def batches(*, small: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the shapes ``(B, m, n)`` that one process orthogonalizes in a step of Qwen3-0.6B, one after the other."""
    if small:
        yield 2, 24, 48
        return
    matrices = [
        Matrix(i, shape, replicated(shape, None).shards(WHOLE)[0], device=torch.device("meta"))
        for i, shape in enumerate(_LAYER * 28)
    ]
    (exchange,) = exchanges_of(matrices)
    yield from ((unit.count, *unit.shape) for unit in exchange.schedule.units)
