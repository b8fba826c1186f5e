"""Entry point that `import torch` calls at its end (group `torch.backends`).

A module beside the package, so that `HF_MUON_AUTOLOAD=0` leaves the package itself unimported. It imports the standard
library only, places lazy hooks, and cannot raise: an exception here would break `import torch` for everyone.
"""

from __future__ import annotations

import os


def activate() -> None:
    """Register `optim: muon` unless the user has switched that off."""
    try:
        if os.environ.get("HF_MUON_AUTOLOAD", "1").strip().lower() not in ("0", "false", "off", "no"):
            import hf_muon  # noqa: F401  registers itself
    except Exception:  # noqa: BLE001  see above; `hf-muon doctor` tells what went wrong
        pass
