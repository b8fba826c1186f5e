"""The Muons of other programs, of the same name or beside it: a warning says which one runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from hf_muon._autoload import Change
from hf_muon.integrations.names import OWN_NAME

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


def warn_that_ours_runs(program: str, setting: str) -> None:
    """Log once, on rank 0, that this package's Muon runs where another program has one of the same name.

    Args:
        program: whose Muon does not run.
        setting: what asks for either.
    """
    from hf_muon.diagnostics.log import is_rank_zero, logger

    if setting in _warned or not is_rank_zero():
        return
    _warned.add(setting)
    logger().warning(
        "%s: this %s has a Muon of that name, too, with other rules and other rates; hf_muon's runs, because it is "
        "installed. To train with %s's, set HF_MUON_AUTOLOAD=0 in the environment. The name %s always means hf_muon's",
        setting,
        program,
        program,
        OWN_NAME,
    )


def patch_axolotl(module: ModuleType) -> Iterator[Change]:
    """Warn when axolotl makes the Muon of its `optimizer: muon`, in one process or over a device mesh."""
    factories = (module.MuonOptimizerFactory, getattr(module, "DistMuonOptimizerFactory", None))
    for factory in filter(None, factories):
        warning = ("axolotl", "optimizer: muon", f"write optimizer: {OWN_NAME}")
        yield factory, "__call__", _warning_first(factory.__call__, warning)


def patch_swift(module: ModuleType) -> Iterator[Change]:
    """Warn when ms-swift makes the Muon of its `--optimizer muon`."""
    kind = module.MuonOptimizerCallback
    warning = ("ms-swift", "--optimizer muon", f"write --optim {OWN_NAME} and remove --optimizer")
    yield kind, "create_optimizer", _warning_first(vars(kind)["create_optimizer"], warning)


def _warning_first(method: Callable[..., Any], warning: tuple[str, str, str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def warn_and_call(*args: Any, **kwargs: Any) -> Any:
        warn_of_other_muon(*warning)
        return method(*args, **kwargs)

    return warn_and_call
