"""Facts for people, on rank 0, through logging."""

from __future__ import annotations

import logging
import os

import torch

# The second name is what LLaMA-Factory users may know from elsewhere.
VARIABLES = ("HF_MUON_DIAG", "LLAMAFACTORY_MUON_DIAG")


def wanted() -> bool:
    """Whether the user has asked for a report of the first step."""
    return any(os.environ.get(name, "").strip().lower() not in ("", "0", "false", "off", "no") for name in VARIABLES)


def is_rank_zero() -> bool:
    """Whether this process is the one that speaks; known from the launcher before process groups exist."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def logger() -> logging.Logger:
    """The package's logger. Where nobody has configured logging it writes to stderr, as transformers' does."""
    log = logging.getLogger("hf_muon")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s|%(name)s] %(message)s"))
        log.addHandler(handler)
        log.propagate = False  # logging configured later would write everything a second time
    return log
