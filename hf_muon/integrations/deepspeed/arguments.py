"""Arguments of `deepspeed.initialize`: read as DeepSpeed reads them, and checked first."""

from __future__ import annotations

import base64
import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from hf_muon.diagnostics.log import first_few
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.state import describe

CONFIG_NAMES = ("deepscale_config", "deepspeed_config")
"""Attributes of `args` in which DeepSpeed looks for a config; the first is its old name."""


def arguments_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a call gives, by name.

    Raises:
        TypeError: the function does not take them.
    """
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def muon_of(arguments: Mapping[str, Any]) -> Muon:
    """Return the optimizer of a call of `deepspeed.initialize`; if it is a function, its result.

    Raises:
        ValueError: no model, no Muon, a Muon that DeepSpeed steps already, or one over another model's parameters.
    """
    model, optimizer = arguments.get("model"), arguments.get("optimizer")
    if model is None:
        raise ValueError("model is missing: give the torch.nn.Module to train")
    if optimizer is not None and not isinstance(optimizer, Optimizer) and callable(optimizer):
        params = arguments.get("model_parameters")
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad] if params is None else params)
    if not isinstance(optimizer, Muon):
        value = "missing" if optimizer is None else f"of class {type(optimizer).__name__}"
        raise ValueError(
            f"optimizer is {value}, and hf_muon.integrations.deepspeed.initialize starts DeepSpeed with Muon. Give "
            "optimizer=hf_muon.build_optimizer(model), or call deepspeed.initialize for another optimizer"
        )
    if optimizer.partitioned.partitions is not None:
        raise ValueError("this Muon steps another DeepSpeed engine already. Build one for each engine")
    params_of_model = {id(param) for param in model.parameters()}
    foreign = [
        describe(group, i)
        for group in optimizer.param_groups
        for i, param in enumerate(group["params"])
        if id(param) not in params_of_model
    ]
    if foreign:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        raise ValueError(
            f"{len(foreign)} of the {count} parameters of this Muon are not parameters of the model that is given with "
            f"it: {first_few(foreign, 3)}. Build it over that model, when the model is complete: "
            "optimizer=hf_muon.build_optimizer(model)"
        )
    return optimizer


def config_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed config of a call of `deepspeed.initialize`, in whichever argument it is.

    Raises:
        ValueError: there is no config or more than one, or it cannot be read.
    """
    args = arguments.get("args")
    configs = {name: arguments.get(name) for name in ("config", "config_params")}
    configs |= {f"args.{name}": getattr(args, name, None) for name in CONFIG_NAMES}
    configs = {name: value for name, value in configs.items() if value is not None}
    if not configs:
        raise ValueError("DeepSpeed's config is missing: give config, a mapping or the path of a JSON file")
    if len(configs) > 1:
        raise ValueError(f"two DeepSpeed configs were given, {' and '.join(configs)}. Give one of them")
    ((name, config),) = configs.items()
    return read_config(config, name)


def read_config(config: Any, name: str = "config") -> dict[str, Any]:
    """Return a DeepSpeed config as a dict.

    Args:
        config: a mapping, the path of a JSON file, which may hold comments as Hjson does, or such a text in base64.
        name: name of the config in messages.

    Raises:
        ValueError: `config` is none of these.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, (str, os.PathLike)):
        raise ValueError(f"{name} is of type {type(config).__name__}. Give a mapping, or the path of a JSON file")
    import hjson  # type: ignore[import-not-found, unused-ignore]

    source = os.fspath(config)
    try:
        if os.path.exists(source):
            content = hjson.loads(Path(source).read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
        else:
            content = hjson.loads(base64.urlsafe_b64decode(source).decode("utf-8"))
    except (ValueError, OSError) as error:  # what hjson, base64 and decoding raise
        if os.path.exists(source):
            raise ValueError(f"{name}: {source} is not a JSON file: {error}") from error
        raise ValueError(f"{name} {source[:200]!r} is neither the path of a file nor JSON in base64") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{name} {source[:200]!r} holds {type(content).__name__}, not a mapping of options")
    return dict(content)


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{', '.join(sorted({n for n in names if names.count(n) > 1}))} appears more than once")
    return content


@contextlib.contextmanager
def without_config(args: Any) -> Iterator[None]:
    """Hide the config in `args` within the context: DeepSpeed accepts one config only."""
    configs = {name: getattr(args, name) for name in CONFIG_NAMES if getattr(args, name, None) is not None}
    for name in configs:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, config in configs.items():
            setattr(args, name, config)
