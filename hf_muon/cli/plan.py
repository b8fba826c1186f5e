"""`hf-muon plan`: memory, traffic and work of a step, computed without a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_muon.cli.console import JsonOption, OptimArgsOption, SourceArgument, TrustOption, console, fail, print_json
from hf_muon.cli.programs import V1
from hf_muon.integrations.transformers.training_file import deepspeed_config, section_of

if TYPE_CHECKING:
    import torch

    from hf_muon.cli.model_source import Source
    from hf_muon.plan.memory import Training
    from hf_muon.plan.step_plan import Plan

_TOKENS = (2**16, 2**18, 2**20, 2**22)
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_CHECKPOINTING = ("enable_activation_checkpointing", "activation_checkpointing", "gradient_checkpointing")
_NOTES = (
    "Exact but for temporary buffers, which are a bound, and activations, an estimate.",
    "Not counted: the CUDA context, fragmentation, workspaces of libraries, buffers of collectives.",
)


def plan(
    source: SourceArgument,
    layout: Annotated[
        str | None, typer.Option(help="single, ddp, fsdp, hsdp, zero1, zero2 or zero3. Default: SOURCE's, else fsdp.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes, one per GPU. Default: 1 for single, else 8.")] = None,
    replicas: Annotated[int, typer.Option(help="Copies of the model under hsdp.")] = 2,
    memory: Annotated[float | None, typer.Option(min=1e-9, help="GB (10^9 bytes) of a GPU: does the run fit?")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the stored weights: fp32, bf16 or fp16. Default: as a run of SOURCE.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences in a micro-batch on a rank. Default: SOURCE's, else 1.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a sequence. Default: SOURCE's, else 2048.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None, typer.Option(help="Recompute layers in the backward pass. Default: as in SOURCE, else no.")
    ] = None,
    optim_args: OptimArgsOption = "",
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute memory, traffic and Newton-Schulz work per step; with --memory, say whether the run fits."""
    try:
        from hf_muon.cli.model_source import read_source, refuse
        from hf_muon.math.precision import NS_DTYPES
        from hf_muon.plan.memory import Training
        from hf_muon.plan.step_plan import plan_step

        described = read_source(source, optim_args, trust_remote_code=trust_remote_code)
        refuse(source, described.refusals)
        stated: dict[str, Any] = {"layout": layout or _layout_of(described)}
        layout = str(stated["layout"] or "fsdp")
        stated["ranks"] = 1 if ranks is None and layout == "single" else ranks
        ranks = 8 if stated["ranks"] is None else stated["ranks"]
        of_source, sizes = _training_of(described, layout)
        dtype = dtype or str(of_source)
        stored = NS_DTYPES.get(_DTYPES.get(dtype.removeprefix("torch."), dtype))
        if stored is None:
            raise ValueError(
                f"dtype: {dtype} is not a dtype of trained weights. Valid: {', '.join(_DTYPES.values())} "
                "[invalid-value]"
            )
        options = {"batch_size": batch_size, "sequence_length": sequence_length}
        options["gradient_checkpointing"] = gradient_checkpointing
        sizes |= {name: value for name, value in options.items() if value is not None}
        training = Training(**{name: value for name, value in sizes.items() if value is not None})
        of_run = functools.partial(
            plan_step,
            described.model,
            described.config,
            layout,
            ranks,
            replicas=replicas,
            dtype=stored,
            routes=described.routes,
        )
        with console().status(f"planning {source} on {ranks} ranks"):
            step = of_run(training=training)
            fits = memory is None or max(step.memory.peak, step.adamw_memory.peak) <= memory * 1e9
            less = step if fits else of_run(training=dataclasses.replace(training, gradient_checkpointing=True))
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)
    name = _name(stored)
    run = {"layout": layout, "ranks": ranks, **dataclasses.asdict(training)}
    run = {key: _name(value) if "dtype" in key else value for key, value in run.items()}
    assumed = {key: run[key] for key, value in {**stated, **sizes}.items() if value is None}
    if as_json:
        print_json({"source": source, "dtype": name, **run, "assumed": assumed, **dataclasses.asdict(step)})
    else:
        _show(described, step, less, training, memory, name)
        if assumed:
            console().print(f"Assumed: {', '.join(f'{key} {value}' for key, value in assumed.items())}", style="yellow")


def _name(dtype: Any) -> str:
    return _DTYPES[str(dtype).removeprefix("torch.")]


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


