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

# The values that the other package reads as true.
_TRUE = {"accelerate": ("1", "true", "yes", "on"), "llamafactory": ("1", "true", "y")}


def is_muon(optim: Any) -> bool:
    """Return whether a value of `optim:` asks for this package's optimizer, as text or as a member of an enum."""
    value = optim.value if isinstance(optim, Enum) else optim
    return isinstance(value, str) and value in NAMES


def innermost(optimizer: Any) -> Any:
    """Return an optimizer without the wrappers of accelerate and ZeRO."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def muons_in(values: Iterable[Any]) -> list[Any]:
    """Return each `Muon` among values, unwrapped."""
    room = sys.modules.get("hf_muon.optimizer.muon")  # never imported: then no value is a Muon
    if room is None:
        return []
    from torch.optim import Optimizer

    bare = [innermost(value) for value in values if isinstance(value, Optimizer)]
    return [optimizer for optimizer in bare if isinstance(optimizer, room.Muon)]


def refuse_failed(*names: str, one_is_needed: bool = False) -> None:
    """Raise if one of these hooks has failed, because a run would not be what its arguments ask for.

    Args:
        *names: of hooks.
        one_is_needed: raise if none is in place once their modules are imported; the others may have failed.

    Raises:
        RuntimeError: a hook, what is lost with it, and why it is not in place.
    """
    for name in names if one_is_needed else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(HOOKS[name].module)
    states = {name: status()[name] for name in names}
    wrong = [name for name in names if states[name].startswith("failed")]
    if one_is_needed:
        wrong = [] if "patched" in states.values() else wrong or [*names]
    if wrong:
        raise not_in_place(wrong[0], states[wrong[0]])


def not_in_place(name: str, reason: str) -> RuntimeError:
    """Return the error of a run of Muon that needs a hook which is not in place."""
    return RuntimeError(
        f"Muon refuses this run, because hf_muon's hook {name!r} into {HOOKS[name].module} is not in place ({reason}): "
        f"{HOOKS[name].lost}. Use versions that hf_muon was tested with, as its README lists them, or another "
        "optimizer [hook-not-in-place]"
    )


def warn_that_ours_runs(program: str, setting: str) -> None:
    """Log once, on rank 0, that this package's Muon runs in place of the one of another program.

    Args:
        program: whose Muon does not run.
        setting: what asks for either.
    """
    warn_once(
        f"{setting}: this {program} has a Muon of that name, too, with other rules and other rates; hf_muon's runs, "
        f"because it is installed. To train with {program}'s, set HF_MUON_AUTOLOAD=0 in the environment. The name "
        f"{OWN_NAME} always means hf_muon's [another-muon]"
    )


def warn_of_lost_moments(optimizer: Any, steps: int, program: str, files: str) -> None:
    """Log a warning if a resumed run has loaded no step of a `Muon`.

    Args:
        optimizer: of any kind, wrapped or not, after the checkpoint was loaded.
        steps: that the run has taken, by its own count.
        program: that loads.
        files: of a checkpoint that hold the optimizer's state.
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
