"""The parts of `gpu.py`, each in a separate process. A part writes its findings as it goes."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import itertools
import logging
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hf_muon.math
from benchmarks import measure, optimizer_step, tables
from benchmarks.gpu import Body
from benchmarks.gpu_products import products_of
from benchmarks.measure import asked, attempt
from benchmarks.models import build, on_meta, scaled_config
from benchmarks.tables import table
from hf_muon import Muon, build_optimizer
from hf_muon.config import MuonConfig
from hf_muon.math.elementwise import Elementwise
from hf_muon.math.momentum import BUFFER, move_
from hf_muon.math.precision import compute_dtype

ROOT = Path(__file__).resolve().parents[1]
MODEL = "Qwen3-0.6B"
# Bytes of a card that holds all layers of MODEL, five times; a smaller card gets fewer layers.
_LARGE_CARD = 64e9


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

    def config(self) -> tuple[Any, str]:
        """Return the config of MODEL that fits here, and what is smaller in it."""
        layers = None
        if self.on_cuda:
            memory = torch.cuda.get_device_properties(self.device).total_memory
            layers = max(1, min(28, int(28 * memory / _LARGE_CARD)))
        return scaled_config(MODEL, self.kind, not self.on_cuda, layers=layers)


def run(part: str, where: Where, body: Body) -> None:
    """Run a part.

    Raises:
        SystemExit: there is no such device.
    """
    if where.on_cuda and not torch.cuda.is_available():
        raise SystemExit(
            f"--device cuda: torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees no CUDA device. "
            f"{_driver() or 'There is no nvidia-smi'}. Install a torch that this driver supports into {sys.prefix}, or "
            "run benchmarks/gpu.py with another Python"
        )
    logging.getLogger("hf_muon").setLevel(logging.ERROR)
    torch.manual_seed(0)
    if not where.on_cuda:
        torch.set_num_threads(1)
    parts = {"machine": machine, "tests": tests, "compiled": compiled, "products": products_of}
    (parts | {"memory": memory, "step": step, "ranks": ranks})[part](where, body)


# --- machine


def _driver() -> str:
    fields = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True)
        return "; ".join(asked.stdout.decode(errors="replace").split("\n")).strip("; ")
    return ""


def machine(where: Where, body: Body) -> None:
    """Describe the machine."""
    rows = {
        "machine": f"{measure.machine()['cpu']}, {_gib(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}",
        "card, driver, memory, clock, power": _driver() or "none",
        "Python": sys.version.split()[0],
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        **measure.versions("triton", "transformers", "accelerate", "deepspeed", "pytest"),
        "`ns_dtype: auto` is": _name(where.ns_dtype),
        "sums in fp16 may be split": str(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
        "sums in bf16 may be split": str(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
    }
    if where.on_cuda:
        cards = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
        rows["cards that torch sees"] = "; ".join(
            f"{card.name}, sm_{card.major}{card.minor}, {card.multi_processor_count} SMs, {_gib(card.total_memory)}"
            for card in cards
        )
    body["machine"] = table(["", ""], [[key, str(value)] for key, value in rows.items()])


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _name(dtype: torch.dtype) -> str:
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
    text = str(dtype).removeprefix("torch.")
    return names.get(text, text)


# --- tests


def _entry(text: str, length: int = 240) -> str:
    """Return a text as the entry of a table."""
    return " ".join(text.split())[:length].replace("|", "\\|")


def tests(where: Where, body: Body) -> None:
    """Run the tests with the mark `gpu`, those that start processes last."""
    names = [
        str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text()
    ]
    names.sort(key=lambda name: (("deepspeed" in name) + 2 * ("e2e" in name), name))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-v",
        "-rfEs",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        *names,
    ]
    counts: Counter[str] = Counter()
    reasons: list[str] = []
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if ended := re.match(r"tests/\S+::.* (PASSED|FAILED|SKIPPED|ERROR)", line):
            counts[ended[1].lower()] += 1
        elif line.startswith(("FAILED ", "ERROR ", "SKIPPED ")):
            reasons.append(f"- {_entry(line)}")
        body["tests"] = [", ".join(f"{count} {outcome}" for outcome, count in counts.items()), "", *reasons]
    if process.wait() not in (0, 1):  # 1: a test failed
        body["code"] = [f"pytest ended with code {process.returncode}."]


# --- compiled functions


class Twins:
    """Repeats each call of a compiled function in the `with` block uncompiled, and compares what both write.

    Attributes:
        found: by function, dtypes and options: calls, elements, elements that differ, and the largest difference in
            units in the last place.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, str], list[int]] = {}

    def __enter__(self) -> Twins:
        self._call = call = Elementwise.__call__

        def both(function: Elementwise, *arguments: Tensor | float, **options: Any) -> None:
            tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
            copies: dict[Any, Tensor] = {}
            for tensor in tensors:
                copies.setdefault(_place(tensor), tensor.clone())
            call(function, *arguments, **options)
            twins = [copies[_place(tensor)] for tensor in tensors]
            function.plain(*twins, *arguments[len(tensors) :], **options)
            self._compare(function, tensors, twins, options)

        Elementwise.__call__ = both  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Elementwise.__call__ = self._call  # type: ignore[method-assign]

    def _compare(self, function: Elementwise, tensors: Any, twins: Any, options: Mapping[str, Any]) -> None:
        dtypes = ", ".join(_name(tensor.dtype) for tensor in tensors)
        words = ", ".join(f"{key}={value}" for key, value in options.items())
        counts = self.found.setdefault((function.name, dtypes, words), [0, 0, 0, 0])
        counts[0] += 1
        for k in function.writes:
            mine, other = _ordered(tensors[k]), _ordered(twins[k])
            counts[1] += mine.numel()
            counts[2] += int((mine != other).sum())
            counts[3] = max(counts[3], int((mine - other).abs().max())) if mine.numel() else counts[3]


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor as integers, so that NaN equals NaN and zero differs from minus zero."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.itemsize])


