"""Muon as the optimizer that DeepSpeed ZeRO wraps.

ZeRO calls its optimizer once per optimizer step, after it has unscaled and clipped the gradients, on flat fp32
partitions that it has put into the param groups. `zero_layout` reads from ZeRO's own optimizers which slices of which
matrices a partition holds, and compares values before the first step to verify that.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from hf_muon.diagnostics.log import first_few
from hf_muon.integrations.deepspeed.gradients import hide_name
from hf_muon.integrations.deepspeed.loading import check_before_loading
from hf_muon.integrations.deepspeed.refusals import engine_complaint, refuse_config, refuse_momentum
from hf_muon.integrations.deepspeed.saving import write_latest_last
from hf_muon.integrations.deepspeed.zero_layout import read_partitions
from hf_muon.integrations.ulysses.gradients import average_over_all_ranks
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.partitioned import attach_partitions, expect_partitions
from hf_muon.optimizer.state import describe
from hf_muon.versions import refuse_older


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Start DeepSpeed with a `Muon`, for scripts without accelerate and Trainer.

    Args:
        *args, **kwargs: those of `deepspeed.initialize`; `optimizer` is a Muon over the model's parameters, as
            `build_optimizer` returns it, or a function that returns one.

    Returns:
        Engine, optimizer, data loader and scheduler, like `deepspeed.initialize`.

    Raises:
        ValueError: `optimizer` is not a Muon over this model, or the config is missing.
        RuntimeError: Muon does not run with the config or with this DeepSpeed.
    """
    import deepspeed

    call = inspect.signature(deepspeed.initialize).bind(*args, **kwargs)
    call.apply_defaults()
    arguments = _with_muon(_with_config(call.arguments))
    optimizer = arguments["optimizer"]
    with wrapping(optimizer, arguments["config"]):
        started: tuple[Any, Any, Any, Any] = deepspeed.initialize(**arguments)
        attach(started[0], optimizer)
    return started


def _with_muon(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with `optimizer` as a Muon; call it if it is a function that returns one.

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
            "optimizer=hf_muon.build_optimizer(model), or call deepspeed.initialize for another optimizer [not-muon]"
        )
    if optimizer.partitioned.partitions is not None:
        raise ValueError("this Muon steps another DeepSpeed engine already. Build one for each engine [second-engine]")
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
            "Build it over that model, when the model is complete: optimizer=hf_muon.build_optimizer(model) "
            "[foreign-model]"
        )
    return {**arguments, "optimizer": optimizer}


def _with_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with a config that can be changed: a copy of a mapping, or read from a file.

    Raises:
        ValueError: the config is missing, or it cannot be read.
    """
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    args, config = arguments["args"], arguments["config"]
    if config is None and getattr(args, "deepspeed_config", None) is not None:
        config = args.deepspeed_config
        args = copy.copy(args)
        args.deepspeed_config = None  # DeepSpeed accepts one config only
    if isinstance(config, (str, os.PathLike)):
        import hjson

        text = Path(config).read_text(encoding="utf-8")
        # As DeepSpeed reads files: with comments, and without two keys of one name.
        config = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    if not isinstance(config, Mapping):
        raise ValueError(
            f"DeepSpeed's config is of type {type(config).__name__}. Give a mapping of options, or the path of a JSON "
            "file that holds one [not-a-mapping]"
        )
    return {**arguments, "args": args, "config": dict(config)}


@contextlib.contextmanager
def wrapping(optimizer: Muon, config: MutableMapping[str, Any]) -> Iterator[None]:
    """Prepare an optimizer and a config for DeepSpeed to wrap; `attach` must follow within the context.

    Raises:
        RuntimeError: Muon does not run with the config, or DeepSpeed is too old.
    """
    refuse_older("deepspeed")
    refuse_config(config)
    refuse_momentum(optimizer, config)
    # Without the first option, ZeRO refuses optimizers of others. The second is true by default, and accelerate
    # then silently replaces an offloaded optimizer by DeepSpeedCPUAdam.
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    hide_name(optimizer)
    # Before `attach` DeepSpeed takes a step, to make the state.
    expect_partitions(optimizer, "DeepSpeed")
    yield


def attach(engine: Any, optimizer: Muon) -> None:
    """Give the optimizer the layout in which DeepSpeed stores its parameters. All ranks must call this together.

    Raises:
        RuntimeError: the engine steps with another optimizer, or stores parameters in an unknown way.
    """
    from deepspeed.accelerator import get_accelerator

    wrapper = engine.optimizer
    inner = wrapper if isinstance(wrapper, Muon) else getattr(wrapper, "optimizer", None)
    if inner is not optimizer:
        raise RuntimeError(
            f"DeepSpeed steps with {type(inner).__name__}, and not with the Muon that it was given. Remove "
            '"optimizer" from its config, and set "zero_force_ds_cpu_optimizer" to false [other-optimizer]'
        )
    if complaint := engine_complaint(engine):
        raise RuntimeError(f"Muon does not run with {complaint}")
    average_over_all_ranks(engine, optimizer)
    partitions = read_partitions(engine, torch.device(get_accelerator().current_device_name()))
    # In ZeRO-0 every rank has whole parameters or fp32 copies of them.
    attach_partitions(optimizer, partitions, replicate_group=engine.seq_data_parallel_group)
    check_before_loading(engine, optimizer)
    write_latest_last(engine, optimizer)
