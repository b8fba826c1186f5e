"""Muon as the optimizer that DeepSpeed ZeRO wraps.

ZeRO calls its optimizer once per optimizer step, after it has unscaled and clipped the gradients, on flat fp32
partitions that it has put into the param groups. `partitions` reads from ZeRO's own optimizers which slices of which
matrices a partition holds, and compares values to prove it before the first step.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from hf_muon.integrations.deepspeed.arguments import with_config, with_muon
from hf_muon.integrations.deepspeed.gradients import hide_name
from hf_muon.integrations.deepspeed.loading import check_before_loading
from hf_muon.integrations.deepspeed.partitions import read_partitions
from hf_muon.integrations.deepspeed.refusals import engine_complaint, refuse_config, refuse_momentum
from hf_muon.integrations.deepspeed.saving import write_latest_last
from hf_muon.integrations.ulysses.gradients import average_over_all_ranks
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.partitioned import attach_partitions, expect_partitions
from hf_muon.versions import refuse_older


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Start DeepSpeed with a `Muon`, for scripts without accelerate and Trainer.

    Args:
        *args, **kwargs: those of `deepspeed.initialize`; `optimizer` is a Muon over the model's parameters, as
            `build_optimizer` returns it, or a function that returns one.

    Returns:
        Engine, optimizer, data loader and scheduler, like `deepspeed.initialize`.

    Raises:
        ValueError: `optimizer` is no Muon over this model, or there is no config.
        RuntimeError: Muon does not run with the config or with this DeepSpeed.
    """
    import deepspeed

    call = inspect.signature(deepspeed.initialize).bind(*args, **kwargs)
    call.apply_defaults()
    arguments = with_muon(with_config(call.arguments))
    optimizer = arguments["optimizer"]
    with wrapping(optimizer, arguments["config"]):
        started: tuple[Any, Any, Any, Any] = deepspeed.initialize(**arguments)
        attach(started[0], optimizer)
    return started


@contextlib.contextmanager
def wrapping(optimizer: Muon, config: MutableMapping[str, Any]) -> Iterator[None]:
    """Prepare an optimizer and a config for DeepSpeed to wrap; `attach` must follow within the context.

    Raises:
        RuntimeError: Muon does not run with the config, or with a DeepSpeed as old as this.
    """
    refuse_older("deepspeed")
    refuse_config(config)
    refuse_momentum(optimizer, config)
    # Without the first option, ZeRO refuses any optimizer but its own. The second is true by default, and accelerate
    # then silently replaces an offloaded optimizer by DeepSpeedCPUAdam.
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    hide_name(optimizer)
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
            '"optimizer" from its config, and set "zero_force_ds_cpu_optimizer" to false'
        )
    refuse_config(engine.config)
    refuse_momentum(optimizer, engine.config)
    if complaint := engine_complaint(engine):
        raise RuntimeError(f"Muon does not run with {complaint}")
    average_over_all_ranks(engine, optimizer)
    partitions = read_partitions(engine, torch.device(get_accelerator().current_device_name()))
    hide_name(optimizer)
    # In ZeRO-0 every rank has whole parameters or fp32 copies of them.
    attach_partitions(optimizer, partitions, replicate_group=engine.seq_data_parallel_group)
    check_before_loading(engine, optimizer)
    write_latest_last(engine, optimizer)
