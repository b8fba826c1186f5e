"""Parts of `gpu.py` that measure: medians of times that take turns, next to the floor of the card's own rates."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import importlib.util
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import measure, optimizer_step
from benchmarks.gpu import Body
from benchmarks.gpu_products import batches, tile_on
from benchmarks.gpu_shared import NAMES, Where, entry, name_of
from benchmarks.measure import Clock, Gemm, Setting, attempt, taking_turns
from benchmarks.models import build, on_meta
from benchmarks.rivals import STEPS
from benchmarks.tables import table
from hf_muon import MuonConfig, build_optimizer, route_parameters
from hf_muon.cli.model_source import known_configs
from hf_muon.math.coefficients import PRESETS, resolve
from hf_muon.math.newton_schulz import newton_schulz_in_batches
from hf_muon.plan import facts_of, numbers_of

INT8 = {"momentum_dtype": "int8", "adamw_state_dtype": "int8"}
BF16 = {"momentum_dtype": "bf16", "adamw_state_dtype": "bf16"}


def _config(name: str, where: Where, **changed: Any) -> Any:
    """Return the config of a published model with some fields changed, on a CPU of a tiny one."""
    import transformers

    fields = {**known_configs()[name], **changed}
    if not where.on_cuda:
        fields |= {
            "num_hidden_layers": 2,
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "head_dim": 16,
        }
        fields |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.AutoConfig.for_model(**fields)


def _setting(where: Where, rounds: int) -> Setting:
    quick = not where.on_cuda
    return measure.setting_on(where.kind, quick=quick, rounds=1 if quick else rounds, dion=where.dion)


def _bandwidth(where: Where, clock: Clock) -> float:
    """Return the bytes per second of a copy, read and written ones."""
    source = torch.ones(2**28 if where.on_cuda else 2**18, device=where.device)
    target = torch.empty_like(source)
    seconds = taking_turns({"copy": lambda: target.copy_(source)}, clock, 9)["copy"]
    return 2 * source.nbytes / median(seconds)


# --- rates


def rates(where: Where, body: Body) -> None:
    """Measure what every other time is compared with."""
    clock = Clock(where.device)
    bandwidth = _bandwidth(where, clock)
    rows = [["a copy of 1 GiB, read and written" if where.on_cuda else "a copy", f"{bandwidth / 1e12:.3g} TB/s"]]
    for dtype in (torch.float16, torch.bfloat16, torch.float32)[:: 1 if where.on_cuda else -2]:
        gemm = Gemm(clock, dtype, (4096, 8192, 16384) if where.on_cuda else (64,))
        rows.append([f"a product of {gemm.size} in {name_of(dtype)}", f"{gemm.rate / 1e12:.3g} TFLOP/s"])
        body["rates"] = table(["", "rate"], rows)
        body.verdict("; ".join(f"{what}: {rate}" for what, rate in rows))


# --- Newton-Schulz


def newton_schulz(where: Where, body: Body) -> None:
    """Measure five steps of ours, of torch's function and with the symmetric kernel."""
    setting = _setting(where, 5)
    began, coefficients = time.monotonic(), resolve("polar_express", STEPS)
    shapes = [(4, 4096, 4096), (1, 8192, 8192), (6, 1024, 8192), (1, 8192, 28672), (72, 2048, 7168)]
    if not where.on_cuda:
        shapes = [(2, 64, 64), (1, 32, 128)]
    named = {"x".join(map(str, shape)): [shape] for shape in shapes}
    named = {"all of Qwen3-0.6B": [*batches(small=not where.on_cuda)], **named}
    theirs = importlib.import_module("torch.optim._muon")._zeropower_via_newtonschulz

    def function(matrix: Tensor) -> Tensor:
        return theirs(matrix, PRESETS["original"].steps[0], STEPS, 1e-7)  # type: ignore[no-any-return]

    compiled = torch.compile(function, dynamic=True)
    half = torch.bfloat16 if where.on_cuda else torch.float32
    tile = tile_on(where) if where.on_cuda else None
    rows: list[list[str]] = []
    for name, own in named.items():
        inputs = [torch.randn(shape, device=where.device).to(half) for shape in own]

        def ours(dtype: torch.dtype, inputs: list[Tensor] = inputs) -> None:
            for each in inputs:
                newton_schulz_in_batches(each, coefficients, dtype)

        def torchs(run: Callable[[Tensor], Tensor], inputs: list[Tensor] = inputs) -> None:
            for each in inputs:
                for matrix in each:
                    run(matrix)

        def with_kernel(ours: Callable[[torch.dtype], None] = ours) -> None:
            from benchmarks import symmetric

            with symmetric.multiplying(tile):
                ours(torch.float16)

        products = where.products[:2]  # on a card without fp32
        calls: dict[str, Callable[[], Any]] = {f"ours, {d}": functools.partial(ours, _DTYPES[d]) for d in products}
        calls["torch, eager"] = functools.partial(torchs, function)
        if time.monotonic() - began < 35:
            calls["torch, compiled"] = functools.partial(torchs, compiled)
        if tile is not None:
            calls["ours, symmetric kernel"] = with_kernel
        notes = {side: attempt(call) for side, call in calls.items()}
        running = {side: call for side, call in calls.items() if not notes[side]}
        seconds = taking_turns(running, setting.clock, setting.rounds)
        flops = measure.executed_flops(next(iter(running.values())))
        standard = sum(STEPS * b * (4 * min(m, n) ** 2 * max(m, n) + 2 * min(m, n) ** 3) for b, m, n in own)
        for side in calls:
            if notes[side]:
                rows.append([name, side, entry(notes[side], 120)])
                continue
            took = median(seconds[side])
            floor = (flops if side.startswith("ours") else standard) / setting.gemm.rate
            ends = f"{1e3 * min(seconds[side]):.3g}-{1e3 * max(seconds[side]):.3g}"
            each, rate = 1e3 * took / sum(shape[0] for shape in own), standard / took / 1e12
            cells = [f"{1e3 * took:.4g} ({ends})", f"{each:.3g}", f"{rate:.3g}", f"{1e3 * floor:.3g}"]
            rows.append([name, side, *cells, f"{floor / took:.0%}"])
        where.say("; ".join(rows[-1]))
        heads = ["matrices", "side", "ms (least-greatest)", "ms each", "TFLOP/s, standard", "floor, ms", "of GEMM rate"]
        body["newton_schulz"] = [
            f"Five steps from bf16, {setting.rounds} rounds; the standard form takes 4 s^2 l + 2 s^3 FLOPs a step. The "
            f"floor is the FLOPs that a side takes, of ours without those that the kernel saves, at "
            f"{setting.gemm.rate / 1e12:.3g} TFLOP/s ({name_of(setting.dtype)}, {setting.gemm.size}).",
            "",
            *table(heads, [[*row, *[""] * (len(heads) - len(row))] for row in rows]),
        ]
        body.verdict("; ".join(f"{row[1]} {row[2].split(' (')[0]} ms" for row in rows[: len(calls)]) + " (Qwen3-0.6B)")
        del inputs, calls, running
        _free()


