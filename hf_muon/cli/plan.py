"""`hf-muon plan`: memory, traffic and work of a step, computed without a GPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_muon.cli.console import console, fail, print_json
from hf_muon.cli.inspect import DEQUANTIZE_HELP, SOURCE_HELP, TRUST_HELP, refuse

if TYPE_CHECKING:
    from hf_muon.plan.memory import Memory, Training
    from hf_muon.plan.step_plan import Plan

_TOKENS = (2**16, 2**18, 2**20, 2**22)
_DTYPES = ("fp32", "bf16", "fp16")
_OPTIONS = re.compile(r"(?<!-)\b(layout|ranks|replicas|offload|tp_size|ep_size)=('?)([^\s',]*)\2")
"""Arguments of `plan_step` in its errors, which are options here."""


def plan(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    layout: Annotated[
        str, typer.Option(help="single, ddp, fsdp, hsdp, tp (tensor parallel), zero1, zero2 or zero3.")
    ] = "fsdp",
    ranks: Annotated[
        int | None,
        typer.Option(help="Number of processes, one per GPU. Default: 1 for single, else 8.", show_default=False),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Copies of the model under hsdp.")] = 2,
    tp_size: Annotated[
        int | None,
        typer.Option(
            help="Ranks that cut each matrix, as transformers' tp_size, under fsdp and hsdp. Under tp it is all ranks.",
            show_default=False,
        ),
    ] = None,
    ep_size: Annotated[
        int,
        typer.Option(
            help="Ranks among which experts are distributed, as transformers' ep_size, under fsdp, hsdp and tp."
        ),
    ] = 1,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens per step: all ranks together, gradient accumulation included.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the stored weights: fp32, bf16 or fp16. Default: that in which a run of SOURCE stores them.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Sequences in a micro-batch on a rank. Default: SOURCE's, else 1.", show_default=False),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens in a sequence. Default: SOURCE's, else 2048.", show_default=False)
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option(help="Recompute layers in the backward pass. Default: as in SOURCE, else no.", show_default=False),
    ] = None,
    offload: Annotated[
        str,
        typer.Option(
            help="What the framework keeps on the host: none, optimizer (DeepSpeed's offload_optimizer) or params "
            "(FSDP2's CPUOffloadPolicy, ZeRO-3's offload_param)."
        ),
    ] = "none",
    memory: Annotated[
        float | None,
        typer.Option(help="Memory of a GPU in GB (10^9 bytes), to say whether the run fits.", show_default=False),
    ] = None,
    optim_args: Annotated[
        str, typer.Option(help="Options of Muon, as in TrainingArguments. They override those of SOURCE.")
    ] = "",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help=TRUST_HELP)] = False,
    dequantize: Annotated[bool, typer.Option("--dequantize", help=DEQUANTIZE_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute memory, traffic and Newton-Schulz work per step, with the code that the step itself uses."""
    ranks = ranks if ranks is not None else 1 if layout == "single" else 8
    try:
        if dtype is not None:
            _check("dtype", dtype, _DTYPES)
        counts = {"tokens": tokens, "batch-size": batch_size, "sequence-length": sequence_length, "memory": memory}
        for name, number in counts.items():
            if number is not None and not (number >= 1 or (name == "memory" and number > 0)):
                raise ValueError(
                    f"--{name}={number} is not valid: expected {'more than 0' if name == 'memory' else 'at least 1'}"
                )

        from hf_muon.cli.model_source import read_source
        from hf_muon.cli.run_sizes import sizes_of
        from hf_muon.math.precision import NS_DTYPES
        from hf_muon.plan.memory import Training
        from hf_muon.plan.step_plan import plan_step

        described = read_source(source, optim_args, trust_remote_code=trust_remote_code, dequantize=dequantize)
        refuse(source, described.refusals)
        options = {
            "batch_size": batch_size,
            "sequence_length": sequence_length,
            "gradient_checkpointing": gradient_checkpointing,
            "dtype": dtype,
        }
        sizes = sizes_of(source, described.model, layout, options)
        stored = NS_DTYPES[sizes.dtype]
        assert stored is not None
        training = Training(*sizes[:3], offload=offload)
        with console().status(f"planning {source} on {ranks} ranks"):
            step = plan_step(
                described.model,
                described.config,
                layout,
                ranks,
                replicas=replicas,
                tp_size=tp_size,
                ep_size=ep_size,
                dtype=stored,
                training=training,
            )
    except (ValueError, RuntimeError) as error:
        fail(_OPTIONS.sub(lambda option: f"--{option[1].replace('_', '-')}={option[3]}", str(error)))
    except OSError as error:
        fail(error)
    shares = {count: step.share(count) for count in ([tokens] if tokens else _TOKENS)}
    if as_json:
        print_json(_as_json(source, step, shares, memory, sizes.dtype))
    else:
        _show(source, step, shares, training, memory, described.notes, sizes.dtype)


def _check(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"--{name}={value} is not valid. Valid: {', '.join(valid)}")


def _as_json(source: str, plan: Plan, shares: dict[int, float], memory: float | None, dtype: str) -> dict[str, Any]:
    sides = {"memory": plan.memory, "adamw_memory": plan.adamw_memory}
    return {
        "source": source,
        "dtype": dtype,
        **dataclasses.asdict(plan),
        **{name: {**dataclasses.asdict(side), **_peaks(side, memory)} for name, side in sides.items()},
        "adamw_sent_bytes": [0] * plan.ranks,
        "balance": plan.balance,
        "share_of_step": {str(tokens): share for tokens, share in shares.items()},
    }


def _peaks(side: Memory, memory: float | None) -> dict[str, Any]:
    peaks = {"in_backward": side.in_backward, "at_step": side.at_step, "peak": side.peak}
    return peaks if memory is None else {**peaks, "fits": side.fits(memory * 1e9)}


