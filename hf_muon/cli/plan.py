"""`hf-muon plan`: memory, traffic and work of a step, computed without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_muon.cli.console import console, fail, print_json
from hf_muon.cli.inspect import DEQUANTIZE_HELP, SOURCE_HELP, TRUST_HELP, refuse

if TYPE_CHECKING:
    from hf_muon.plan.step_plan import Plan

_TOKENS = (2**16, 2**18, 2**20, 2**22)
_DTYPES = ("fp32", "bf16")
_DEVICES = {"gpu": "bf16", "cpu": "fp32"}


def plan(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    layout: Annotated[str, typer.Option(help="single, ddp, fsdp, hsdp, zero1, zero2 or zero3.")] = "fsdp",
    ranks: Annotated[int, typer.Option(help="Number of processes, one per GPU.")] = 8,
    replicas: Annotated[int, typer.Option(help="Copies of the model under hsdp.")] = 2,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens per step: all ranks together, gradient accumulation included.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the stored weights, fp32 or bf16; mixed precision (bf16: true) stores fp32.")
    ] = "fp32",
    device: Annotated[
        str, typer.Option(help="Hardware to assume for ns_dtype=auto: gpu (bf16) or cpu (fp32).")
    ] = "gpu",
    optim_args: Annotated[
        str, typer.Option(help="Options of Muon, as in TrainingArguments. They override those of SOURCE.")
    ] = "",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help=TRUST_HELP)] = False,
    dequantize: Annotated[bool, typer.Option("--dequantize", help=DEQUANTIZE_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute memory, traffic and Newton-Schulz work per step, with the code that the step itself uses."""
    try:
        _check("dtype", dtype, _DTYPES)
        _check("device", device, tuple(_DEVICES))
        if tokens is not None and tokens < 1:
            raise ValueError(f"--tokens={tokens} is not valid: expected at least 1")

        from hf_muon.cli.model_source import read_source
        from hf_muon.math.precision import NS_DTYPES
        from hf_muon.plan.step_plan import plan_step

        described = read_source(source, optim_args, trust_remote_code=trust_remote_code, dequantize=dequantize)
        refuse(source, described.refusals)
        stored, computed = NS_DTYPES[dtype], NS_DTYPES[_DEVICES[device]]
        assert stored is not None
        assert computed is not None
        with console().status(f"planning {source} on {ranks} ranks"):
            step = plan_step(
                described.model, described.config, layout, ranks, replicas=replicas, dtype=stored, ns_dtype=computed
            )
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)
    shares = {count: step.share(count) for count in ([tokens] if tokens else _TOKENS)}
    if as_json:
        print_json(_as_json(source, step, shares))
    else:
        _show(source, step, shares, described.notes)


def _check(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"--{name}={value} is not valid. Valid: {', '.join(valid)}")


def _as_json(source: str, plan: Plan, shares: dict[int, float]) -> dict[str, Any]:
    return {
        "source": source,
        **dataclasses.asdict(plan),
        "adamw_sent_bytes": [0] * plan.ranks,
        "balance": plan.balance,
        "share_of_step": {str(tokens): share for tokens, share in shares.items()},
    }


def _show(source: str, plan: Plan, shares: dict[int, float], notes: Sequence[str]) -> None:
    from hf_muon.plan.step_plan import LAYOUTS

    screen = console()
    weights = plan.muon_weights + plan.adamw_weights
    screen.print(f"{source}, {plan.layout} on {plan.ranks} ranks: {LAYOUTS[plan.layout]}", markup=False)
    by_muon = f"{plan.muon_weights:,} of them with Muon ({plan.muon_weights / max(weights, 1):.1%})"
    screen.print(f"{weights:,} trained weights, {by_muon}")
    table = Table(title="per rank: mean (max)", title_justify="left")
    for heading in ("", "Muon", "AdamW for everything"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("optimizer state", _spread(plan.state_bytes), _spread(plan.adamw_state_bytes))
    table.add_row("sent per optimizer step", _spread(plan.sent_bytes), "0 B")
    table.add_row("Newton-Schulz per step", _spread(plan.flops, "FLOP"), "0 FLOP")
    table.add_row("peak temporary buffers", _size(plan.working_bytes), "0 B")
    screen.print(table)
    idle = sum(not flops for flops in plan.flops)
    waiting = f"; {idle} ranks have none" if idle else ""
    screen.print(f"Newton-Schulz balance: the busiest rank has {plan.balance:.2f} times the mean{waiting}")
    share = Table(title="Newton-Schulz share of a training step", title_justify="left")
    share.add_column("tokens per step", justify="right")
    share.add_column("share", justify="right")
    for tokens, fraction in shares.items():
        share.add_row(f"{tokens:,}", f"{fraction:.2%}")
    screen.print(share)
    screen.print(
        "Share of FLOPs: those of the busiest rank, relative to the model's matrix products with weights on as many "
        "ranks at the same speed. Attention scores, lookups and communication are not counted.",
        style="dim",
        highlight=False,
    )
    for note in notes:
        screen.print(note, style="yellow", markup=False, highlight=False)


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
