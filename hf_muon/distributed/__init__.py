"""How tensors are stored between steps, and how whole matrices are made of them."""

from hf_muon.distributed.base import Executor, NewtonSchulz, Piece, is_dtensor, local_of, shape_of, storage_complaint
from hf_muon.distributed.select import Shared, accelerator, compute_device, home_of, select_executors, shared
from hf_muon.distributed.zero import Partition, Partitions

__all__ = [
    "Executor",
    "NewtonSchulz",
    "Partition",
    "Partitions",
    "Piece",
    "Shared",
    "accelerator",
    "compute_device",
    "home_of",
    "is_dtensor",
    "local_of",
    "select_executors",
    "shape_of",
    "shared",
    "storage_complaint",
]
