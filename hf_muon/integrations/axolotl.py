"""axolotl's log shows messages of its own loggers, and warnings of others; here it shows the table of routes, too."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_muon.integrations.names import OWN_NAME, is_ours, mark

_FILTER = "AxolotlOrWarnErrorFilter"


def patch_log_filter(module: ModuleType) -> Callable[[], None] | str | None:
    """Let the filter in axolotl.logging_config treat messages of hf_muon as it treats axolotl's own.

    They are few, and the table of routes is how a user sees that Muon runs.
    """
    kind = getattr(module, _FILTER, None)
    if kind is None or not hasattr(kind, "filter"):
        return f"not patched: {module.__name__} has no {_FILTER}; LOG_LEVEL=INFO shows the messages of hf_muon"
    original = kind.filter
    if is_ours(original):
        return None

    @functools.wraps(original)
    def filter_record(self: Any, record: logging.LogRecord) -> Any:
        ours = record.name.split(".")[0] == OWN_NAME
        return (ours and record.levelno >= getattr(self, "axolotl_level", logging.INFO)) or original(self, record)

    kind.filter = mark(filter_record)

    def undo() -> None:
        kind.filter = original

    return undo
