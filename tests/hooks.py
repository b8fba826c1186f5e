"""Patches of hooks that a test applies to a module, and takes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

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
