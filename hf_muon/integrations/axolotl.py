"""axolotl's log shows messages of its own loggers, and warnings of others; here it shows the table of routes, too."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hf_muon._autoload import Change
from hf_muon.integrations.names import OWN_NAME


def patch_log_filter(module: ModuleType) -> Iterator[Change]:
    """Let the filter in axolotl.logging_config treat messages of hf_muon as it treats axolotl's own.

    They are few, and the table of routes is how a user sees that Muon runs.
    """
    original = module.AxolotlOrWarnErrorFilter.filter

    @functools.wraps(original)
    def filter_record(self: Any, record: logging.LogRecord) -> Any:
        ours = record.name.split(".")[0] == OWN_NAME
        return (ours and record.levelno >= getattr(self, "axolotl_level", logging.INFO)) or original(self, record)

    yield module.AxolotlOrWarnErrorFilter, "filter", filter_record
