"""Arguments of `deepspeed.initialize`: read as DeepSpeed reads them, and checked first."""

from __future__ import annotations

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
    """Return the DeepSpeed config of a call of `deepspeed.initialize`, from `config` or `args.deepspeed_config`.

    It is a mapping, or the path of a JSON file, which may hold comments as Hjson does.

    Raises:
        ValueError: there is no config or more than one, or it cannot be read.
    """
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    given = [arguments.get("config"), getattr(arguments.get("args"), "deepspeed_config", None)]
    configs = [config for config in given if config is not None]
    if len(configs) != 1:
        raise ValueError(
            f"{len(configs)} DeepSpeed configs were given, in config and args.deepspeed_config. Give one: a mapping, "
            "or the path of a JSON file"
        )
    config = configs[0]
    if isinstance(config, (str, os.PathLike)):
        import hjson  # type: ignore[import-not-found, unused-ignore]

        try:
            text = Path(config).read_text(encoding="utf-8")
            config = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
        except (ValueError, OSError) as error:  # of reading, of decoding, of hjson and of DeepSpeed
            raise ValueError(
                f"DeepSpeed's config {str(config)[:200]} cannot be read as a JSON file: {error}"
            ) from error
    if not isinstance(config, Mapping):
        raise ValueError(f"DeepSpeed's config is of type {type(config).__name__}. Give a mapping of options")
    return dict(config)


@contextlib.contextmanager
def without_config(args: Any) -> Iterator[None]:
    """Hide the config in `args` within the context: DeepSpeed accepts one config only."""
    config = getattr(args, "deepspeed_config", None)
    if config is None:
        yield
        return
    args.deepspeed_config = None
    try:
        yield
    finally:
        args.deepspeed_config = config
