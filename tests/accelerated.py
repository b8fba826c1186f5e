"""Take the paths of accelerators on a CPU, with values."""

from __future__ import annotations

import contextlib

from hf_muon.math import elementwise, newton_schulz


@contextlib.contextmanager
def accelerated(copied_bytes=None):
    """Take the paths of accelerators in the `with` block; functions are not compiled.

    Args:
        copied_bytes: from which a tensor has launches of its own: 0 for every tensor.
    """
    before = elementwise._HOSTS, newton_schulz._WITH_FP64, elementwise._COPIED_BYTES
    elementwise._HOSTS, newton_schulz._WITH_FP64 = set(), {"cpu"}
    if copied_bytes is not None:
        elementwise._COPIED_BYTES = copied_bytes
    try:
        yield
    finally:
        elementwise._HOSTS, newton_schulz._WITH_FP64, elementwise._COPIED_BYTES = before


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


def compiled_on_rank_1(rank, layout):
    """Return the error of a step on ranks of which one compiles elementwise functions."""
    from unittest import mock

    with mock.patch.object(elementwise, "_COMPILED", {"cpu": "torch"} if rank == 1 else {}):
        try:
            given_gradients(rank, layout)
        except RuntimeError as error:
            return str(error)
    return ""
