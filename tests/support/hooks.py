"""Patches of hooks that a test applies to a module, and takes back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hf_muon import _autoload
from hf_muon.integrations import names


@contextlib.contextmanager
def patched(patch: Any, module: ModuleType | SimpleNamespace) -> Iterator[None]:
    """Apply a patch to a module, and put back at the end what was there."""
    with contextlib.ExitStack() as stack:
        undo = stack.enter_context(pytest.MonkeyPatch.context())
        for owner, name, value in list(patch(module)):
            if isinstance(owner, list):
                stack.callback(owner.__setitem__, slice(None), owner.copy())
                owner[name] = value
            elif isinstance(owner, dict):
                undo.setitem(owner, name, value)
            else:
                undo.setattr(owner, name, value, raising=False)
        yield


def imported(monkeypatch: pytest.MonkeyPatch, sources: Mapping[str, str | None], *, hooks: bool = True) -> ModuleType:
    """Import modules with these sources, under the hooks as a new process has them, and return the last one.

    Args:
        monkeypatch: takes everything back.
        sources: of the modules, in order; None for a module that cannot be imported.
        hooks: whether there are any.
    """
    monkeypatch.setattr(_autoload, "_states", {})
    monkeypatch.setitem(names.TAKEN, names.V1, False)
    del names.TAKEN[names.V1]
    for name, source in sources.items():
        if source is None:
            monkeypatch.setitem(sys.modules, name, None)
            continue
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, name, "exec", dont_inherit=True), vars(module))
        if hooks:
            _autoload.install()
    return module
