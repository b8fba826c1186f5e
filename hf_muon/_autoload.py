"""Lazy hooks: a few modules of other packages are patched right after their own import, and not before.

To add an integration, write its patch into `hf_muon/integrations` and name it in `HOOKS`. This module imports the
standard library only. A patch that fails leaves its module as it was, and `status` says why.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

HOOKS = {
    "transformers.training_args": "hf_muon.integrations.transformers.hooks:patch_training_args",
    "transformers.trainer_optimizer": "hf_muon.integrations.transformers.hooks:patch_trainer_optimizer",
    "transformers.trainer": "hf_muon.integrations.transformers.hooks:patch_trainer",
    "accelerate.accelerator": "hf_muon.integrations.accelerate:patch_accelerator",
    "torch.distributed.checkpoint.state_dict": "hf_muon.integrations.torch_states:patch_loading",
    "axolotl.logging_config": "hf_muon.integrations.axolotl:patch_log_filter",
    "axolotl.contribs.mit.muon": "hf_muon.integrations.other_muons:patch_axolotl",
    "swift.optimizers.muon": "hf_muon.integrations.other_muons:patch_swift",
    "timm.optim._optim_factory": "hf_muon.integrations.timm:patch_registry",
    "llamafactory.hparams.parser": "hf_muon.integrations.llamafactory.v0.hooks:patch_parser",
    "llamafactory.extras.ploting": "hf_muon.integrations.llamafactory.v0.hooks:patch_plots",
    "llamafactory.v1.config.training_args": "hf_muon.integrations.llamafactory.v1.hooks:patch_training_arguments",
    "llamafactory.v1.plugins.trainer_plugins.optimizer": "hf_muon.integrations.llamafactory.v1.hooks:patch_optimizers",
    "llamafactory.v1.plugins.trainer_plugins.optimizers.optimizer": (
        "hf_muon.integrations.llamafactory.v1.hooks:patch_optimizers"
    ),
    "llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2": (
        "hf_muon.integrations.llamafactory.v1.hooks:patch_checkpoints"
    ),
}
"""Each module to patch, and the function that patches it, which is called with the module.

The function returns how to undo its patch, the reason why it did not patch, or None if the patch is in place already. A
module that is reloaded loses its patch, and is patched again.
"""

_undo: dict[str, Callable[[], None]] = {}
_reasons: dict[str, str] = {}
# Nothing is imported while it is held: other threads wait for it in the middle of their imports.
_lock = threading.RLock()


def install() -> None:
    """Register `optim: muon`: patch the modules that are imported, hook the others. Repeated calls are harmless."""
    with _lock:
        if not _is_installed():
            sys.meta_path.insert(0, _Finder())
    for name in HOOKS:
        module = sys.modules.get(name)
        if module is None:
            continue
        if getattr(module.__spec__, "_initializing", False):
            _patch_when_ready(module)
        else:
            _patch(module)


def uninstall() -> None:
    """Undo `install`: `optim: muon` is unknown again. Existing optimizers continue to work."""
    with _lock:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        for name in list(_undo):
            _undo.pop(name)()
        _reasons.clear()


def status() -> dict[str, str]:
    """Return the state of each hooked module: patched, waiting for its import, or why it is not patched."""
    waiting = "waiting for its import" if _is_installed() else "not hooked"
    return {name: "patched" if name in _undo else _reasons.get(name, waiting) for name in HOOKS}


def _is_installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _patch(module: ModuleType) -> None:
    name = module.__name__
    path, _, function = HOOKS[name].partition(":")
    result: Callable[[], None] | str | None
    try:
        patch = getattr(importlib.import_module(path), function)
        with _lock:
            result = patch(module)
            if callable(result):
                _undo[name] = result
                _reasons.pop(name, None)
    except Exception as error:  # noqa: BLE001  somebody else's import must not fail
        result = f"failed: {type(error).__name__}: {error}"
        logging.getLogger("hf_muon").warning("optim: muon is not available, %s: %s", name, result)
    if isinstance(result, str):
        with _lock:
            _undo.pop(name, None)
            _reasons[name] = result


def _patch_when_ready(module: ModuleType) -> None:
    """Patch a module that is in the middle of its own import, as transformers.training_args is when it imports torch.

    That import cannot be hooked any more. The module gets a class that applies the patch at the first attribute read
    after the import, and makes every thread wait for it.
    """
    patching = threading.local()

    def patch_now(awaited: ModuleType) -> None:
        patching.here = True
        try:
            # uninstall() may have been called since.
            if _is_installed():
                _patch(awaited)
        finally:
            patching.here = False
            ModuleType.__setattr__(awaited, "__class__", ModuleType)

    class Awaited(ModuleType):
        def __getattribute__(self, attribute: str) -> Any:
            spec = ModuleType.__getattribute__(self, "__spec__")
            ready = not attribute.startswith("__") and not getattr(spec, "_initializing", False)
            if ready and not getattr(patching, "here", False):
                patch_now(self)
            return ModuleType.__getattribute__(self, attribute)

    if type(module) is ModuleType:
        module.__class__ = Awaited
    else:
        _reasons[module.__name__] = f"failed: {type(module).__name__} is not a plain module"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the hooked modules by the other finders, and patches each after it was executed."""

    def __init__(self) -> None:
        self._busy = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in HOOKS or getattr(self._busy, "name", None) == fullname:
            return None
        self._busy.name = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(importlib.abc.Loader):
    """The module's own loader, followed by the patch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _patch(module)
