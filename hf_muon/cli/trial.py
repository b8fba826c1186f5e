"""What a script that does not import hf_muon sees: a program that prints it as JSON, for `hf-muon doctor`.

It is run by its path. `python -m` would import the package first, and modules of the current folder, which nobody asked
to run.
"""

from __future__ import annotations

import sys
from typing import Any

NOTHING: dict[str, Any] = {"name": "muon", "taken": [], "states": {}, "broken": {}, "reason": None}
"""What is seen before anything is imported.

`name` is the value of `optim:`, `taken` the programs in which muon is another optimizer, `states` those of hooks,
`broken` the programs that cannot be imported and why, and `reason` why Muon is refused, or None.
"""
# What the hooks of every run change, in the order in which a script imports them.
_MODULES = (
    "torch",
    "transformers",
    "transformers.trainer_optimizer",
    "accelerate.accelerator",
    "transformers.trainer",
    "torch.distributed.checkpoint.state_dict",
)


def examine() -> dict[str, Any]:
    """Import what a run imports, and return what is there then, with the keys of `NOTHING`."""
    import importlib

    seen = {**NOTHING, "broken": {}}
    for module in _MODULES:
        try:
            importlib.import_module(module)
        except BaseException as error:  # noqa: BLE001  a broken package raises anything
            why = f"{module} cannot be imported here ({_line_of(error)})"
            seen["reason"] = f"{why}. Repair that first; `import hf_muon` does not help"
            break
    else:
        names = sys.modules["transformers.training_args"].OptimizerNames._value2member_map_
        handlers = sys.modules["transformers.trainer_optimizer"]._OPTIMIZER_HANDLERS
        ours = [name for name in ("hf_muon", "muon") if "hf_muon" in getattr(handlers.get(name), "__module__", "")]
        seen["name"] = next((name for name in reversed(ours) if name in names), "muon")
        if seen["name"] not in ours:
            seen["reason"] = "no hook is placed. Say `import hf_muon` in the script, or see the entry point above"
        if hooks := sys.modules.get("hf_muon._autoload"):
            seen["broken"] = _broken({hook.module for hook in hooks.HOOKS.values()})
            seen["states"] = hooks.status()
    if module == "torch":
        return seen  # without torch, hf_muon cannot be imported
    # From here on this process has imported hf_muon.
    from hf_muon.integrations.names import TAKEN, refuse_failed
    from hf_muon.versions import NEEDED, refuse_older

    seen["taken"] = [program for program, is_taken in TAKEN.items() if is_taken]
    try:
        refuse_failed("callback of Trainer")  # every run needs it
        refuse_older(*NEEDED)
    except RuntimeError as error:
        seen["reason"] = str(error)
    return seen


def _broken(modules: set[str]) -> dict[str, str]:
    """Import modules of installed programs, and return by program why one cannot be imported."""
    import importlib.util

    broken = {}
    for module in sorted(modules):
        program = module.partition(".")[0]
        try:
            if importlib.util.find_spec(program):
                importlib.import_module(module)
        except BaseException as error:  # noqa: BLE001  a broken package raises anything
            if not module.startswith(getattr(error, "name", None) or " "):  # other versions have no such module
                broken[program] = f"{program} cannot be imported here ({_line_of(error)})"
    return broken


def _line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file, whose inspect.py would hide the library's
    import json

    print("\n" + json.dumps(examine()))
