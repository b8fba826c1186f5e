"""Cells on a stand-in for an accelerator (tests/support/stand_in.py), with parameters on the device or on the host.

Results are those of one process with a GPU's numbers, and the host waits for what it reads.
"""

from __future__ import annotations

from unittest import mock

import pytest

from tests.distributed.pool import Pool
from tests.equality import runs
from tests.equality.cells import Cell, few_first, pairwise
from tests.equality.checks import check, is_valid

VALUES = {
    "place": ["single-1", "copies-2", "placed-fsdp-2", "last-2", "placed-hsdp-4", "placed-fsdp-tp-4", "experts-4"],
    "model": ["small", "wide", "aligned"],
    "numbers": ["device", "nccl"],
    "dtype": ["float32", "bfloat16"],
    "momentum": ["auto", "bf16", "int8"],
    "adamw": ["auto", "bf16", "int8"],
    "rule": ["plain", "original", "together"],
    "batch": [0, 1125],
    "fault": ["", "nan"],
}
CELLS = few_first(pairwise(VALUES, is_valid), pytest.mark.extended)
HOST = [
    Cell(place="placed-fsdp-2", numbers="host", model="wide", dtype=dtype, momentum=moments, adamw=moments)
    for dtype, moments in (("float32", "auto"), ("bfloat16", "bf16"), ("float32", "int8"))
]


@pytest.fixture(scope="module")
def stand_ins():
    """Yield pools by number of ranks, whose processes have the stand-in."""
    by_size = {size: Pool(size, forks=True) for size in (1, 2, 4)}
    yield by_size
    for pool in by_size.values():
        pool.close()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_pairs_of_values(stand_ins, cell, tmp_path):
    check(cell, stand_ins, str(tmp_path))


@pytest.mark.promise("cpu-offload")
@pytest.mark.first_tier("int8")
@pytest.mark.parametrize("cell", HOST, ids=str)
def test_parameters_on_the_host(stand_ins, cell, tmp_path):
    """Let elementwise functions be those of a CPU: on a real device, the host's round differently."""
    check(cell, stand_ins, str(tmp_path))


def without_waits(rank, cell, folder):
    from tests.support import stand_in

    with mock.patch.object(stand_in.Device.Stream, "synchronize"):
        return runs.run(rank, cell, folder)


@pytest.mark.extended
def test_without_a_wait_the_host_would_read_directions_before_they_are_there(stand_ins):
    """Show that the test above sees what it is for."""
    assert all(result["races"] for result in stand_ins[2].run(without_waits, cell=HOST[0], folder=""))
