"""The Muons of other programs, which run although hf_muon is installed: a warning says which one runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_muon.integrations.names import OWN_NAME, is_ours, mark

_warned: set[str] = set()


def warn_of_other_muon(program: str, setting: str, instead: str) -> None:
    """Log once, on rank 0, that another program's Muon runs.

    Args:
        program: whose Muon it is.
        setting: what asks for it.
        instead: what to write for this package's.
    """
    from hf_muon.diagnostics.log import is_rank_zero, logger

    if program in _warned or not is_rank_zero():
        return
    _warned.add(program)
    logger().warning(
        "%s asks for %s's own Muon, which runs now; hf_muon is installed and is not used. To train with hf_muon, %s",
        setting,
        program,
        instead,
    )


def patch_axolotl(module: ModuleType) -> Callable[[], None] | str | None:
    """Warn when axolotl makes the Muon of its `optimizer: muon`, in one process or over a device mesh."""
    return _warn_before(
        module,
        ("MuonOptimizerFactory.__call__", "DistMuonOptimizerFactory.__call__"),
        ("axolotl", "optimizer: muon", f"write optimizer: {OWN_NAME}"),
    )


def patch_swift(module: ModuleType) -> Callable[[], None] | str | None:
    """Warn when ms-swift makes the Muon of its `--optimizer muon`."""
    return _warn_before(
        module,
        ("MuonOptimizerCallback.create_optimizer",),
        ("ms-swift", "--optimizer muon", f"write --optim {OWN_NAME} and remove --optimizer"),
    )


def _warn_before(
    module: ModuleType, methods: tuple[str, ...], warning: tuple[str, str, str]
) -> Callable[[], None] | str | None:
    """Patch methods of a module's classes to warn when they are called; classes that it lacks are left out."""
    originals = []
    for path in methods:
        kind, _, name = path.partition(".")
        owner = getattr(module, kind, None)
        method = None if owner is None else vars(owner).get(name)
        if is_ours(method):
            return None
        if method is not None:
            originals.append((owner, name, method))
            setattr(owner, name, mark(_warning_first(method, warning)))
    if not originals:
        return f"not patched: {module.__name__} has none of {', '.join(methods)}, where a warning would stand"

    def undo() -> None:
        for owner, name, method in originals:
            setattr(owner, name, method)

    return undo


def _warning_first(method: Callable[..., Any], warning: tuple[str, str, str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def warn_and_call(*args: Any, **kwargs: Any) -> Any:
        warn_of_other_muon(*warning)
        return method(*args, **kwargs)

    return warn_and_call
