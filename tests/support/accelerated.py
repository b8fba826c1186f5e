"""Take the paths of accelerators on a CPU: with values (`accelerated`), or without (`as_accelerator`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from hf_muon.math import compiler, elementwise, newton_schulz
from hf_muon.optimizer import agreement, gradients, step_plan
from hf_muon.optimizer import layout as step_layout
from hf_muon.storage import transport
from tests.support.count import Count

META = torch.device("meta")


@contextlib.contextmanager
def accelerated(copied_bytes=None, *, kinds=("cpu",)):
    """Take the paths of accelerators in the `with` block; functions are not compiled.

    Args:
        copied_bytes: from which a tensor has launches of its own: 0 for every tensor.
        kinds: of the devices that take them.
    """
    with (
        sized(**({} if copied_bytes is None else {"copied_bytes": copied_bytes})),
        mock.patch.object(elementwise, "_HOSTS", {"cpu", "standin"}.difference(kinds)),
        mock.patch.object(newton_schulz, "_WITH_FP64", set(kinds)),
    ):
        yield


@contextlib.contextmanager
def sized(**numbers):
    """Replace some of `elementwise._Numbers` for all devices in the `with` block."""
    own = {name: getattr(elementwise, name)._replace(**numbers) for name in ("_ON_HOST", "_ON_ACCELERATOR")}
    with mock.patch.multiple(elementwise, **own):
        yield


@contextlib.contextmanager
def uncomputed():
    """Leave out elementwise functions, which have no temporary tensors where they are compiled."""
    call = elementwise.Elementwise.__call__
    elementwise.Elementwise.__call__ = lambda *args, **options: None
    try:
        yield
    finally:
        elementwise.Elementwise.__call__ = call


def given_gradients(rank, layout, **options):
    """Step with the paths of accelerators; see `tests.distributed.cases.given_gradients`."""
    from tests.distributed import cases

    with accelerated():
        return cases.given_gradients(rank, layout, **options)


@contextlib.contextmanager
def compiling(backend="aot_eager", package="torch"):
    """Take the paths of accelerators for which torch compiles, as if nothing were decided, in the `with` block.

    Args:
        backend: of `torch.compile`.
        package: that torch needs to compile.
    """
    state = {"_COMPILERS": {"cpu": package}, "_BACKEND": backend, "_why_off": "", "_is_reported": False}
    state |= {"_tried": set(), "_functions": {}}
    with mock.patch.multiple(compiler, **state), accelerated():
        yield


def compiling_but_on_rank_1(rank, layout, *, first_alone=False):
    """Step as `given_gradients` does where rank 1 cannot compile.

    Args:
        rank: of this process.
        layout: of the step.
        first_alone: whether rank 0 has compiled functions for a step of its own before.

    Returns:
        The results, whether functions are compiled after the step, and the warnings.
    """
    from hf_muon.diagnostics import log

    lines = []
    with (
        compiling(package="no_such_compiler" if rank == 1 else "torch"),
        mock.patch.object(log.logger(), "warning", lambda text, *args: lines.append(text % args)),
    ):
        if first_alone and rank == 0:
            given_gradients(0, "single")
            assert compiler.is_compiled(torch.device("cpu"))
        results = given_gradients(rank, layout)
        return results, compiler.is_compiled(torch.device("cpu")), lines


def compiling_until_a_step_of_rank_1(rank, layout):
    """Step as `given_gradients` does where the compiler of rank 1 fails in the middle of the first step.

    Returns:
        The results, how many functions were compiled, whether some are after the last step, and the warnings.
    """
    from hf_muon.diagnostics import log

    lines, compiled = [], []

    def backend(graph, inputs):
        if rank == 1 and len(compiled) == 2:  # one is the trial's, before ranks agree
            raise OSError("no space left on device")
        compiled.append(graph)
        return graph

    with (
        compiling(backend),
        mock.patch.object(log.logger(), "warning", lambda text, *args: lines.append(text % args)),
    ):
        results = given_gradients(rank, layout)
        return results, len(compiled), compiler.is_compiled(torch.device("cpu")), lines


@contextlib.contextmanager
def as_accelerator(count: Count | None = None, *, reads: bool = True, device: torch.device = META) -> Iterator[None]:
    """Make hf_muon run its code for CUDA on the meta device, or on fake CUDA tensors.

    Copies to the host do not block it.

    Args:
        count: a `Count`, which counts waits of the host for the device.
        reads: whether values can be read; `counting` answers the reads. Otherwise gradients are not checked.
        device: of the parameters.
    """

    class Stream:
        def synchronize(self) -> None:
            if count is not None:
                count.waits["synchronize"] += 1

    module = SimpleNamespace(current_stream=lambda device=None: Stream())

    def asynchronous(asked: torch.device) -> Any:
        return module if reads and asked == device else None

    with (
        mock.patch.object(agreement, "has_data", return_value=reads),
        mock.patch.object(step_plan, "has_data", return_value=reads),
        mock.patch.object(gradients, "has_data", return_value=reads),
        mock.patch.object(step_layout, "model_device", return_value=device),
        mock.patch.object(transport, "asynchronous", asynchronous),
    ):
        yield
