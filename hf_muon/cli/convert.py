"""`hf-muon convert`: files of another Muon's state in, one file out."""

from __future__ import annotations

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
    optim_args: Annotated[str, typer.Option(help="Options of the run that continues, as in TrainingArguments.")] = "",
    adamw: Annotated[
        Path | None, typer.Option(help="State of the torch.optim.AdamW that trained the other parameters.")
    ] = None,
    names: Annotated[
        Path | None, typer.Option(help="File with the parameter names in SOURCE's order, one per line.")
    ] = None,
    in_model_order: Annotated[
        bool, typer.Option("--in-model-order", help="Each of SOURCE's param groups keeps the model's order.")
    ] = False,
    momentum_form: Annotated[str | None, typer.Option(help="sgd or ema, if SOURCE does not say.")] = None,
    momentum: Annotated[float | None, typer.Option(help="SOURCE's momentum, if SOURCE does not hold it.")] = None,
    accept_rerouted: Annotated[
        bool,
        typer.Option("--accept-rerouted", help="Parameters that move between Muon and AdamW start from zero moments."),
    ] = False,
    accept_missing: Annotated[
        bool, typer.Option("--accept-missing", help="Parameters without moments in SOURCE start from zero moments.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the code that comes with a model transformers does not know."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")] = False,
) -> None:
    """Convert the optimizer state of another Muon, with its momentum, into one that hf_muon loads.

    Moments carry over. Learning rates, decays and other options come from --optim-args, because each Muon scales its
    learning rate by its own function of the shape. Differences from SOURCE are printed.
    """
    try:
        if target.exists() and not overwrite:
            raise ValueError(f"{target} exists. Name another TARGET, or say --overwrite")
        if target.exists() and any(path and target.samefile(path) for path in (source, adamw)):
            raise ValueError(f"{target} is also a source. Name another TARGET")
        if not target.parent.is_dir():
            raise ValueError(f"{target.parent} is not a directory")

        from hf_muon.build import as_config, groups_of, log_routes, muon_options, require_muon
        from hf_muon.cli.model_source import model_from
        from hf_muon.convert.conversion import convert_state_dict
        from hf_muon.convert.formats import format_of
        from hf_muon.optim_args import parse_optim_args
        from hf_muon.optimizer.muon import Muon
        from hf_muon.routing.route import route_parameters

        format_of(source_format)
        state, beside = _load(source), None if adamw is None else _load(adamw)
        listed = None if names is None else names.read_text(encoding="utf-8").split()
        if not model.exists():
            raise ValueError(f"{model} does not exist. --model is a model's directory, or its config.json")
        empty = model_from(model, trust_remote_code=trust_remote_code)
        config = as_config(parse_optim_args(optim_args))
        routes = route_parameters(empty, config)
        require_muon(routes, type(empty).__name__)
        optimizer = Muon(groups_of(routes, config), **muon_options(config))
        conversion = convert_state_dict(
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
        _save(conversion.state_dict, target, overwrite)
        log_routes(routes)
    except (ValueError, RuntimeError, OSError) as error:
        fail(_in_options(error))
    _report(conversion, target, len(state["param_groups"]))


def _in_options(error: Exception) -> str:
    """Return the text of an error, with this command's options in place of Python arguments."""
    arguments = (
        r"\b(accept_rerouted|accept_missing|in_model_order|momentum_form)\b|(?<=\()adamw(?=\))|\badamw(?=: a state)"
        r"|\bnames(?=: |, in )|(?<=give )names|(?<=say )momentum$"
    )
    return re.sub(arguments, lambda name: "--" + name[0].replace("_", "-"), str(error))


def _load(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read as a file of torch.save: {reason}") from error


def _save(state: Mapping[str, Any], target: Path, overwrite: bool) -> None:
    """Write the file completely or not at all."""
    import torch

    from hf_muon.integrations.archives import complete_or_absent

    with complete_or_absent(target) as file:
        torch.save(state, file)
        if target.exists() and not overwrite:
            raise ValueError(f"{target} was created meanwhile. Name another TARGET, or say --overwrite")


def _report(conversion: Conversion, target: Path, source_groups: int) -> None:
    from hf_muon.options.declaration import as_text
    from hf_muon.routing.parameters import folded

    moments = dict.fromkeys(conversion.carried[True], "momentum_buffer")
    moments |= dict.fromkeys(conversion.carried[False], "step, exp_avg, exp_avg_sq")
    moments |= {name: f"zero: {reason}" for name, reason in conversion.from_zero.items()}
    rows = Counter((folded(name), source) for name, source in moments.items())
    table = Table("parameters", "count", "moments", title=str(target), title_justify="left")
    for (name, source), count in rows.items():
        table.add_row(name, str(count), source)
    console = Console(soft_wrap=True)
    console.print(table)
    form = "a moving average, as here" if conversion.momentum_form == "ema" else "a decayed sum"
    times = " or ".join(f"{factor:.6g}" for factor in conversion.factors)
    console.print(
        f"Momentum in SOURCE: {form} ({conversion.momentum_form}), taken times {times}. Steps taken: {conversion.step}."
    )
    groups = conversion.state_dict["param_groups"]
    rates = ", ".join(f"{'muon' if g['use_muon'] else 'adamw'} {g['lr']:g} and {g['weight_decay']:g}" for g in groups)
    console.print(f"Learning rate and decay in TARGET, not SOURCE's but of --optim-args: {rates}.")
    if len(groups) != source_groups:
        console.print(
            f"A scheduler's state is not converted, and is per group: {len(groups)} here, {source_groups} there."
        )
    if conversion.other_options:
        text = ",".join(f"{name}={as_text(value)}" for name, value in conversion.other_options.items())
        console.print(f'SOURCE was written with other options. To go on with them: --optim-args "{text}"', markup=False)
