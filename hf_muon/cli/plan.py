"""`hf-muon plan`: what a run costs with Muon and with AdamW, computed without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_muon.integrations.transformers.training_file import deepspeed_config, section_of

if TYPE_CHECKING:
    import torch

    from hf_muon.cli.model_source import Source
    from hf_muon.plan import Facts, Numbers

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LENGTHS = ("cutoff_len", "max_length", "max_completion_length", "block_size")
_DEFAULTS: dict[str, Any] = {"layout": "fsdp", "ranks": 8, "batch size": 1, "sequence length": 2048}
_NOT_COUNTED = (
    "second copies of weights and gradients (autocast's, what FSDP2 and ZeRO gather or reduce, DDP's buckets); "
    "activations of other models and of layers that are not checkpointed; reference and reward models; what "
    "quantization saves; the CUDA context, libraries, fragmentation"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "Compute the bytes, traffic and FLOPs of a run with Muon, next to AdamW."
    parser = commands.add_parser("plan", help=text, description=text)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="A model's directory or config.json, a training file, or a name on the hub.")
    add("--layout", help="single, ddp, fsdp, hsdp, zero1, zero2 or zero3. Default: SOURCE's, else fsdp.")
    add("--ranks", type=int, help="Processes, one per GPU. Default: 1 for single, else 8.")
    add("--replicas", type=int, default=2, help="Copies of the model under hsdp. Default: 2.")
    add("--memory", type=float, help="GB (10^9 bytes) of a GPU, to compare with.")
    add("--dtype", choices=_DTYPES, help="Dtype of the trained weights. Default: as a run of SOURCE stores them.")
    add("--batch-size", type=int, help="Sequences in a micro-batch on a rank. Default: SOURCE's, else 1.")
    add("--sequence-length", type=int, help="Tokens in a sequence. Default: SOURCE's, else 2048.")
    add("--tokens", type=int, help="Tokens of an optimizer step on all ranks, for the share of its FLOPs.")
    add("--optim-args", default="", help="Options of Muon, as in TrainingArguments. They override those of SOURCE.")
    add("--trust-remote-code", action="store_true", help="Run the code that comes with an unknown model.")
    add("--json", action="store_true", help="Print JSON.")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        ValueError: SOURCE, its run or an option is not valid.
        RuntimeError: the layout cannot have these options.
    """
    from hf_muon.cli.model_source import read_source, refuse
    from hf_muon.plan import numbers_of

    for name in ("batch_size", "sequence_length", "tokens", "memory"):
        if (value := getattr(arguments, name)) is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {value} is not positive [invalid-value]")
    source = read_source(arguments.source, arguments.optim_args, trust_remote_code=arguments.trust_remote_code)
    refuse(arguments.source, source.refusals)
    facts, assumed = _facts(source, arguments)
    numbers = numbers_of(facts)
    accumulated = source.argument("gradient_accumulation_steps") or 1
    tokens = arguments.tokens or facts.tokens * facts.ranks * accumulated
    if arguments.json:
        run_of = {name: getattr(facts, name) for name in ("layout", "ranks", "tokens")}
        run_of["dtype"] = str(facts.dtype).removeprefix("torch.")
        share = numbers.share(facts, tokens)
        print(json.dumps({**run_of, **dataclasses.asdict(numbers), "peak": numbers.peak(), "share": share}, indent=2))
        return 0
    _show(source, facts, numbers)
    if arguments.memory is not None:
        muon, adamw = _size(numbers.peak()), _size(numbers.peak(adamw=True))
        print(f"{arguments.memory:g} GB of memory: {muon} are counted with Muon, {adamw} with AdamW")
    print(f"Newton-Schulz: {numbers.share(facts, tokens):.2%} of the FLOPs of a training step of {tokens:,} tokens")
    print(f"Not counted: {_NOT_COUNTED}")
    for line in ([f"Assumed: {', '.join(assumed)}"] if assumed else []) + source.notes:
        print(line)
    return 0