def _ordered(tensor: Tensor) -> Tensor:
    """Return integers in the order of the numbers, so that a difference is one in units in the last place."""
    bits = _bits(tensor)
    least = torch.iinfo(bits.dtype).min
    return bits.long() if not tensor.is_floating_point() else torch.where(bits < 0, least - bits.long(), bits.long())


class _Said(logging.Handler):
    """Collects what the package logs about compilation, each line once."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}
        logger = logging.getLogger("hf_muon")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "compil" in text:
            self.lines[f"- logged: {_entry(text)}"] = None


def _cases() -> Iterator[tuple[torch.dtype, torch.dtype, dict[str, Any]]]:
    """Yield dtypes of weights and gradients, and options, in which steps call compiled functions."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes:
        yield dtype, dtype, {}
    for dtype, stored in itertools.product(dtypes, ("bf16", "int8")):
        yield dtype, dtype, {"momentum_dtype": stored, "adamw_state_dtype": stored}
    for dtype in dtypes[1:]:
        yield dtype, dtype, {"weight_rounding": "nearest", "nesterov": False}
        yield dtype, torch.float32, {}
        int8 = {"momentum_dtype": "int8", "adamw_state_dtype": "int8"}
        yield dtype, dtype, {"weight_rounding": "nearest", "nesterov": False, **int8}


def compiled(where: Where, body: Body) -> None:
    """Take steps in which each call of a compiled function is repeated uncompiled."""
    from tests.accelerated import accelerated

    every = {
        function.name
        for module in pkgutil.iter_modules(hf_muon.math.__path__)
        for function in vars(importlib.import_module(f"hf_muon.math.{module.name}")).values()
        if isinstance(function, Elementwise)
    }
    notes: list[str] = []
    said = _Said()
    with contextlib.nullcontext() if where.on_cuda else accelerated(), Twins() as twins:
        for dtype, of_grads, options in _cases():
            words = ", ".join(f"{key}={value}" for key, value in options.items())
            case = f"{_name(dtype)} weights, {_name(of_grads)} gradients{', ' * bool(words)}{words}"
            note = attempt(lambda case=(dtype, of_grads, options): _steps(where.device, *case))
            if not options:
                note = note or attempt(lambda case=(dtype, of_grads): _move_alone(where.device, *case))
            notes += [f"- {case}: {_entry(note)}"] if note else []
            where.say(f"{case}{': ' * bool(note)}{note}")
            rows = [
                [f"`{name}`", kinds, words, *map(str, counts), "=" if not counts[2] else "**differs**"]
                for (name, kinds, words), counts in sorted(twins.found.items())
            ]
            unseen = ", ".join(f"`{name}`" for name in sorted(every - {name for name, *_ in twins.found}))
            heads = (
                "function",
                "dtypes",
                "options",
                "calls",
                "elements written",
                "differ",
                "by units, at most",
                "bits",
            )
            body["compiled"] = [
                "Steps of small parameters. After each call of a compiled function, the uncompiled one runs on copies, "
                f"and the results are compared bit for bit. {'' if said.lines else 'Nothing is compiled. '}"
                f"{f'Not called by any step: {unseen}.' if unseen else ''}",
                "",
                *said.lines,
                "",
                *table(heads, rows),
                *notes,
            ]