def _training_of(source: Source, layout: str) -> tuple[torch.dtype, dict[str, Any]]:
    """Return the dtype of the trained weights, and what else memory depends on; None for what is not known."""
    import torch

    dtypes = {side: Counter({torch.float32: 0}) for side in (True, False)}
    for parameter in source.model.parameters():
        dtypes[parameter.requires_grad][parameter.dtype] += parameter.numel()
    stored, frozen = (dtypes[side].most_common(1)[0][0] for side in (True, False))
    if not source.arguments:
        return stored, dict.fromkeys(("batch_size", "sequence_length", "gradient_checkpointing", "compute_dtype"))
    half = torch.float16 if source.argument("fp16") else torch.bfloat16 if source.argument("bf16") else None
    if layout not in ("fsdp", "hsdp"):
        half = None if source.program == V1 else half  # only its FSDP2 computes in bf16
    elif half:
        stored = torch.float32  # accelerate's FSDP2 stores fp32 weights under mixed precision
    sizes = {
        "batch_size": source.argument("per_device_train_batch_size", "micro_batch_size"),
        "sequence_length": source.argument("cutoff_len", "max_length", "max_completion_length", "block_size"),
        "gradient_checkpointing": bool(source.argument(*_CHECKPOINTING))
        or any(getattr(module, "gradient_checkpointing", False) for module in source.model.modules()),
    }
    return stored, {**sizes, "compute_dtype": half or stored, "frozen_dtype": frozen}


def _show(source: Source, plan: Plan, less: Plan, training: Training, memory: float | None, dtype: str) -> None:
    """Print the table; `less` is the plan with gradient checkpointing."""
    from hf_muon.plan.step_plan import LAYOUTS

    screen = console()
    weights = plan.muon_weights + plan.adamw_weights
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
    screen.print(f"{source.title}, {plan.layout} on {ranks}: {LAYOUTS[plan.layout]}")
    by_muon = f"{plan.muon_weights:,} of them with Muon ({plan.muon_weights / max(weights, 1):.1%})"
    screen.print(f"{weights:,} trained weights, {by_muon}")
    sides = {"Muon": plan.memory, "AdamW": plan.adamw_memory}
    table = Table(title="per rank: mean (max)", title_justify="left")
    for heading in ("", "Muon", "AdamW for everything"):
        table.add_column(heading, justify="left" if not heading else "right")
    tokens = f"{training.batch_size} x {training.sequence_length:,} tokens"
    tokens += ", checkpointed" if training.gradient_checkpointing else ", not checkpointed"
    table.add_row(f"weights, trained in {dtype}", *(_spread(side.weights) for side in sides.values()))
    table.add_row("gradients", *(_spread(side.gradients) for side in sides.values()))
    dtypes = {source.config.momentum_dtype: 0, source.config.adamw_state_dtype: 0}
    label = f"optimizer state in {' and '.join(dtypes).replace('auto', 'fp32')}, AdamW's in "
    label += "fp32" if plan.layout.startswith("zero") else dtype
    table.add_row(label, *(_spread(side.state) for side in sides.values()))
    if plan.memory.copies:
        table.add_row("copies of weights and gradients", *(_size(side.copies) for side in sides.values()))
    estimates = [side.activations for side in sides.values()]
    table.add_row(f"activations, {tokens}", *("not estimated" if size is None else _size(size) for size in estimates))
    table.add_row("temporary buffers of the step", *(_size(side.step) for side in sides.values()))
    table.add_section()
    table.add_row("peak in the backward pass", *(_size(side.in_backward) for side in sides.values()))
    table.add_row("peak at the step", *(_size(side.at_step) for side in sides.values()))
    table.add_section()
    table.add_row("sent per optimizer step", _spread(plan.sent_bytes), "0 B")
    table.add_row("Newton-Schulz per step", _spread(plan.flops, "FLOP"), "0 FLOP")
    screen.print(table)
    for name, side in sides.items() if memory is not None else ():
        free = (memory or 0) * 1e9 - side.peak
        words = f"fits, {_size(free)} left" if free >= 0 else f"does not fit: {_size(-free)} too much"
        if free < 0 and not training.gradient_checkpointing and plan.memory.activations is not None:
            peak = (less.memory if name == "Muon" else less.adamw_memory).peak
            would = "would fit" if peak <= (memory or 0) * 1e9 else "would not fit, either"
            words += f". With --gradient-checkpointing it {would}: {_size(peak)} (see docs/what-fits.md)"
        screen.print(f"{memory:g} GB with {name}: {words}")
    screen.print(f"Newton-Schulz balance: the busiest rank has {plan.balance:.2f} times the mean")
    shares = ", ".join(f"{plan.share(tokens):.2%} with {tokens:,}" for tokens in _TOKENS)
    screen.print(f"Newton-Schulz share of the FLOPs of a training step, by its tokens: {shares}")
    for line in _NOTES:
        screen.print(line, style="dim")
    if plan.memory.activations is None:
        text = "Activations are estimated for decoders like Llama alone: here peaks are without them"
        screen.print(text, style="yellow")
    for note in source.notes:
        screen.print(note, style="yellow")


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
