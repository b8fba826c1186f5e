"""`hf-muon plan`: memory, traffic and work of a step, computed without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hf_muon.cli.console import add_json, add_source, print_json, status
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


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "Compute memory, traffic and Newton-Schulz work per step; with --memory, say whether the run fits."
    parser = commands.add_parser("plan", help="compute what a step costs, without a GPU", description=text)
    add_source(parser)
    add = parser.add_argument
    add("--layout", help="single, ddp, fsdp, hsdp, zero1, zero2 or zero3 (default: SOURCE's, else fsdp)")
    add("--ranks", type=int, metavar="N", help="processes, one per GPU (default: 1 for single, else 8)")
    add("--replicas", type=int, default=2, metavar="N", help="copies of the model under hsdp (default: 2)")
    add("--memory", type=_positive(float), metavar="GB", help="GB (10^9 bytes) of a GPU: does the run fit?")
    add("--dtype", help="dtype of the stored weights: fp32, bf16 or fp16 (default: as a run of SOURCE)")
    add(
        "--batch-size",
        type=_positive(int),
        metavar="N",
        help="sequences in a micro-batch on a rank (default: SOURCE's, else 1)",
    )
    add(
        "--sequence-length",
        type=_positive(int),
        metavar="N",
        help="tokens in a sequence (default: SOURCE's, else 2048)",
    )
    add(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="recompute layers in the backward pass (default: as in SOURCE, else no)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        number = kind(text)
        if number <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    return read


def run(arguments: argparse.Namespace) -> int:
    """Print the plan as a table, or as JSON.

    Raises:
        ValueError: there is no such source or value, or the run would be refused.
    """
    from hf_muon.cli.model_source import read_source, refuse
    from hf_muon.math.precision import NS_DTYPES
    from hf_muon.plan.memory import Training
    from hf_muon.plan.step_plan import plan_step

    source, memory = arguments.source, arguments.memory
    described = read_source(source, arguments.optim_args, trust_remote_code=arguments.trust_remote_code)
    refuse(source, described.refusals)
    stated: dict[str, Any] = {"layout": arguments.layout or _layout_of(described)}
    layout = str(stated["layout"] or "fsdp")
    stated["ranks"] = 1 if arguments.ranks is None and layout == "single" else arguments.ranks
    ranks = 8 if stated["ranks"] is None else stated["ranks"]
    of_source, sizes = _training_of(described, layout)
    dtype = arguments.dtype or str(of_source)
    stored = NS_DTYPES.get(_DTYPES.get(dtype.removeprefix("torch."), dtype))
    if stored is None:
        raise ValueError(
            f"dtype: {dtype} is not a dtype of trained weights. Valid: {', '.join(_DTYPES.values())} [invalid-value]"
        )
    options = {name: getattr(arguments, name) for name in ("batch_size", "sequence_length", "gradient_checkpointing")}
    sizes |= {name: value for name, value in options.items() if value is not None}
    training = Training(**{name: value for name, value in sizes.items() if value is not None})
    of_run = functools.partial(
        plan_step,
        described.model,
        described.config,
        layout,
        ranks,
        replicas=arguments.replicas,
        dtype=stored,
        routes=described.routes,
    )
    with status(f"planning {source} on {ranks} ranks"):
        step = of_run(training=training)
        fits = memory is None or max(step.memory.peak, step.adamw_memory.peak) <= memory * 1e9
        less = step if fits else of_run(training=dataclasses.replace(training, gradient_checkpointing=True))
    name = _name(stored)
    values = {"layout": layout, "ranks": ranks, **dataclasses.asdict(training)}
    values = {key: _name(value) if "dtype" in key else value for key, value in values.items()}
    assumed = {key: values[key] for key, value in {**stated, **sizes}.items() if value is None}
    if arguments.json:
        print_json({"source": source, "dtype": name, **values, "assumed": assumed, **dataclasses.asdict(step)})
    else:
        _show(described, step, less, training, memory, name)
        if assumed:
            print(f"Assumed: {', '.join(f'{key} {value}' for key, value in assumed.items())}")
    return 0


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

    weights = plan.muon_weights + plan.adamw_weights
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
    print(f"{source.title}, {plan.layout} on {ranks}: {LAYOUTS[plan.layout]}")
    by_muon = f"{plan.muon_weights:,} of them with Muon ({plan.muon_weights / max(weights, 1):.1%})"
    print(f"{weights:,} trained weights, {by_muon}")
    sides = {"Muon": plan.memory, "AdamW": plan.adamw_memory}
    print("per rank: mean (max)")
    rows: list[tuple[str, ...]] = [("", "Muon", "AdamW for everything")]
    tokens = f"{training.batch_size} x {training.sequence_length:,} tokens"
    tokens += ", checkpointed" if training.gradient_checkpointing else ", not checkpointed"
    rows.append((f"weights, trained in {dtype}", *(_spread(side.weights) for side in sides.values())))
    rows.append(("gradients", *(_spread(side.gradients) for side in sides.values())))
    dtypes = {source.config.momentum_dtype: 0, source.config.adamw_state_dtype: 0}
    label = f"optimizer state in {' and '.join(dtypes).replace('auto', 'fp32')}, AdamW's in "
    label += "fp32" if plan.layout.startswith("zero") else dtype
    rows.append((label, *(_spread(side.state) for side in sides.values())))
    if sum(plan.memory.host):
        rows.append(("optimizer state on the host", *(_spread(side.host) for side in sides.values())))
    if plan.memory.copies:
        rows.append(("copies of weights and gradients", *(_size(side.copies) for side in sides.values())))
    estimates = [side.activations for side in sides.values()]
    rows.append((f"activations, {tokens}", *("not estimated" if size is None else _size(size) for size in estimates)))
    rows.append(("temporary buffers of the step", *(_size(side.step) for side in sides.values())))
    rows.append(())
    rows.append(("peak in the backward pass", *(_size(side.in_backward) for side in sides.values())))
    rows.append(("peak at the step", *(_size(side.at_step) for side in sides.values())))
    rows.append(())
    rows.append(("sent per optimizer step", _spread(plan.sent_bytes), "0 B"))
    rows.append(("Newton-Schulz per step", _spread(plan.flops, "FLOP"), "0 FLOP"))
    _print_columns(rows)
    for name, side in sides.items() if memory is not None else ():
        free = (memory or 0) * 1e9 - side.peak
        words = f"fits, {_size(free)} left" if free >= 0 else f"does not fit: {_size(-free)} too much"
        if free < 0 and not training.gradient_checkpointing and plan.memory.activations is not None:
            peak = (less.memory if name == "Muon" else less.adamw_memory).peak
            would = "would fit" if peak <= (memory or 0) * 1e9 else "would not fit, either"
            words += f". With --gradient-checkpointing it {would}: {_size(peak)} (see docs/what-fits.md)"
        print(f"{memory:g} GB with {name}: {words}")
    print(f"Newton-Schulz balance: the busiest rank has {plan.balance:.2f} times the mean")
    shares = ", ".join(f"{plan.share(tokens):.2%} with {tokens:,}" for tokens in _TOKENS)
    print(f"Newton-Schulz share of the FLOPs of a training step, by its tokens: {shares}")
    for line in _NOTES:
        print(line)
    if plan.memory.activations is None:
        text = "Activations are estimated for decoders like Llama alone: here peaks are without them"
        print(text)
    for note in source.notes:
        print(note)


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of three columns, numbers to the right; an empty row is an empty line."""
    first, *others = (max(map(len, column)) for column in zip(*filter(None, rows), strict=True))
    for row in rows:
        print(
            "  ".join(
                text.rjust(width) if k else text.ljust(width)
                for k, (text, width) in enumerate(zip(row, (first, *others), strict=False))
            )
        )


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
