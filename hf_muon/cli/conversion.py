"""`hf-muon convert`: convert the state file of another Muon."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_muon.cli.console import TrustOption, console, fail


def convert(
    source: Annotated[Path, typer.Argument(help="The state to convert, or a checkpoint that holds an `optimizer`.")],
    target: Annotated[Path, typer.Argument(help="Where to write the state that hf_muon loads.")],
    source_format: Annotated[str, typer.Option("--from", help="torch, llamafactory-v0, llamafactory-v1 or deepspeed.")],
    model: Annotated[Path, typer.Option(help="The model's directory, or its config.json. Weights are not read.")],
    optim_args: Annotated[str, typer.Option(help="Options of the run that continues, as in TrainingArguments.")] = "",
    adamw: Annotated[
        Path | None, typer.Option(help="State of the torch.optim.AdamW that trained the other parameters.")
    ] = None,
    names: Annotated[
        Path | None, typer.Option(help="File with the parameter names in SOURCE's order, one per line.")
    ] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Convert the optimizer state of another Muon, with its momentum, into one that hf_muon loads.

    Moments carry over. Learning rates, decays and other options come from --optim-args, because each Muon scales its
    learning rate by its own function of the shape. Differences from SOURCE are printed.
    """
    try:
        if target.exists():
            raise ValueError(f"{target} exists. Name another TARGET [target-exists]")
        import torch

        from hf_muon.build import log_routes, muon_of
        from hf_muon.cli.model_source import model_from
        from hf_muon.config import MuonConfig
        from hf_muon.convert import convert_state_dict
        from hf_muon.integrations.archives import complete_or_absent
        from hf_muon.optim_args import parse_optim_args
        from hf_muon.optimizer.state import ALGORITHM
        from hf_muon.routing.route import route_parameters

        state, adamw_state = _load(source), None if adamw is None else _load(adamw)
        listed = None if names is None else names.read_text(encoding="utf-8").split()
        empty = model_from(model, trust_remote_code=trust_remote_code)
        config = MuonConfig.from_mapping(parse_optim_args(optim_args))
        routes = route_parameters(empty, config)
        optimizer = muon_of(empty, routes, config)
        converted = convert_state_dict(state, empty, optimizer, source_format, adamw=adamw_state, names=listed)
        with complete_or_absent(target) as file:
            torch.save(converted, file)
        log_routes(routes)
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)
    count = sum(route.use_muon for route in routes)
    groups = converted["param_groups"]
    rates = dict.fromkeys(f"{ALGORITHM[g['use_muon']]} {g['lr']:g} and {g['weight_decay']:g}" for g in groups)
    source_options = dict.fromkeys(
        ", ".join(f"{name}={value}" for name, value in group.items() if name[:5] != "param")
        for group in state["param_groups"]
    )
    console().print(
        f"{target}: the moments of {count} parameters with Muon and {len(routes) - count} with AdamW, after "
        f"{groups[0]['step']} steps, in {len(groups)} param groups.\n"
        f"Their options are those of --optim-args; learning rate and weight decay: {', '.join(rates)}.\n"
        f"Those of SOURCE are {'; '.join(source_options)}. The page docs/migrating.md says what they are here."
    )


def _load(path: Path) -> Any:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read as a file of torch.save: {reason} [unreadable-checkpoint]") from error
    for entry in ("optimizer", "optimizer_state_dict"):  # the second within the first in DeepSpeed's bf16 and fp16
        if isinstance(content, Mapping) and isinstance(content.get(entry), Mapping):
            content = content[entry]
    return content
