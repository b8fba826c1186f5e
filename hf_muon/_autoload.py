"""Lazy hooks: patch a few modules of other packages right after their own import.

To add an integration, write its patch in `hf_muon/integrations` and name it in `HOOKS`: one hook for each feature.
This module imports only the standard library. A hook that fails leaves its module as it was, and logs nothing, so that
users of other optimizers see nothing: `hf-muon doctor` shows it, and a run that needs the hook is refused.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

Change = tuple[Any, Any, Any]
"""A change of a patch: an owner, an attribute's name and its value; or a dict or a list, a key and its item."""


class Hook(NamedTuple):
    """A patch that adds one feature to a module of another package."""

    module: str
    patch: str
    """The function that is called with the module and yields all changes of it, before any is made."""
    lost: str
    """The feature that a run lacks if the hook has failed."""
    failed: Callable[[str], None] | None = None
    """Called with the reason if the hook has failed."""


_TRANSFORMERS = "hf_muon.integrations.transformers"
_V0, _V1 = "hf_muon.integrations.llamafactory.v0", "hf_muon.integrations.llamafactory.v1"
_V1_PLUGINS = "llamafactory.v1.plugins.trainer_plugins"

HOOKS = {
    "optim: muon": Hook(
        "transformers.training_args",
        f"{_TRANSFORMERS}.hooks:patch_training_args",
        "TrainingArguments know no muon",
    ),
    "optimizer of Trainer": Hook(
        "transformers.trainer_optimizer",
        f"{_TRANSFORMERS}.hooks:patch_trainer_optimizer",
        "Trainer cannot make a Muon",
    ),
    "callback of Trainer": Hook(
        "transformers.trainer",
        f"{_TRANSFORMERS}.callback:patch_callbacks",
        "nobody tells a run's optimizer its number of steps, logs its metrics, or sees that another optimizer runs",
    ),
    "weights of checkpoints": Hook(
        "transformers.trainer",
        f"{_TRANSFORMERS}.weights:patch_loading",
        "a resumed run keeps the initial values of weights that have other names on disk",
    ),
    "Ulysses": Hook(
        "transformers.trainer",
        "hf_muon.integrations.ulysses.hooks:patch_trainer",
        "nobody sees whether losses under sp_size are gathered",
    ),
    "batches of Ulysses": Hook(
        "accelerate.accelerator",
        "hf_muon.integrations.ulysses.hooks:patch_adapter",
        "epochs under sp_size end early, and their batches are not complete",
    ),
    "accelerate's shards": Hook(
        "accelerate.utils.fsdp_utils",
        "hf_muon.integrations.torch_states:patch_accelerate",
        "sharded checkpoints are not converted: a rule cannot be switched on when resuming",
    ),
    "Accelerator.prepare": Hook(
        "accelerate.accelerator",
        "hf_muon.integrations.accelerate:patch_prepare",
        "Muon is not attached to DeepSpeed's engine",
    ),
    "whole states": Hook(
        "torch.distributed.checkpoint.state_dict",
        "hf_muon.integrations.torch_states:patch_loading",
        "moments that a whole state lacks are loaded as zeros",
    ),
    "LLaMA-Factory's parser": Hook(
        "llamafactory.hparams.parser",
        f"{_V0}:patch_parser",
        "options of LLaMA-Factory that replace the optimizer in silence are not refused",
    ),
    "LLaMA-Factory v1's arguments": Hook(
        "llamafactory.v1.config.training_args",
        f"{_V1}:patch_training_arguments",
        "optim_config is not checked, and layouts in which Muon does not step are not refused",
    ),
    "LLaMA-Factory v1's optimizers": Hook(
        f"{_V1_PLUGINS}.optimizer",
        f"{_V1}:patch_optimizers",
        "optim_config: {name: muon} is not this package's",
    ),
    "newer v1's optimizers": Hook(
        f"{_V1_PLUGINS}.optimizers.optimizer",
        f"{_V1}:patch_optimizers",
        "optim_config: {name: muon} is not this package's",
    ),
    "LLaMA-Factory v1's resuming": Hook(
        "llamafactory.v1.core.utils.checkpoint",
        f"{_V1}:patch_resuming",
        "nobody sees that a checkpoint has no optimizer state",
    ),
    "LLaMA-Factory v1's shards": Hook(
        f"{_V1_PLUGINS}.distributed.fsdp2",
        "hf_muon.integrations.torch_states:patch_llamafactory",
        "sharded checkpoints are not converted: a rule cannot be switched on when resuming",
    ),
}
"""The hooks by name. A module that is reloaded loses its patches, and is patched again."""

