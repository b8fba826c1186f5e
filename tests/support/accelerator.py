"""Make hf_muon treat a device without values as an accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hf_muon.optimizer import agreement, gradients, layout, preparation
from hf_muon.storage import host, transport
from tests.support.count import Count

META = torch.device("meta")


@contextlib.contextmanager
def as_accelerator(count: Count | None = None, *, reads: bool = True, device: torch.device = META) -> Iterator[None]:
    """Make hf_muon run its code for CUDA on the meta device, or on fake CUDA tensors.

    Moments can be offloaded to the host, without touching its memory, and copies have streams.

    Args:
        count: a `Count`, which counts waits of the host for a stream or an event.
        reads: whether values can be read; `counting` answers the reads. Otherwise gradients are not checked.
        device: of the parameters.
    """

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            pass

        def wait_stream(self, other: Stream) -> None:
            pass

        def wait_event(self, event: Stream) -> None:
            pass

        def record(self, stream: Stream | None = None) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            if count is not None:
                count.waits["synchronize"] += 1

    module = SimpleNamespace(
        Stream=Stream,
        Event=Stream,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda device=None: Stream(),
    )

    def asynchronous(asked: torch.device) -> Any:
        return module if reads and asked == device else None

    def untouched(local: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
        return torch.empty(tuple(local.shape if shape is None else shape), dtype=dtype, device="cpu")

    with (
        mock.patch.object(agreement, "has_data", return_value=reads),
        mock.patch.object(preparation, "has_data", return_value=reads),
        mock.patch.object(gradients, "has_data", return_value=reads),
        mock.patch.object(layout, "model_device", return_value=device),
        mock.patch.object(host, "_HAS_NO_HOST", ("cpu",)),
        mock.patch.object(host, "zeros_like", untouched),
        mock.patch.object(transport, "asynchronous", asynchronous),
        mock.patch.object(transport, "_streams", getattr(transport._streams, "__wrapped__", transport._streams)),
    ):
        yield
