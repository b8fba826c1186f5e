"""Entry point that `import torch` calls at its end (group `torch.backends`).

A module beside the package, so that `HF_MUON_AUTOLOAD=0` leaves the package itself unimported. It imports the standard
library only, places lazy hooks, and cannot raise: an exception here would break `import torch` for everyone.
"""

from __future__ import annotations

import os

VARIABLE = "HF_MUON_AUTOLOAD"


def activate() -> None:
    """Register `optim: muon` unless the user has switched that off."""
    try:
        if is_on():
            import hf_muon  # noqa: F401  registers itself
    except Exception:  # noqa: BLE001  see above; `hf-muon doctor` shows the error
        pass


def is_on() -> bool:
    """Return whether the entry point may act; the same words as in `hf_muon.diagnostics.log.is_on`."""
    return os.environ.get(VARIABLE, "").strip().lower() not in ("0", "false", "off", "no")
