"""Arguments of `deepspeed.initialize`: read as DeepSpeed reads them, and checked first."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from hf_muon.diagnostics.log import first_few
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.state import describe


def with_muon(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the Muon that a function in its place makes.

    Raises:
        ValueError: no Muon, a Muon that DeepSpeed steps already, or one over another model's parameters.
    """
    model, optimizer = arguments["model"], arguments["optimizer"]
    if optimizer is not None and not isinstance(optimizer, Optimizer) and callable(optimizer):
        params = arguments["model_parameters"]
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad] if params is None else params)
    if not isinstance(optimizer, Muon):
        value = "missing" if optimizer is None else f"of class {type(optimizer).__name__}"
        raise ValueError(
            f"optimizer is {value}, and hf_muon.integrations.deepspeed.initialize starts DeepSpeed with Muon. Give "
            "optimizer=hf_muon.build_optimizer(model), or call deepspeed.initialize for another optimizer"
        )
    if optimizer.partitioned.partitions is not None:
        raise ValueError("this Muon steps another DeepSpeed engine already. Build one for each engine")
    params_of_model = set(model.parameters())
    foreign = [
        describe(group, i)
        for group in optimizer.param_groups
        for i, param in enumerate(group["params"])
        if param not in params_of_model
    ]
    if foreign:
        raise ValueError(
            f"this Muon steps {first_few(foreign, 3)}, and the model that is given with it has no such parameters. "
            "Build it over that model, when the model is complete: optimizer=hf_muon.build_optimizer(model)"
        )
    return {**arguments, "optimizer": optimizer}


def with_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with a config that can be changed: a copy of a mapping, or read from a file.

    Raises:
        ValueError: there is no config, or it cannot be read.
    """
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    args, config = arguments["args"], arguments["config"]
    if config is None and getattr(args, "deepspeed_config", None) is not None:
        config = args.deepspeed_config
        args = copy.copy(args)
        args.deepspeed_config = None  # DeepSpeed accepts one config only
    if isinstance(config, (str, os.PathLike)):
        import hjson  # type: ignore[import-not-found, unused-ignore]

        text = Path(config).read_text(encoding="utf-8")
        config = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    if not isinstance(config, Mapping):
        raise ValueError(
            f"DeepSpeed's config is of type {type(config).__name__}. Give a mapping of options, or the path of a JSON "
            "file that holds one"
        )
    return {**arguments, "args": args, "config": dict(config)}
