"""Helpers of all integrations: the optimizer's name, failed hooks, warnings, flags of other packages."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterable
from enum import Enum
from typing import Any

from hf_muon._autoload import HOOKS, status
from hf_muon.diagnostics.log import is_rank_zero, logger

NAME = "muon"
"""The value of `optim:` and of `optim_config: {name: ...}`."""
OWN_NAME = "hf_muon"
"""A second value for the same optimizer, which no other package has."""
NAMES = (NAME, OWN_NAME)
TRANSFORMERS, V1 = "transformers", "LLaMA-Factory v1"
TAKEN: dict[str, bool] = {}
"""Whether `muon` is a program's own optimizer, by program; written by the hook that registers our names there."""

_REGISTERING = {TRANSFORMERS: ("optim: muon",), V1: ("LLaMA-Factory v1's optimizers", "newer v1's optimizers")}

# The values that the other package reads as true.
_TRUE = {"accelerate": ("1", "true", "yes", "on"), "llamafactory": ("1", "true", "y")}


def is_muon(optim: Any, program: str = TRANSFORMERS) -> bool:
    """Return whether a program makes this package's optimizer for a value of `optim:`.

    For `hf_muon` it always does; for `muon` unless it has an optimizer of that name. A program that is not installed
    here is taken to have none.

    Args:
        optim: text or a member of an enum.
        program: a key of `TAKEN`.
    """
    value = optim.value if isinstance(optim, Enum) else optim
    if value != NAME:
        return bool(value == OWN_NAME)
    if TAKEN.get(program, True):
        _import_modules_of(_REGISTERING[program])
    # Where the hook has failed, we have registered nothing: a `muon` that the program knows is its own.
    has_failed = any(status()[hook].startswith("failed") for hook in _REGISTERING[program])
    return not TAKEN.get(program, has_failed)


def warn_of_another_muon(optim: Any, program: str) -> None:
    """Log once, on rank 0, that `muon` is a program's own optimizer, if that is what a value of `optim:` asks for."""
    if getattr(optim, "value", optim) == NAME and TAKEN.get(program):
        warn_once(
            f"muon means an optimizer of {program}'s own here, which runs. To train with hf_muon's, write hf_muon in "
            "place of muon. Rules and rates of the two differ, and neither resumes from a checkpoint of the other "
            "[another-muon]"
        )


def _import_modules_of(hooks: Iterable[str]) -> None:
    for hook in hooks:
        with contextlib.suppress(Exception):  # a broken installation raises anything
            importlib.import_module(HOOKS[hook].module)


def innermost(optimizer: Any) -> Any:
    """Return an optimizer without the wrappers of accelerate and ZeRO, all of which call it `optimizer`."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def muons_in(values: Iterable[Any]) -> list[Any]:
    """Return each `Muon` among values, unwrapped."""
    module = sys.modules.get("hf_muon.optimizer.muon")  # never imported: then no value is a Muon
    if module is None:
        return []
    from torch.optim import Optimizer

    optimizers = [innermost(value) for value in values if isinstance(value, Optimizer)]
    return [optimizer for optimizer in optimizers if isinstance(optimizer, module.Muon)]


def refuse_failed(*names: str, one_is_needed: bool = False) -> None:
    """Raise if one of these hooks has failed, because a run would not be what its arguments ask for.

    Args:
        *names: hooks.
        one_is_needed: raise if none is in place once their modules are imported; the others may have failed.

    Raises:
        RuntimeError: a hook, what is lost with it, and why it is not in place.
    """
    if one_is_needed:
        _import_modules_of(names)
    states = {name: status()[name] for name in names}
    failed = [name for name in names if states[name].startswith("failed")]
    if one_is_needed:
        failed = [] if "patched" in states.values() else failed or [*names]
    if failed:
        raise not_in_place(failed[0], states[failed[0]])


def not_in_place(name: str, reason: str) -> RuntimeError:
    """Return the error of a run of Muon that needs a hook which is not in place."""
    return RuntimeError(
        f"Muon refuses this run, because hf_muon's hook {name!r} into {HOOKS[name].module} is not in place ({reason}): "
        f"{HOOKS[name].lost}. Use versions that hf_muon was tested with, as its README lists them, or another "
        "optimizer [hook-not-in-place]"
    )


def warn_of_lost_moments(optimizer: Any, steps: int, program: str, files: str) -> None:
    """Log a warning if a resumed run has loaded no step of a `Muon`.

    Args:
        optimizer: any, wrapped or not, after the checkpoint was loaded.
        steps: number of steps that the run has taken, by its own count.
        program: name of the program that loads.
        files: names of the files that hold the optimizer's state in a checkpoint.
    """
    taken = [group["step"] for muon in muons_in([optimizer]) for group in muon.param_groups]
    if steps and taken and not any(taken):
        warn(
            f"the moments start from zero: {program} has loaded no optimizer state from the checkpoint (it needs "
            f"{files}), or one in which fp16 had skipped every step. In the first case the run differs from one that "
            "was not interrupted [no-optimizer-state]"
        )


def warn(message: str) -> None:
    """Log a warning on rank 0."""
    if is_rank_zero():
        logger().warning(message)


warn_once = functools.cache(warn)


def is_set(package: str, variable: str) -> bool:
    """Return whether an environment variable is true for the package that reads it.

    Variables of hf_muon itself are read by `diagnostics.log.is_on`.
    """
    return os.environ.get(variable, "").strip().lower() in _TRUE[package]
