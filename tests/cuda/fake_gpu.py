"""A card that does not exist: enough of it for torch.compile to write its kernels, and for Triton to translate them.

No GPU, driver or CUDA toolkit is needed: torch's CPU build, and the Triton that torch's CUDA build pins. The names that
are replaced are private to torch and to Triton; KNOWN are the versions for which they are known.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

KNOWN = {"torch": "2.13", "triton": "3.7"}


class Card(NamedTuple):
    """What Inductor asks about a card."""

    name: str
    processors: int
    threads: int
    """Per multiprocessor."""
    shared_bytes: int
    """That a block may have."""


CARDS = {
    80: Card("A100", 108, 2048, 166912),
    90: Card("H100", 132, 2048, 232448),
    100: Card("B200", 148, 2048, 232448),
}
"""By compute capability."""
_CUDA, _META = 1, 14  # c10::DeviceType


def untested() -> str | None:
    """Return why nothing can be compiled here for a card that does not exist, or None."""
    if sys.platform != "linux":
        return "no compiler for CUDA: Triton runs on Linux alone"
    for package, version in KNOWN.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"no compiler for CUDA: {package} {version} is not installed; `make on-cuda` installs it"
        if not found.startswith(f"{version}."):
            return f"no compiler for CUDA: {package} {found} was not tried, {version} was; see CONTRIBUTING.md"
    if torch.cuda.is_available():
        return "no compiler for CUDA that does not exist: there is a card, for which there are tests marked gpu"
    return None


@contextlib.contextmanager
def card(capability: int, count: int = 1) -> Iterator[None]:
    """Have Inductor believe that there are cards of a compute capability, whose tensors are fake.

    `torch.cuda.is_available` stays false: where it is true, fake tensors initialize the device.

    Args:
        capability: of `CARDS`.
        count: number of cards.
    """
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.config as inductor
    from torch._inductor.runtime import triton_helpers

    properties = _properties(capability)
    constants: dict[str, Any] = {
        "is_available": True,
        "get_device_properties": properties,
        "get_compute_capability": capability,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
        "current_device": 0,
        "device_count": count,
        "set_device": None,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "synchronize": None,
        "get_raw_stream": 0,
    }
    interface = {name: staticmethod(_returning(value)) for name, value in constants.items()}
    of_torch = {
        "get_device_capability": _returning(divmod(capability, 10)),
        "get_device_properties": _returning(properties),
        "current_device": _returning(0),
        "device_count": _returning(count),
    }
    of_inductor = {
        "joint_graph_constant_folding": False,  # would compute constants on the card
        "force_disable_caches": True,
        "compile_threads": 1,
    }
    with (
        mock.patch.multiple(interfaces.CudaInterface, **interface),
        mock.patch.multiple(torch.cuda, **of_torch),
        mock.patch.dict(interfaces.caching_worker_device_properties, {"cuda": [properties] * count}),
        mock.patch.dict(interfaces.caching_worker_current_devices, {"cuda": 0}),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", _returning(None)),
        inductor.patch(of_inductor),
        _driver_of(capability),
        _without_cached_answers(),
        device_guard(),
    ):
        yield


@contextlib.contextmanager
def device_guard() -> Iterator[None]:
    """Give CUDA the device guard of the meta device, which does nothing.

    Torch's build for CPUs has none for CUDA, and `copy_` asks for it.
    """
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    guards[_CUDA] = guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **options: value


@functools.cache
def _properties(capability: int) -> SimpleNamespace:
    card = CARDS[capability]
    return SimpleNamespace(
        name=card.name,
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=card.processors,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=card.threads,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 * 2**30,
        shared_memory_per_block_optin=card.shared_bytes,
        gcnArchName="",
    )


@contextlib.contextmanager
def _driver_of(capability: int) -> Iterator[None]:
    """Give Triton a driver that says which target kernels are for, and can do nothing else."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class NoDriver(DriverBase):
        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> None:
            return None

    with mock.patch.object(triton.runtime.driver, "_active", NoDriver()):
        yield


@contextlib.contextmanager
def _without_cached_answers() -> Iterator[None]:
    """Have torch ask again whether there is a Triton, and for which device, in the block and after it."""
    from torch._inductor.runtime import hints
    from torch.utils import _triton

    asked = (
        hints.DeviceProperties.create,
        _triton.has_triton,
        _triton.triton_backend,
        _triton.triton_hash_with_backend,
    )

    def forget() -> None:
        for function in asked:
            if clear := getattr(function, "cache_clear", None):
                clear()

    forget()
    try:
        yield
    finally:
        forget()