def _facts(source: Source, arguments: argparse.Namespace) -> tuple[Facts, list[str]]:
    """Return the facts of a run, and words for those that neither the source nor an option says."""
    import torch

    from hf_muon.plan import facts_of

    layout = arguments.layout or _layout_of(source)
    batch = arguments.batch_size or source.argument("per_device_train_batch_size", "micro_batch_size")
    length = arguments.sequence_length or source.argument(*_LENGTHS)
    ranks = arguments.ranks if arguments.ranks is not None or layout != "single" else 1
    stated = {"layout": layout, "ranks": ranks, "batch size": batch, "sequence length": length}
    run = {name: _DEFAULTS[name] if value is None else value for name, value in stated.items()}
    layout = run["layout"]
    half = torch.float16 if source.argument("fp16") else torch.bfloat16 if source.argument("bf16") else None
    trained, frozen = (_dtype_of(source, is_trained=side) for side in (True, False))
    if half and layout in ("fsdp", "hsdp"):
        trained = torch.float32  # accelerate's FSDP2 stores fp32 weights under mixed precision
    if arguments.dtype is not None:
        trained = getattr(torch, _DTYPES[arguments.dtype])
    facts = facts_of(
        source.model,
        source.routes,
        source.config,
        layout=layout,
        ranks=run["ranks"],
        replicas=arguments.replicas,
        dtype=trained,
        frozen_dtype=frozen,
        compute_dtype=half or (trained if source.arguments else torch.bfloat16),
        tokens=run["batch size"] * run["sequence length"],
    )
    return facts, [f"{name} {run[name]}" for name, value in stated.items() if value is None]


def _dtype_of(source: Source, *, is_trained: bool) -> torch.dtype:
    """Return the dtype of most trained weights, or of most frozen ones."""
    import torch

    numels = Counter({torch.float32: 0})
    for parameter in source.model.parameters():
        numels[parameter.dtype] += parameter.numel() * (parameter.requires_grad is is_trained)
    return numels.most_common(1)[0][0]


def _layout_of(source: Source) -> str | None:
    """Return the layout that a training file asks for; None if it asks for none."""
    config = deepspeed_config(source.settings.get("deepspeed"))
    if config is not None:
        stage = config.get("zero_optimization", {}).get("stage", 0)
        return f"zero{stage}" if stage else "ddp"
    section = section_of(source.settings, "dist_config")
    if section.get("mp_replicate_size", 1) > 1:
        return "hsdp"
    return "fsdp" if source.settings.get("fsdp") or section else None


def _show(source: Source, facts: Facts, numbers: Numbers) -> None:
    from hf_muon.plan import LAYOUTS

    by_muon = sum(math.prod(route.shape) for route in source.routes if route.use_muon)
    total = sum(math.prod(route.shape) for route in source.routes)
    ranks = f"{facts.ranks} rank{'s' * (facts.ranks > 1)}"
    print(f"{source.title}, {facts.layout} on {ranks}: {LAYOUTS[facts.layout]}")
    print(f"{total:,} trained weights, {by_muon:,} of them with Muon ({by_muon / total:.1%})")
    estimate = "not known" if numbers.activations is None else _size(numbers.activations)
    name = str(facts.dtype).removeprefix("torch.")
    rows = [
        ("per rank: mean (max)", "Muon", "AdamW for all"),
        (f"weights, trained in {name}", *[_spread(numbers.weights)] * 2),
        ("gradients", *[_spread(numbers.gradients)] * 2),
        ("optimizer state", _spread(numbers.state), _spread(numbers.adamw_state)),
        ("temporary, in the step, at most", _size(numbers.temporary), "0 B"),
        (f"activations of {facts.tokens:,} tokens", *[estimate] * 2),
        ("together, at the peak", _size(numbers.peak()), _size(numbers.peak(adamw=True))),
        ("sent in a step, in addition to gradients and weights", _spread(numbers.sent), "0 B"),
        ("Newton-Schulz in a step", _spread(numbers.flops, "FLOP"), "0 FLOP"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))
    if numbers.activations is not None:
        print("Activations: an estimate for a decoder with checkpointed layers")


def _spread(values: Sequence[int], unit: str = "B") -> str:
    mean, largest = sum(values) / len(values), max(values)
    if largest <= 1.005 * mean:
        return _size(mean, unit)
    return f"{_size(mean, unit)} ({_size(largest, unit)})"


def _size(value: float, unit: str = "B") -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"
