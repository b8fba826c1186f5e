"""Logging on rank 0, and the environment variables that control it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

REPORT = "HF_MUON_STEP_REPORT"
EVERY = "HF_MUON_DIAGNOSTICS_EVERY"
# The metrics of a run, in its output directory.
FILE = "muon_diagnostics.jsonl"
# Named as in the pull request to LLaMA-Factory.
OF_LLAMAFACTORY = "LLAMAFACTORY_MUON_DIAG"
_OFF = ("0", "false", "off", "no")


def report_wanted() -> bool:
    """Return whether the user has asked for a report of the first step."""
    return is_on(REPORT, unset=is_on(OF_LLAMAFACTORY))


def every_from_environment() -> int:
    """Return the number of steps between lines of metrics from the environment; 0 for no metrics.

    Raises:
        ValueError: the value is neither a number of steps nor a known word for no metrics.
    """
    text = _text(EVERY)
    if not is_on(EVERY):
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"{EVERY}={text} is not valid. Valid: a number of steps, 0 or off for never [invalid-value]")
    return int(text)


def _text(variable: str) -> str:
    return os.environ.get(variable, "").strip().lower()


def is_on(variable: str, *, unset: bool = False) -> bool:
    """Return whether an environment variable is on: set to anything but 0, false, off and no.

    Args:
        variable: name of a variable of hf_muon; other packages read theirs differently.
        unset: the result if the variable is empty or not set.
    """
    text = _text(variable)
    return text not in _OFF if text else unset


def has_process_group() -> bool:
    """Return whether this process is in torch.distributed's default process group, also for a torch without one."""
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_rank_zero() -> bool:
    """Return whether this process is the one that logs; before process groups exist, the launcher's RANK decides."""
    import torch

    if has_process_group():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def logger() -> logging.Logger:
    """Return the logger of hf_muon, which writes to stderr unless the user configures logging, as transformers does."""
    log = logging.getLogger("hf_muon")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s|%(name)s] %(message)s"))
        log.addHandler(handler)
        log.propagate = False  # otherwise, logging that is configured later would write everything twice
    return log


def first_few(items: Iterable[str], limit: int = 5, separator: str = ", ") -> str:
    """Join the first few items and count the rest, as in "a, b, and 3 more"."""
    items = list(items)
    remark = [f"and {len(items) - limit} more"] if len(items) > limit else []
    return separator.join(items[:limit] + remark)
