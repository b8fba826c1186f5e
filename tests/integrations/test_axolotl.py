"""axolotl's log, on a copy of the filter in its `axolotl.logging_config`."""

from __future__ import annotations

import io
import logging
from types import ModuleType

import pytest

from hf_muon._autoload import apply
from hf_muon.integrations.axolotl import patch_log_filter


@pytest.fixture
def module():
    """Return axolotl.logging_config: axolotl's own messages pass from INFO on, others from WARNING on."""

    class AxolotlOrWarnErrorFilter(logging.Filter):
        def __init__(self, level=logging.INFO):
            super().__init__()
            self.axolotl_level, self.other_level = level, logging.WARNING

        def filter(self, record):
            if record.levelno >= self.other_level:
                return True
            return record.name.startswith("axolotl") and record.levelno >= self.axolotl_level

    module = ModuleType("axolotl.logging_config")
    module.AxolotlOrWarnErrorFilter = AxolotlOrWarnErrorFilter
    return module


def shown(filter_, messages):
    """Return the lines that a handler with axolotl's filter writes."""
    handler = logging.StreamHandler(io.StringIO())
    handler.addFilter(filter_)
    handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
    for name, level in messages:
        record = logging.LogRecord(name, level, "", 0, logging.getLevelName(level), None, None)
        handler.handle(record)
    return handler.stream.getvalue().splitlines()


MESSAGES = [("hf_muon", logging.INFO), ("hf_muon", logging.DEBUG), ("trl", logging.INFO), ("hf_muonlike", logging.INFO)]


def test_messages_of_hf_muon_are_shown(module):
    filter_ = module.AxolotlOrWarnErrorFilter()  # axolotl makes it before its trainer is made
    assert shown(filter_, MESSAGES) == []
    apply(patch_log_filter, module)
    assert shown(filter_, [*MESSAGES, ("trl", logging.WARNING)]) == ["hf_muon INFO", "trl WARNING"]


def test_axolotls_own_level_holds(module):
    apply(patch_log_filter, module)
    assert shown(module.AxolotlOrWarnErrorFilter(logging.ERROR), MESSAGES) == []