# In their order: `install` patches transformers' names before its handlers, which depend on them.
_MODULES = dict.fromkeys(hook.module for hook in HOOKS.values())
_PATCHED = "_hf_muon_hooks"
"""Attribute of a patched module: the names of its hooks."""

_states: dict[str, str] = {}
# Import nothing while this is held: other threads wait for it in the middle of their imports.
_lock = threading.RLock()


def install() -> None:
    """Register `optim: muon`: patch modules that are already imported, and hook the others. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is None:
            continue
        if getattr(module.__spec__, "_initializing", False):
            _patch_when_ready(module)
        else:
            _patch(module)


def add(hooks: Mapping[str, Hook]) -> None:
    """Place further hooks, as those of a dry run."""
    HOOKS.update(hooks)
    _MODULES.update(dict.fromkeys(hook.module for hook in hooks.values()))
    install()


def status() -> dict[str, str]:
    """Return the state of each hook: patched, waiting for the import of its module, or why it has failed."""
    return {name: _states.get(name, "waiting for its import") for name in HOOKS}


def apply(patch: Callable[[ModuleType], Iterable[Change]], module: ModuleType) -> None:
    """Make all changes of a patch, or none if it raises an error."""
    for owner, name, value in list(patch(module)):
        if isinstance(owner, (dict, list)):
            owner[name] = value
        else:
            setattr(owner, name, value)


def everywhere(module: ModuleType, name: str, value: Any) -> Iterator[Change]:
    """Yield the changes that replace a function in its module and in modules that have imported it by name."""
    function = getattr(module, name)
    yield module, name, value
    for other in list(sys.modules.values()):
        if other is not module and getattr(other, "__dict__", {}).get(name) is function:
            yield other, name, value


def _patch(module: ModuleType) -> None:
    """Apply the hooks of a module that are not in place yet."""
    for name, hook in HOOKS.items():
        if hook.module != module.__name__ or name in vars(module).get(_PATCHED, ()):
            continue
        path, _, function = hook.patch.partition(":")
        try:
            patch = getattr(importlib.import_module(path), function)
            with _lock:
                done = vars(module).get(_PATCHED, ())
                if name not in done:
                    apply(patch, module)
                    vars(module)[_PATCHED] = (*done, name)
            _states[name] = "patched"
        except Exception as error:  # noqa: BLE001  somebody else's import must not fail
            _states[name] = f"failed: {type(error).__name__}: {error}"
            if hook.failed:
                hook.failed(f"{hook.module}: {_states[name]}")


def _patch_when_ready(module: ModuleType) -> None:
    """Patch a module whose import has begun, as that of transformers.training_args when it imports torch.

    It is too late to hook that import. Instead, the class of the module is replaced by one that applies the patch at
    the first attribute access after the import, and makes every thread wait for it.
    """
    kind: Any = type(module)
    if kind.__name__ == "Awaited":  # installed again: the first patches all hooks
        return
    patching = threading.local()

    class Awaited(kind):  # type: ignore[misc]
        def __getattribute__(self, attribute: str) -> Any:
            ready = not attribute.startswith("__") and not getattr(self.__spec__, "_initializing", False)
            if ready and not hasattr(patching, "here"):
                patching.here = True
                try:
                    _patch(self)
                finally:
                    del patching.here
                    self.__class__ = kind
            return kind.__getattribute__(self, attribute)

    module.__class__ = Awaited


class _Finder:
    """Finds hooked modules with the other finders, and patches each after its execution."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname not in _MODULES:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec: Any = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                spec.loader = spec.loader and _PatchingLoader(spec.loader)
                return spec
        return None


class _PatchingLoader:
    """The module's own loader, followed by the patch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader  # type: ignore[union-attr]
        vars(module).pop(_PATCHED, None)  # if a module is reloaded
        self._loader.exec_module(module)
        _patch(module)
