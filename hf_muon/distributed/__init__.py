"""How tensors are stored between steps, and how whole matrices are made of them."""

from hf_muon.distributed.base import (
    STEPPED_DTYPES,
    Executor,
    NewtonSchulz,
    Piece,
    class_complaint,
    has_data,
    is_dtensor,
    local_of,
    shape_of,
    storage_complaint,
)
from hf_muon.distributed.select import (
    Shared,
    accelerator,
    alone,
    compute_device,
    home_of,
    select_executors,
    shared,
)
from hf_muon.distributed.zero import Partition, Partitions

__all__ = [
    "STEPPED_DTYPES",
    "Executor",
    "NewtonSchulz",
    "Partition",
    "Partitions",
    "Piece",
    "Shared",
    "accelerator",
    "alone",
    "class_complaint",
    "compute_device",
    "has_data",
    "home_of",
    "is_dtensor",
    "local_of",
    "select_executors",
    "shape_of",
    "shared",
    "storage_complaint",
]