def _steps(device: torch.device, dtype: torch.dtype, of_grads: torch.dtype, options: dict[str, Any]) -> None:
    """Take three steps of small parameters of several shapes."""
    generator = torch.Generator().manual_seed(0)

    def numbers(shape: tuple[int, ...], to: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, to)

    matrices = [nn.Parameter(numbers(s, dtype)) for s in ((48, 128), (48, 128), (130, 64), (33, 70), (3, 20, 40))]
    others = [nn.Parameter(numbers(s, dtype)) for s in ((130, 64), (96,), (77, 65), (1,), (512, 256))]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    optimizer = Muon(groups, lr=1e-2, weight_decay=0.1, **options)
    for _ in range(3):
        for param in (*matrices, *others):
            if of_grads is not dtype:
                param.grad_dtype = of_grads
            param.grad = numbers(tuple(param.shape), of_grads)
        optimizer.step()


def _move_alone(device: torch.device, dtype: torch.dtype, of_grads: torch.dtype) -> None:
    """Move momentum without returning the update, as DDP does on ranks that do not own a matrix."""
    shape = (48, 128)
    grads = [torch.randn(shape, device=device, dtype=of_grads)]
    for stored in dict.fromkeys((torch.promote_types(dtype, torch.float32), torch.bfloat16)):
        moments = [{BUFFER: torch.zeros(shape, device=device, dtype=stored)}]
        for step in range(3):
            move_(moments, grads, momentum=0.95, nesterov=True, step=step, wanted=False)


# --- memory and kernels


def memory(where: Where, body: Body) -> None:
    """Compare the memory of our step with the plan, and name its kernels."""
    config, scaled = where.config()
    int8 = {"momentum_dtype": "int8", "adamw_state_dtype": "int8"}
    sides: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "fp32 weights": (torch.float32, {}),
        "bf16 weights": (torch.bfloat16, {}),
        "bf16 weights, int8 moments": (torch.bfloat16, int8),
    }
    heads = ["", "weights, gradients and state, MB: planned", "found", "temporary, MB: planned", "found"]
    heads += ["found / planned", "first step, MB", "launches, counted", "kernels", "their ms"]
    rows: list[list[str]] = []
    for name, (dtype, options) in sides.items():
        row = [name]
        kernels: dict[str, tuple[int, float]] = {}
        rows.append(row)
        cells = functools.partial(_memory_of_step, where, config, dtype, options, kernels)
        note = attempt(lambda row=row, cells=cells: row.extend(cells()))
        row += [note] * bool(note)
        where.say(" ".join(row))
        body["memory"] = [
            f"{MODEL}, {scaled}; {_name(where.ns_dtype)} products, one process, second step. A kernel is what torch's "
            f"profiler sees{'' if where.on_cuda else '; on a CPU operators, with those inside others'}.",
            "",
            *table(heads, [cells + [""] * (len(heads) - len(cells)) for cells in rows]),
        ]
        longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:8]
        lines = [[f"`{_entry(kernel, 100)}`", str(n), f"{1e3 * seconds:.3g}"] for kernel, (n, seconds) in longest]
        body[name] = [f"{name}, by time:", "", *table(["kernel", "calls", "ms"], lines)] if lines else []


def _memory_of_step(
    where: Where, config: Any, dtype: torch.dtype, options: dict[str, Any], kernels: dict[str, tuple[int, float]]
) -> Iterator[str]:
    """Yield the entries of a row of `memory`; `kernels` receives what the profiler sees."""
    from hf_muon.plan.step_plan import plan_step

    gc.collect()  # the model of the row before
    plan = plan_step(on_meta(config), MuonConfig(**options), "single", 1, dtype=dtype, ns_dtype=where.ns_dtype).memory
    held = torch.cuda.memory_allocated(where.device) if where.on_cuda else 0
    model = build(config).to(where.device, dtype)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer = build_optimizer(model, lr=1e-3, **options)
    first, second = (measure.peak_extra_bytes(optimizer.step, where.device) for _ in range(2))
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    found = sum(tensor.nbytes for tensor in (*model.parameters(), *state)) + sum(
        p.grad.nbytes for p in model.parameters()
    )
    if where.on_cuda:
        found = torch.cuda.memory_allocated(where.device) - held
    yield from (f"{nbytes / 1e6:.4g}" for nbytes in (plan.resident[0], found, plan.step, second))
    yield f"{second / plan.step:.2f}" if plan.step else ""
    yield f"{first / 1e6:.4g}"
    meta = on_meta(config).to(dtype)
    counted = asked(lambda: build_optimizer(meta, lr=1e-3, ns_dtype=_name(where.ns_dtype), **options).step, 1)
    yield str(counted.get("launches", counted.get("not counted")))
    kernels.update(measure.kernels(optimizer.step, where.device))
    yield str(sum(count for count, _ in kernels.values()))
    yield f"{1e3 * sum(seconds for _, seconds in kernels.values()):.3g}"


