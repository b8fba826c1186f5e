"""Patches of hooks that a test applies to a module, and takes back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hf_muon import _autoload

_ABSENT = object()


@contextlib.contextmanager
def patched(patch: Any, module: ModuleType | SimpleNamespace) -> Iterator[None]:
    """Apply a patch to a module, and put back at the end what was there."""
    before = []

    def recording(module: Any) -> Iterator[_autoload.Change]:
        for owner, name, value in patch(module):
            if isinstance(owner, (dict, list)):
                before.append((owner, None, owner.copy()))
            else:
                before.append((owner, name, vars(owner).get(name, _ABSENT)))
            yield owner, name, value

    _autoload.apply(recording, module)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for owner, name, old in reversed(before):
            if name is None:
                owner.clear()
                (owner.update if isinstance(owner, dict) else owner.extend)(old)
            elif old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def imported(monkeypatch: pytest.MonkeyPatch, sources: Mapping[str, str | None], *, hooks: bool = True) -> ModuleType:
    """Import modules with these sources, under the hooks as a new process has them, and return the last one.

    Args:
        monkeypatch: takes everything back.
        sources: of the modules, in order; None for a module that cannot be imported.
        hooks: whether there are any.
    """
    monkeypatch.setattr(_autoload, "_states", {})
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
