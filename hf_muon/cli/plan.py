"""`hf-muon plan`: memory, traffic and work of a step, computed without a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_muon.cli.console import JsonOption, OptimArgsOption, SourceArgument, TrustOption, console, fail, print_json
from hf_muon.cli.inspect import refuse
from hf_muon.integrations.transformers.training_file import is_llamafactory, is_llamafactory_v1, is_trl_sft

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.cli.model_source import Source
    from hf_muon.plan.memory import Training
    from hf_muon.plan.step_plan import Plan

_TOKENS = (2**16, 2**18, 2**20, 2**22)
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LENGTHS = ("cutoff_len", "max_length", "max_seq_length", "block_size")
_NOTES = (
    "Exact if the run computes in bf16, but for temporary buffers, which are a bound, and activations, an estimate.",
    "Not counted: the CUDA context, fragmentation, workspaces of libraries, buffers of collectives.",
)


def plan(
    source: SourceArgument,
    layout: Annotated[str, typer.Option(help="single, ddp, fsdp, hsdp, zero1, zero2 or zero3.")] = "fsdp",
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
    ranks = ranks if ranks is not None else 1 if layout == "single" else 8
    try:
        from hf_muon.cli.model_source import read_source
        from hf_muon.math.precision import NS_DTYPES
        from hf_muon.plan.memory import Training
        from hf_muon.plan.step_plan import plan_step
        from hf_muon.routing.route import route_parameters

        described = read_source(source, optim_args, trust_remote_code=trust_remote_code)
        refuse(source, described, route_parameters(described.model, described.config))
        dtype = dtype or _stored_dtype(described.settings, described.model, layout)
        stored = NS_DTYPES.get(_DTYPES.get(dtype.removeprefix("torch."), dtype))
        if stored is None:
            raise ValueError(
                f"dtype: {dtype} is not a dtype of trained weights. Valid: {', '.join(_DTYPES.values())} "
                "[invalid-value]"
            )
        stated = {"batch_size": batch_size, "sequence_length": sequence_length}
        stated["gradient_checkpointing"] = gradient_checkpointing
        sizes = {**_sizes(described.settings), **{name: value for name, value in stated.items() if value is not None}}
        training = Training(**sizes)
        of_run = functools.partial(
            plan_step, described.model, described.config, layout, ranks, replicas=replicas, dtype=stored
        )
        with console().status(f"planning {source} on {ranks} ranks"):
            step = of_run(training=training)
            fits = memory is None or max(step.memory.peak, step.adamw_memory.peak) <= memory * 1e9
            less = step if fits else of_run(training=dataclasses.replace(training, gradient_checkpointing=True))
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)
    name = _DTYPES[str(stored).removeprefix("torch.")]
    if as_json:
        print_json({"source": source, "dtype": name, **dataclasses.asdict(step)})
    else:
        _show(described, step, less, training, memory, name)


def _sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return micro-batch sizes and checkpointing of a training file, with LLaMA-Factory's defaults."""
    sizes: dict[str, Any] = {}
    for size, names in {"batch_size": ("per_device_train_batch_size",), "sequence_length": _LENGTHS}.items():
        stated = [settings[name] for name in names if isinstance(settings.get(name), int)]
        sizes |= {size: stated[0]} if stated else {}
    if is_llamafactory(settings):
        sizes["gradient_checkpointing"] = settings.get("disable_gradient_checkpointing") is not True
    elif keys := settings.keys() & {"gradient_checkpointing", "activation_checkpointing"}:
        sizes["gradient_checkpointing"] = any(settings[key] is True for key in keys)
    return sizes


def _stored_dtype(settings: Mapping[str, Any], model: nn.Module, layout: str) -> str:
    """Return the dtype in which a run stores the weights that it trains."""
    from hf_muon.routing.model_facts import text_config_of  # and torch, which cannot be imported everywhere

    if hasattr(model, "peft_config"):
        return "fp32"  # peft's factors
    if is_llamafactory(settings) or is_llamafactory_v1(settings):
        return "bf16" if settings.get("pure_bf16") is True else "fp32"
    if layout in ("fsdp", "hsdp") and (settings.get("bf16") is True or settings.get("fp16") is True):
        return "fp32"  # accelerate's mixed precision under FSDP2
    keywords = settings.get("model_init_kwargs")
    for section in (settings, keywords if isinstance(keywords, Mapping) else {}):
        dtype = section.get("dtype", section.get("torch_dtype"))
        if dtype not in (None, "auto"):
            return str(dtype)
    if is_trl_sft(settings) and "dtype" not in settings:
        return "fp32"  # the default of its command line
    config: Any = model.config
    return str(config.dtype or text_config_of(config).dtype or "fp32")


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
    own = {source.config.momentum_dtype: 0, source.config.adamw_state_dtype: 0}
    label = f"optimizer state in {' and '.join(own).replace('auto', 'fp32')}, AdamW's in "
    label += "fp32" if plan.layout.startswith("zero") else dtype
    table.add_row(label, *(_spread(side.state) for side in sides.values()))
    if sum(plan.memory.host):
        table.add_row("optimizer state on the host", *(_spread(side.host) for side in sides.values()))
    if plan.memory.copies:
        table.add_row("copies of weights and gradients", *(_size(side.copies) for side in sides.values()))
    estimates = [side.activations for side in sides.values()]
    table.add_row(f"activations, {tokens}", *("not estimated" if own is None else _size(own) for own in estimates))
    table.add_row("temporary buffers of the step", *(_size(side.step) for side in sides.values()))
    table.add_section()
    table.add_row("peak in the backward pass", *(_size(side.in_backward) for side in sides.values()))
    table.add_row("peak at the step", *(_size(side.at_step) for side in sides.values()))
    table.add_section()
    table.add_row("sent per optimizer step", _spread(plan.sent_bytes), "0 B")
    table.add_row("Newton-Schulz per step", _spread(plan.flops, "FLOP"), "0 FLOP")
    screen.print(table)
    for name, side in sides.items() if memory is not None else ():
        rest = (memory or 0) * 1e9 - side.peak
        words = f"fits, {_size(rest)} left" if rest >= 0 else f"does not fit: {_size(-rest)} too much"
        if rest < 0 and not training.gradient_checkpointing and plan.memory.activations is not None:
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