def _show(
    source: str,
    plan: Plan,
    shares: dict[int, float],
    training: Training,
    memory: float | None,
    notes: Sequence[str],
    dtype: str,
) -> None:
    from hf_muon.plan.step_plan import LAYOUTS

    screen = console()
    weights = plan.muon_weights + plan.adamw_weights
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
    for name, size in (("tp_size", plan.tp_size), ("ep_size", plan.ep_size)):
        ranks += f", {name} {size}" if size > 1 else ""
    screen.print(f"{source}, {plan.layout} on {ranks}: {LAYOUTS[plan.layout]}", markup=False)
    by_muon = f"{plan.muon_weights:,} of them with Muon ({plan.muon_weights / max(weights, 1):.1%})"
    screen.print(f"{weights:,} trained weights, {by_muon}")
    table = Table(title="per rank: mean (max)", title_justify="left")
    for heading in ("", "Muon", "AdamW for everything"):
        table.add_column(heading, justify="left" if not heading else "right")
    sides = (plan.memory, plan.adamw_memory)
    _add_memory(table, plan, sides, training, dtype)
    table.add_section()
    table.add_row("sent per optimizer step", _spread(plan.sent_bytes), "0 B")
    table.add_row("Newton-Schulz per step", _spread(plan.flops, "FLOP"), "0 FLOP")
    screen.print(table)
    if memory is not None:
        for name, side in zip(("Muon", "AdamW"), sides, strict=True):
            rest = memory * 1e9 - side.peak
            words = f"fits, {_size(rest)} left" if rest >= 0 else f"does not fit: {_size(-rest)} too much"
            screen.print(f"{memory:g} GB with {name}: {words}", highlight=False)
    if plan.memory.unknown:
        screen.print(f"{plan.memory.unknown}. Peaks are without them", style="yellow", markup=False, highlight=False)
    idle = sum(not flops for flops in plan.flops)
    waiting = f"; {idle} ranks have none" if idle else ""
    screen.print(f"Newton-Schulz balance: the busiest rank has {plan.balance:.2f} times the mean{waiting}")
    share = Table(title="Newton-Schulz share of a training step", title_justify="left")
    share.add_column("tokens per step", justify="right")
    share.add_column("share", justify="right")
    for tokens, fraction in shares.items():
        share.add_row(f"{tokens:,}", f"{fraction:.2%}")
    screen.print(share)
    screen.print("What these numbers are", style="bold")
    for name, text in _words(plan, training).items():
        screen.print(f"  {name}: {text}", style="dim", markup=False, highlight=False)
    for note in notes:
        screen.print(note, style="yellow", markup=False, highlight=False)


def _words(plan: Plan, training: Training) -> dict[str, str]:
    """Return what the numbers count, how well, and what they leave out."""
    several = plan.ranks > 1
    exact = ["weights", "gradients", "optimizer state", "FLOPs of Newton-Schulz"]
    exact += ["bytes sent for updates and directions"] if several else ["temporary buffers of the step"]
    words = {"exact": f"{', '.join(exact)}; by the code that steps, on tensors without values"}
    if several:
        words["a bound"] = "temporary buffers of the step"
    if not plan.memory.unknown:
        words["estimated"] = "activations, from the shapes of the layers; peaks have them"
    words |= {
        "in a peak": "gradients of earlier micro-batches, gathered layers, buckets of gradients",
        "share": "FLOPs of the busiest rank, relative to the model's products with weights on as many ranks at the "
        "same speed; attention scores, lookups and communication are not in it",
        "not counted": "the CUDA context, fragmentation, libraries' workspaces, buffers of collectives",
        "not planned": "context and pipeline parallel; a run with them may need less memory a rank",
    }
    if plan.tp_size > 1 or plan.ep_size > 1:
        words["tensor and expert parallel"] = (
            "parameters are cut by transformers' own code, as the model's tp_plan and ep_plan say; what layers send in "
            "the forward and backward pass is not counted"
        )
    if training.offload != "none":
        words["offload"] = "bytes on the host and over the bus are counted; the speed of the host is not known"
    return words


def _add_memory(table: Table, plan: Plan, sides: Sequence[Memory], training: Training, dtype: str) -> None:
    """Add the rows on memory: those that are zero on both sides only where they always matter."""
    of_state = (plan.state_bytes, plan.adamw_state_bytes)
    checkpointed = ", checkpointed" if training.gradient_checkpointing else ""
    tokens = f"{training.batch_size} x {training.sequence_length:,} tokens{checkpointed}"
    table.add_row(f"weights, trained in {dtype}", *(_spread(side.weights) for side in sides))
    table.add_row("gradients", *(_spread(side.gradients) for side in sides))
    on_host = "" if max(map(sum, (side.state for side in sides))) else ", on the host"
    table.add_row(f"optimizer state{on_host}", *map(_spread, of_state))
    if any(side.copies for side in sides):
        table.add_row("copies of weights and gradients", *(_size(side.copies) for side in sides))
    words = ["not estimated" if side.unknown else _size(side.activations) for side in sides]
    table.add_row(f"activations, {tokens}", *words)
    table.add_row("peak temporary buffers of the step", *(_size(side.step) for side in sides))
    table.add_section()
    table.add_row("peak in the backward pass", *(_size(side.in_backward) for side in sides))
    table.add_row("peak at the step", *(_size(side.at_step) for side in sides))
    if any(sum(side.host) for side in sides):
        table.add_row("on the host", *(_spread(side.host) for side in sides))
        table.add_row("bus, to the device per step", *(_spread(side.to_device) for side in sides))
        table.add_row("bus, to the host per step", *(_spread(side.to_host) for side in sides))


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
