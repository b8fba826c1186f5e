"""Entry point that `import torch` calls at its end (group `torch.backends`).

A module beside the package, so that `HF_MUON_AUTOLOAD=0` leaves the package itself unimported. It imports the standard
library only, places lazy hooks, and cannot raise: an exception here would break `import torch` for everyone.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

VARIABLE = "HF_MUON_AUTOLOAD"
DRY_RUN = "HF_MUON_DRY_RUN"


def activate() -> None:
    """Register `optim: muon` unless the user has switched that off."""
    reason = f"{VARIABLE} switches hf_muon off"
    try:
        if is_on():
            import hf_muon  # registers itself

            if hf_muon.__file__ is None:
                _load_into(hf_muon)
    except Exception as error:  # noqa: BLE001  see above; `hf-muon doctor` shows the error
        reason = f"{type(error).__name__}: {error}"
    if is_on(DRY_RUN, unset=False) and "hf_muon.dry_run.hooks" not in sys.modules:
        print(f"This dry run would train, and is ended: {reason} [dry-run-without-hooks]", file=sys.stderr, flush=True)
        os._exit(1)


def is_on(variable: str = VARIABLE, *, unset: bool = True) -> bool:
    """Return whether a variable is on, here the entry point's; as `hf_muon.diagnostics.log.is_on`."""
    text = os.environ.get(variable, "").strip().lower()
    return text not in ("0", "false", "off", "no") if text else unset


def _load_into(namespace: ModuleType) -> None:
    """Load the package that lies beside this module into an empty one of its name.

    A folder `hf_muon` on the path, such as that of a checkout, is imported as a namespace package if the installed
    package is found later than folders are, as by the finder of an editable installation. The module itself is filled,
    because a script may have imported it before torch.
    """
    folder = Path(__file__).parent
    spec = PathFinder.find_spec("hf_muon", [str(folder)])
    if spec is None or spec.loader is None:
        found = ", ".join(namespace.__path__)
        warnings.warn(f"{found} is imported in place of the package hf_muon, which is not in {folder}", stacklevel=2)
        return
    vars(namespace).update(vars(module_from_spec(spec)))
    spec.loader.exec_module(namespace)
