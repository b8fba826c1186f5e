"""`hf-muon convert`: files in, one file out."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_muon.cli.console import fail

if TYPE_CHECKING:
    from hf_muon.convert.conversion import Conversion


def convert(
    source: Annotated[Path, typer.Argument(help="The state to convert, as torch.save wrote it.")],
    target: Annotated[Path, typer.Argument(help="Where to write the state that hf_muon loads.")],
    source_format: Annotated[
        str, typer.Option("--from", help="torch, llamafactory-v0, llamafactory-v1, moonlight or keller-jordan.")
    ],
    model: Annotated[Path, typer.Option(help="The model's directory, or its config.json. Weights are not read.")],
    optim_args: Annotated[str, typer.Option(help="Options of the run that goes on, as in TrainingArguments.")] = "",
    adamw: Annotated[Path | None, typer.Option(help="The state of the torch.optim.AdamW that ran beside.")] = None,
    names: Annotated[Path | None, typer.Option(help="A file with the names in SOURCE's order, one a line.")] = None,
    in_model_order: Annotated[
        bool, typer.Option("--in-model-order", help="SOURCE's groups each keep the model's order.")
    ] = False,
    momentum_form: Annotated[str | None, typer.Option(help="sgd or ema, where SOURCE does not tell.")] = None,
    momentum: Annotated[float | None, typer.Option(help="SOURCE's momentum, where it does not hold it.")] = None,
    accept_rerouted: Annotated[
        bool, typer.Option("--accept-rerouted", help="What changes halves starts from zero moments.")
    ] = False,
    accept_missing: Annotated[
        bool, typer.Option("--accept-missing", help="What SOURCE has no moments of starts from zero.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the code that comes with a model transformers does not know."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")] = False,
) -> None:
    """Convert the optimizer state of another Muon, with its momentum, into one that hf_muon loads.

    Moments carry over. Learning rates, decays and other options do not: they are those of --optim-args, because each
    Muon scales its learning rate by its own function of the shape. What differs from SOURCE is told.
    """
    try:
        if target.exists() and not overwrite:
            raise ValueError(f"{target} exists. Name another TARGET, or say --overwrite")
        if target.exists() and any(path and target.samefile(path) for path in (source, adamw)):
            raise ValueError(f"{target} is what is to be converted. Name another TARGET")
        if not target.parent.is_dir():
            raise ValueError(f"{target.parent} is not a directory")

        from hf_muon.build import build_optimizer
        from hf_muon.cli.model_source import model_from
        from hf_muon.convert.conversion import convert_state_dict
        from hf_muon.optim_args import parse_optim_args

        state, beside = _load(source), None if adamw is None else _load(adamw)
        listed = None if names is None else names.read_text(encoding="utf-8").split()
        if not model.exists():
            raise ValueError(f"{model} does not exist. --model is a model's directory, or its config.json")
        empty = model_from(model, trust_remote_code=trust_remote_code)
        optimizer = build_optimizer(empty, parse_optim_args(optim_args))
        done = convert_state_dict(
            state,
            empty,
            optimizer,
            source_format,
            adamw=beside,
            names=listed,
            in_model_order=in_model_order,
            momentum_form=momentum_form,
            momentum=momentum,
            accept_rerouted=accept_rerouted,
            accept_missing=accept_missing,
        )
        _save(done.state_dict, target, overwrite)
    except (ValueError, RuntimeError, OSError) as error:
        fail(_in_options(error))
    _report(done, target, len(state["param_groups"]))


def _in_options(error: Exception) -> str:
    """Return an error's sentence with this command's options in the place of Python's arguments."""
    arguments = r"\b(accept_rerouted|accept_missing|in_model_order|momentum_form)\b"
    return re.sub(arguments, lambda name: "--" + name[0].replace("_", "-"), str(error))


def _load(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read as a file of torch.save: {reason}") from error


def _save(state: Mapping[str, Any], target: Path, overwrite: bool) -> None:
    """Whole or not at all."""
    import torch

    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        torch.save(state, temporary)
        if target.exists() and not overwrite:
            raise ValueError(f"{target} has come to exist meanwhile. Name another TARGET, or say --overwrite")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _report(done: Conversion, target: Path, source_groups: int) -> None:
    from hf_muon.options.declaration import as_text
    from hf_muon.routing.parameters import folded

    moments = dict.fromkeys(done.carried[True], "momentum_buffer")
    moments |= dict.fromkeys(done.carried[False], "step, exp_avg, exp_avg_sq")
    moments |= {name: f"zero: {reason}" for name, reason in done.from_zero.items()}
    rows = Counter((folded(name), kept) for name, kept in moments.items())
    table = Table("parameters", "count", "moments", title=str(target), title_justify="left")
    for (name, kept), count in rows.items():
        table.add_row(name, str(count), kept)
    console = Console(soft_wrap=True)
    console.print(table)
    form = "a moving average, as here" if done.momentum_form == "ema" else "a decayed sum"
    times = " or ".join(f"{factor:.6g}" for factor in done.factors)
    console.print(f"Momentum in SOURCE: {form} ({done.momentum_form}), taken times {times}. Steps taken: {done.step}.")
    groups = done.state_dict["param_groups"]
    rates = ", ".join(f"{'muon' if g['use_muon'] else 'adamw'} {g['lr']:g} and {g['weight_decay']:g}" for g in groups)
    console.print(f"Learning rate and decay in TARGET, not SOURCE's but of --optim-args: {rates}.")
    if len(groups) != source_groups:
        console.print(
            f"A scheduler's state is not converted, and is per group: {len(groups)} here, {source_groups} there."
        )
    if done.other_options:
        text = ",".join(f"{name}={as_text(value)}" for name, value in done.other_options.items())
        console.print(f'SOURCE was written with other options. To go on with them: --optim-args "{text}"', markup=False)
