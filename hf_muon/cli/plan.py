"""`hf-muon plan`: what a run costs with Muon and with AdamW, computed without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_muon.cli.console import add_json, add_source, check_source, print_json, status
from hf_muon.dry_run.report import LENGTH, size_of

if TYPE_CHECKING:
    from hf_muon.plan import Facts, Numbers

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_NOT_COUNTED = (
    "second copies of weights and gradients (autocast's, what FSDP2 and ZeRO gather or reduce, DDP's buckets); "
    "activations of other models and of layers that are not checkpointed; other models that a SOURCE does not say; "
    "what quantization and offloading save; the CUDA context, libraries, fragmentation"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "Compute the bytes, traffic and FLOPs of a run with Muon, next to AdamW."
    about = "show the bytes, traffic and FLOPs of a run next to AdamW"
    parser = commands.add_parser("plan", help=about, description=text)
    add_source(parser)
    add = parser.add_argument
    add("--layout", help="single, ddp, fsdp, hsdp, zero1, zero2 or zero3 (default: the run's; of a SOURCE fsdp)")
    add("--ranks", type=int, help="processes, one per GPU (default: the run's; of a SOURCE 1 for single, else 8)")
    add("--replicas", type=int, help="copies of the model under hsdp (default: the run's, or 2)")
    add("--memory", type=float, help="GB (10^9 bytes) of a GPU, to compare with")
    add("--dtype", choices=_DTYPES, help="dtype of the trained weights (default: the run's; of a SOURCE its own)")
    add("--batch-size", type=int, help="sequences in a micro-batch on a rank (default: those of the run, else 1)")
    add("--sequence-length", type=int, help=f"tokens in a sequence (default: those of the run, else {LENGTH})")
    add("--tokens", type=int, help="tokens of an optimizer step on all ranks, for the share of its FLOPs")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        ValueError: SOURCE, the command, its run or an option is not valid.
        RuntimeError: the layout cannot have these options.
    """
    from hf_muon.plan import numbers_of

    check_source(arguments)
    for name in ("batch_size", "sequence_length", "tokens", "memory"):
        if (value := getattr(arguments, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value} is not a positive number [invalid-value]")
    facts, own, notes = _of_command(arguments) if arguments.command else _of_source(arguments)
    facts, assumed = _replaced(facts, own, arguments)
    numbers = numbers_of(facts)
    tokens = arguments.tokens or facts.tokens * facts.ranks * (own.get("accumulation") or 1)
    share = numbers.share(facts, tokens)
    if arguments.json:
        of_run = {name: getattr(facts, name) for name in ("layout", "ranks", "tokens")}
        of_run["dtype"] = str(facts.dtype).removeprefix("torch.")
        print_json({**of_run, **dataclasses.asdict(numbers), "peak": numbers.peak(), "share": share})
        return 0
    _show(" ".join(arguments.command) or arguments.source, facts, numbers)
    if arguments.memory is not None:
        muon, adamw = size_of(numbers.peak()), size_of(numbers.peak(adamw=True))
        print(f"{arguments.memory:g} GB of memory: {muon} are counted with Muon, {adamw} with AdamW")
    print(f"Newton-Schulz: {share:.2%} of the FLOPs of a training step of {tokens:,} tokens")
    print(f"Not counted: {_NOT_COUNTED}")
    for line in ([f"Assumed: {', '.join(assumed)}"] if assumed else []) + notes:
        print(line)
    return 0


def _of_source(arguments: argparse.Namespace) -> tuple[Facts, dict[str, Any], list[str]]:
    """Return the facts of a model, what a run says of itself, which is nothing, and notes."""
    import torch

    from hf_muon.cli.model_source import read_source, refuse
    from hf_muon.plan import facts_of, main_dtype

    source = read_source(arguments.source, arguments.optim_args, trust_remote_code=arguments.trust_remote_code)
    refuse(arguments.source, source.refusals)
    trained, frozen = (main_dtype(source.model, is_trained=side) for side in (True, False))
    of_run = {"dtype": trained, "frozen_dtype": frozen, "compute_dtype": torch.bfloat16}
    return facts_of(source.model, source.routes, source.config, **of_run), {}, [*source.notes]


def _of_command(arguments: argparse.Namespace) -> tuple[Facts, dict[str, Any], list[str]]:
    """Return the facts of a dry run, what it says of itself, and notes."""
    from hf_muon.cli.model_source import refuse
    from hf_muon.dry_run import parent, report

    title = " ".join(arguments.command)
    with status(f"dry run of {title}"):
        content = parent.run(arguments.command)
    refuse(title, content["refused"])
    run = content["run"]
    notes = [f"Counted, too: {name}, {size_of(size)} on each rank" for name, size in run["other_models"]]
    facts = report.read_facts(content["facts"])
    if not run["checkpointing"]:
        facts = dataclasses.replace(facts, decoder=None)
        notes.append("The run does not checkpoint its layers, and of those there is no estimate of activations")
    return facts, run, notes


def _replaced(facts: Facts, own: dict[str, Any], arguments: argparse.Namespace) -> tuple[Facts, list[str]]:
    """Return the facts with those of options in place, and words for those that nothing says."""
    import torch

    layout = arguments.layout or own.get("layout")
    ranks = own.get("ranks") if arguments.ranks is None else arguments.ranks
    if arguments.ranks is None and layout == "single":
        ranks = 1
    batch, length = arguments.batch_size or own.get("rows"), arguments.sequence_length or own.get("sequence_length")
    stated = {"layout": layout, "ranks": ranks, "batch size": batch, "sequence length": length}
    defaults: dict[str, Any] = {"layout": "fsdp", "ranks": 8, "batch size": 1, "sequence length": LENGTH}
    run = {name: defaults[name] if value is None else value for name, value in stated.items()}
    facts = dataclasses.replace(
        facts,
        layout=run["layout"],
        ranks=run["ranks"],
        replicas=_replicas(own, arguments.replicas),
        tokens=run["batch size"] * run["sequence length"],
        dtype=facts.dtype if arguments.dtype is None else getattr(torch, _DTYPES[arguments.dtype]),
    )
    return facts, [f"{name} {run[name]}" for name, value in stated.items() if value is None]


def _replicas(own: dict[str, Any], asked: int | None) -> int:
    own_replicas: int = own["replicas"] if own.get("layout") == "hsdp" else 2
    return own_replicas if asked is None else asked


def _show(title: str, facts: Facts, numbers: Numbers) -> None:
    from hf_muon.plan import LAYOUTS

    by_muon = sum(math.prod(weight.shape) for weight in facts.weights if weight.use_muon)
    total = sum(math.prod(weight.shape) for weight in facts.weights if weight.use_muon is not None)
    ranks = f"{facts.ranks} rank{'s' * (facts.ranks > 1)}"
    print(f"{title}, {facts.layout} on {ranks}: {LAYOUTS[facts.layout]}")
    print(f"{total:,} trained weights, {by_muon:,} of them with Muon ({by_muon / total:.1%})")
    estimate = "not known" if numbers.activations is None else size_of(numbers.activations)
    name = str(facts.dtype).removeprefix("torch.")
    rows = [
        ("per rank: mean (max)", "Muon", "AdamW for all"),
        (f"weights, trained in {name}", *[_spread(numbers.weights)] * 2),
        ("gradients", *[_spread(numbers.gradients)] * 2),
        ("optimizer state", _spread(numbers.state), _spread(numbers.adamw_state)),
        ("temporary, in the step, at most", size_of(numbers.temporary), "0 B"),
        (f"activations of {facts.tokens:,} tokens", *[estimate] * 2),
        ("together, at the peak", size_of(numbers.peak()), size_of(numbers.peak(adamw=True))),
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
        return size_of(mean, unit)
    return f"{size_of(mean, unit)} ({size_of(largest, unit)})"
