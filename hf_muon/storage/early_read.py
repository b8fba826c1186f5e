"""A read of the device that the host asks for early and looks at late."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_muon.storage.host import asynchronous, pins


class EarlyRead:
    """A few numbers on their way to the host, which launches other work before it looks at them.

    A look waits for the numbers, and for nothing that was launched after they were asked for.

    Args:
        numbers: on any device; must not be written to before the look.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._arrived: Any = None
        module = asynchronous(numbers.device)
        if module is None:
            return
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=pins(numbers.device))
        self._numbers.copy_(numbers, non_blocking=True)
        self._arrived = module.Event()
        self._arrived.record(module.current_stream(numbers.device))

    def tolist(self) -> Any:
        """Wait for the numbers and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()
