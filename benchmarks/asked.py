"""What the sides of `make bench` ask of an accelerator: counted on the meta device, beside what is measured.

Launches, waits and traffic are those of `count.py`, with the branches of CUDA, whatever device is measured. The host's
time is measured: processor time of a call on meta tensors, where nothing is computed.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from accelerator import as_accelerator
from count import counting
from meters import uncompiled
from setting import Row, attempt

COLUMNS = ("launches", "waits", "traffic", "host ms")
_CALLS = 3


def asked(make: Callable[[], Callable[[], Any]], weights: int) -> Row:
    """Return the columns of a side, and in `not counted` why its code does not run on meta tensors.

    Args:
        make: returns the side's call on meta tensors; the second call is counted.
        weights: by which traffic is divided, into bytes a weight.
    """
    row: Row = {}

    def count() -> None:
        with uncompiled(), _fused_on_meta(), as_accelerator():
            call = make()
            with counting():  # the device answers
                call()
            with counting() as counts, as_accelerator(counts):
                call()
        row.update(
            launches=counts.launches.total(),
            waits=counts.waits.total(),
            traffic=counts.traffic.total() / weights,
        )

    def measure() -> None:
        with uncompiled(), _fused_on_meta(), as_accelerator(reads=False):
            call = make()
            call()
            seconds = []
            for _ in range(_CALLS):
                begin = time.process_time()
                call()
                seconds.append(time.process_time() - begin)
        row["host ms"] = 1e3 * min(seconds)

    note = attempt(count) or attempt(measure)
    return {**row, "not counted": note} if note else row


@contextlib.contextmanager
def _fused_on_meta() -> Iterator[None]:
    """Have torch's fused AdamW take meta tensors, on which its kernel runs if the learning rate is a number."""
    module = importlib.import_module("torch.optim.optimizer")
    name = "_get_fused_kernels_supported_devices"
    kernel = torch._fused_adamw_

    def with_number(*args: Any, lr: Any, **kwargs: Any) -> Any:
        return kernel(*args, lr=0.0, **kwargs)  # any number

    with (
        mock.patch.object(module, name, return_value=[*getattr(module, name)(), "meta"]),
        mock.patch.object(torch, "_fused_adamw_", with_number),
    ):
        yield