_DTYPES = {short: getattr(torch, long) for long, short in NAMES.items()}


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- a step of several optimizers


def step(where: Where, body: Body) -> None:
    """Measure a step of whole models with the optimizers of others."""
    setting = _setting(where, 7)
    bandwidth = _bandwidth(where, setting.clock)
    rows: list[list[str]] = []
    for name in ("qwen3-0.6b", "qwen3-1.7b"):
        for dtype, options in ((torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, INT8)):
            case = f"{name}, {name_of(dtype)}{', int8 moments' if options else ''}"
            config, found = _config(name, where), []
            watched = name != "qwen3-1.7b" or dtype.itemsize == 2  # four copies in fp32 do not fit
            kernels: list[str] = []
            arguments = (where, setting, bandwidth, config, dtype, options, watched, kernels)
            note = attempt(lambda arguments=arguments, found=found: found.extend(_sides_of_step(*arguments)))
            rows += [[case, *row] for row in found or [[entry(note)]]]
            where.say(f"{case}: {'; '.join(' '.join(row[:2]) for row in found) or note}")
            heads = ["model, weights", "side", "ms (least-greatest)", "x AdamW", "floor, ms", "host ms"]
            heads += ["kernels", "busy ms", "gaps ms", "first step, s"]
            body["step"] = [
                f"{setting.rounds} rounds. The floor: executed FLOPs at {setting.gemm.rate / 1e12:.3g} TFLOP/s and the "
                f"least bytes of weights, gradients and moments at {bandwidth / 1e12:.3g} TB/s.",
                "",
                *table(heads, [[*row, *[""] * (len(heads) - len(row))] for row in rows]),
            ]
            body[f"kernels of {case}"] = [f"Kernels of ours, {case}, by time:", "", *kernels] if kernels else []
            told = [f"{row[1]} {row[2].split(' (')[0]} ms" for row in rows if row[0] == rows[0][0] and len(row) > 3]
            body.verdict(f"{rows[0][0]}: {', '.join(told)}")
            _free()


