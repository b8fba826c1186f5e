"""What every integration writes in the same way: the optimizer's name, the mark of a patch, other packages' flags."""

from __future__ import annotations

import os
from enum import Enum
from typing import Any, TypeVar

NAME = "muon"
"""The value of `optim:` and of `optim_config: {name: ...}`."""
OWN_NAME = "hf_muon"
"""A second value for the same optimizer, which no other package has."""
NAMES = (NAME, OWN_NAME)
OURS = "_from_hf_muon"
"""Attribute of everything that this package has put into another one."""
TRAINER_LOG = "HF_MUON_TRAINER_LOG"
"""The environment variable that names a file, to which Trainer's logs are appended whatever the optimizer is."""

# The words that the other package itself reads as true.
_TRUE = {"accelerate": ("1", "true", "yes", "on"), "llamafactory": ("1", "true", "y")}

Patch = TypeVar("Patch")


def mark(patch: Patch) -> Patch:
    """Mark a function, class or enum member as put into another package by this one, and return it."""
    setattr(patch, OURS, True)
    return patch


def is_ours(value: Any) -> bool:
    """Return whether `value` is marked: the patch is in place already."""
    return bool(getattr(value, OURS, False))


def is_muon(optim: Any) -> bool:
    """Return whether a value of `optim:` asks for this package's optimizer, as text or as a member of an enum.

    A member of an enum is ours if this package has put it there, whatever its name is.
    """
    return is_ours(optim) if isinstance(optim, Enum) else optim in NAMES


def is_set(package: str, variable: str) -> bool:
    """Return whether an environment variable is true for the package that reads it.

    Variables of hf_muon itself are read by `diagnostics.log.is_on`.
    """
    return os.environ.get(variable, "").strip().lower() in _TRUE[package]