# --- a step of several optimizers


def step(where: Where, body: Body) -> None:
    """Measure a step as `make bench` does, first without dion, whose compilation may take long."""
    setting = measure.setting_on(
        where.kind, quick=not where.on_cuda, rounds=15 if where.on_cuda else 2, dion=where.dion
    )
    config = where.config()
    fast = (optimizer_step.OURS, optimizer_step.WATCHED, optimizer_step.TORCH, optimizer_step.ADAMW)
    dion = bool(where.dion or importlib.util.find_spec("dion"))
    for sides in (fast, (*fast, optimizer_step.DION))[: 1 + dion]:
        rows = optimizer_step.rows_of(setting, MODEL, sides=sides, config=config)
        kept = [{key: value for key, value in row.items() if value != ""} for row in rows]
        body["step"] = [
            f"Optimizers in turns, {setting.clock.kind}, {setting.rounds} rounds, medians (least-greatest); products "
            f"in {_name(setting.dtype)}, {setting.gemm.rate / 1e12:.3g} TFLOP/s at {setting.gemm.size}. fp32 weights.",
            "",
            *tables.optimizer_step(kept),
            "" if dion else "dion: not installed, and no checkout of it is named (`--dion`).",
        ]
        where.say(", ".join(f"{row['side']} {row['ms']:.4g} ms" for row in kept if "ms" in row))


# --- two ranks


def ranks(where: Where, body: Body) -> None:
    """Compare steps of two ranks with those of one process, and measure them."""
    if where.on_cuda and torch.cuda.device_count() < 2:
        body["ranks"] = ["There is one card. Not run."]
        return
    _equal_bits(where, body)
    _seconds(where, body)


def _equal_bits(where: Where, body: Body) -> None:
    from tests.distributed.cases import given_gradients
    from tests.distributed.pool import Pool

    shapes = [(1024, 3072), (2048, 1024), (1024, 1024)] if where.on_cuda else [(48, 96), (64, 32)]
    options: dict[str, Any] = {
        "steps": 2,
        "viewed": [*[(shape, "") for shape in shapes for _ in range(5)], ((3, *shapes[0]), "")],
        "tables": [(4096, 1024) if where.on_cuda else (64, 32)],
        "device": where.kind,
    }
    products = ("fp16", "bf16") if where.on_cuda else ("fp32",)
    rows: list[list[str]] = []
    pool = Pool(2, timeout=60, backend="cpu:gloo,cuda:nccl" if where.on_cuda else "gloo")
    for dtype, ns_dtype in itertools.product(("float32", "bfloat16"), products):
        own = {**options, "dtype": dtype, "ns_dtype": ns_dtype}
        expected = given_gradients(0, "single", **own)
        for layout in ("ddp", "fsdp"):
            row = [layout, dtype, ns_dtype]
            try:
                results = pool.run(given_gradients, layout=layout, **own)
                pairs = [
                    (mine, single)
                    for result in results
                    for of_mine, of_single in zip(result, expected, strict=True)
                    for mine, single in zip(of_mine, of_single, strict=True)
                ]
                differ = sum(int(not torch.equal(mine, single)) for mine, single in pairs)
                row.append("=" if not differ else f"**{differ} of {len(pairs)} tensors differ**")
            except AssertionError as error:
                row.append(_entry(str(error)[-240:]))
            rows.append(row)
            where.say(" ".join(row))
            body["bits"] = [
                "Weights and moments of two ranks after two steps, from given gradients, compared with one process:",
                "",
                *table(["layout", "weights", "products", "bits"], rows),
            ]
    pool.close(kill=True)  # however its ranks would end, the measurement follows


def _seconds(where: Where, body: Body) -> None:
    shapes, seconds = ("Qwen3-0.6B, 4 layers", 20) if where.on_cuda else ("tiny", 0.5)
    command = [sys.executable, "-m", "benchmarks.distributed_step", "--ranks", "2"]
    command += ["--shapes", shapes, "--seconds", str(seconds)]
    hidden = {} if where.on_cuda else {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env={**os.environ, **hidden}, capture_output=True, text=True)
    failed = f"**The measurement failed**: {_entry(done.stderr[-240:])}"
    body["seconds"] = [failed] if done.returncode else done.stdout.splitlines()