def _sides_of_step(
    where: Where,
    setting: Setting,
    bandwidth: float,
    config: Any,
    dtype: torch.dtype,
    options: Mapping[str, Any],
    watched: bool,
    kernels: list[str],
) -> Iterator[list[str]]:
    """Yield a row for each optimizer; `kernels` receives those in which ours spends most of its time."""
    with where.device:
        model = build(config).to(dtype)
    folder = tempfile.mkdtemp()
    watching = {"diagnostics_every": 1, "diagnostics_file": f"{folder}/metrics.jsonl"}
    makers: dict[str, Callable[[nn.Module], Callable[[], Any]]] = {
        "ours": lambda own: optimizer_step.ours(own, **options).step,
        "ours, watched": lambda own: optimizer_step.ours(own, **options, **watching).step,
        "torch.optim.Muon + AdamW": lambda own: optimizer_step.torch_step(own, setting.half),
        "dion": lambda own: optimizer_step.dion_step(own, setting),
        "fused AdamW": optimizer_step.adamw_step,
    }
    if not watched:
        del makers["ours, watched"]
    if not (where.dion or importlib.util.find_spec("dion")):
        del makers["dion"]
    models = {side: model if k == 0 else copy.deepcopy(model) for k, side in enumerate(makers)}
    optimizer_step.give_gradients([*models.values()])
    steps, firsts, notes, flops = {}, {}, {}, 0
    for side, make in makers.items():

        def first(side: str = side, make: Any = make) -> None:
            own = make(models[side])
            began = time.perf_counter()
            own()
            where.synchronize()
            firsts[side], steps[side] = time.perf_counter() - began, own

        notes[side] = attempt(first)
    seconds = taking_turns(steps, setting.clock, setting.rounds)
    for side in makers:
        if side not in steps:
            yield [side, entry(notes[side], 120)]
            continue
        if side not in ("ours, watched", "fused AdamW"):  # those of ours, and none
            flops = measure.executed_flops(steps[side])
        moment = (1 + 4 / 64 if options else 4) if side.startswith("ours") else dtype.itemsize
        floor = _least_bytes(model, dtype, moment, side) / bandwidth
        floor += 0 if side == "fused AdamW" else flops / setting.gemm.rate
        took = seconds[side]
        cells = [f"{1e3 * median(took):.4g} ({1e3 * min(took):.4g}-{1e3 * max(took):.4g})"]
        cells += [f"{median(measure.ratios(took, seconds['fused AdamW'])):.2f}", f"{1e3 * floor:.3g}"]
        line, cells[3:] = _on_host_and_device(where, steps[side])
        if side == "ours":
            by_name = Counter[str]()
            for name, _, each in line:
                by_name[entry(name, 100)] += each
            kernels += table(["kernel", "ms"], [[f"`{k}`", f"{1e3 * v:.3g}"] for k, v in by_name.most_common(8)])
        yield [side, *cells, f"{firsts[side]:.2g}"]


def _on_host_and_device(where: Where, own: Callable[[], Any]) -> tuple[list[tuple[str, float, float]], list[str]]:
    """Return a call's timeline; the host's milliseconds for it, its kernels, the time in them, and between them."""
    hosts = []
    for _ in range(3):
        where.synchronize()
        began = time.perf_counter()
        own()
        hosts.append(time.perf_counter() - began)
    line: list[tuple[str, float, float]] = []
    if note := attempt(lambda: line.extend(measure.timeline(own, where.device))):
        return line, [f"{1e3 * median(hosts):.3g}", entry(note, 80), "", ""]
    busy = sum(each[2] for each in line)
    between = max(begin + seconds for _, begin, seconds in line) - min(begin for _, begin, _ in line) - busy
    return line, [f"{1e3 * median(hosts):.3g}", str(len(line)), f"{1e3 * busy:.3g}", f"{1e3 * max(between, 0):.3g}"]


def _least_bytes(model: nn.Module, dtype: torch.dtype, moment: float, side: str) -> float:
    """Return the bytes that a step reads and writes at least: weights and moments twice, gradients once."""
    numbers = sum(param.numel() for param in model.parameters())
    by_muon = 0 if side == "fused AdamW" else sum(param.numel() for param in optimizer_step.routed(model)[0])
    return 3 * dtype.itemsize * numbers + 2 * moment * (2 * numbers - by_muon)


# --- memory

SETTINGS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32 weights": (torch.float32, {}),
    "bf16 weights": (torch.bfloat16, {}),
    "bf16 moments": (torch.bfloat16, BF16),
    "int8 moments": (torch.bfloat16, INT8),
}
"""Dtype of the weights, and options. Layers are recomputed."""


def memory(where: Where, body: Body) -> None:
    """Compare the memory of two training steps with the plan."""
    cases = [*(("qwen3-0.6b", name) for name in SETTINGS), ("qwen3-4b", "bf16 weights"), ("qwen3-8b", "bf16 weights")]
    rows: list[list[str]] = []
    for name, setting in cases if where.on_cuda else cases[:4]:
        row = [name, setting]
        note = attempt(lambda row=row: row.extend(_memory_of_training(where, *row[:2])))
        rows.append([*row, entry(note, 120)] if note else row)
        where.say(" ".join(rows[-1]))
        heads = ["model", "setting", "planned, GB", "found, GB", "found / planned", "reserved, GB"]
        heads += ["seconds of a training step"]
        body["memory"] = [
            f"Two steps of a sequence of {2048 if where.on_cuda else 64} tokens. Planned is what "
            "`hf-muon plan` counts; found is the most that is allocated.",
            "",
            *table(heads, [[*each, *[""] * (len(heads) - len(each))] for each in rows]),
        ]
        parts = [f"{each[0]} {each[1]} {each[4]}" for each in rows if len(each) == len(heads)]
        body.verdict(f"found / planned: {', '.join(parts)}")
        _free()


def _memory_of_training(where: Where, name: str, setting: str) -> Iterator[str]:
    """Yield the entries of a row of `memory`."""
    config, tokens = _config(name, where), 2048 if where.on_cuda else 64
    dtype, options = SETTINGS[setting]
    model, muon = on_meta(config), MuonConfig(**options)
    run = {"dtype": dtype, "ns_dtype": where.ns_dtype, "tokens": tokens}
    planned = numbers_of(facts_of(model, route_parameters(model, muon), muon, **run)).peak()
    yield f"{planned / 1e9:.4g}"
    _free()
    already = torch.cuda.memory_allocated() if where.on_cuda else 0
    with where.device:  # in its dtype from the start: an fp32 copy of the largest would not fit
        model = build(config, dtype)
    model.train()
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    optimizer = build_optimizer(model, lr=1e-4, **options)
    ids = torch.randint(0, config.vocab_size, (1, tokens), device=where.device)
    autocast = torch.autocast(where.kind, torch.bfloat16, enabled=dtype is torch.float32)
    seconds = []

    def train() -> None:
        for _ in range(2):
            began = time.perf_counter()
            with autocast:
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            where.synchronize()
            seconds.append(time.perf_counter() - began)

    before = sum(param.nbytes for param in model.parameters())
    if where.on_cuda:
        before = torch.cuda.memory_allocated() - already
    found = before + measure.peak_extra_bytes(train, where.device)
    reserved = torch.cuda.max_memory_reserved() if where.on_cuda else 0
    yield from (f"{found / 1e9:.4g}", f"{found / planned:.3f}", f"{reserved / 1e9:.4g}", f"{seconds[-1]:.3g}")


# --- a small model


def host(where: Where, body: Body) -> None:
    """Measure how much of a small model's step is the host's, and what a graph would save."""
    setting = _setting(where, 9)
    fields = {"num_hidden_layers": 12, "hidden_size": 384, "intermediate_size": 1024, "vocab_size": 8192}
    fields |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
    config = _config("qwen3-0.6b", where, **fields)
    rows: list[list[str]] = []
    kinds: Any = (torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, INT8)
    with where.device:  # all before the first capture: after one that fails, torch may draw no more numbers
        pairs = [[build(config).to(dtype) for _ in range(2)] for dtype, _ in kinds]
    for models in pairs:
        optimizer_step.give_gradients(models)
    for (dtype, options), models in zip(kinds, pairs, strict=True):
        steps: dict[str, Callable[[], Any]] = {"ours": optimizer_step.ours(models[0], **options).step}
        steps["fused AdamW"] = optimizer_step.adamw_step(models[1])
        for each in steps.values():
            each()
        note = "only on a card"
        if where.on_cuda:
            note = attempt(lambda steps=steps: steps.update({"ours, in a graph": _graph(steps["ours"])}))
        seconds = taking_turns(steps, setting.clock, setting.rounds)
        weights = sum(param.numel() for param in models[0].parameters())
        case = f"{weights / 1e6:.3g} M, {name_of(dtype)}{', int8 moments' if options else ''}"
        for side, each in steps.items():
            found: list[str] = []
            attempt(lambda each=each, found=found: found.extend(_on_host_and_device(where, each)[1]))
            rows.append([case, side, f"{1e3 * median(seconds[side]):.3g}", *(found or [""] * 4)])
        rows += [[case, "ours, in a graph", entry(note, 120), "", "", "", ""]] if note else []
        body["host"] = [
            "In the graph, made by hand, the step does not read whether gradients are finite.",
            "",
            *table(["weights", "side", "ms", "host ms", "kernels", "busy ms", "gaps ms"], rows),
        ]
        body.verdict(", ".join(f"{row[1]} {row[2]} ms" for row in rows if row[0] == rows[0][0] and row[3]))
        where.say("; ".join(rows[-1]))


def _graph(own: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a step that was captured, with the one read of the device left out."""
    from hf_muon.distributed.ranks import Ranks

    def numbers(self: Ranks, said: Sequence[int], flags: Sequence[Tensor] = ()) -> list[list[int]]:
        return [[*[1] * len(flags), *said]]

    with mock.patch.object(Ranks, "numbers", numbers):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            own()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            own()
    graph.replay()
    return graph.replay
