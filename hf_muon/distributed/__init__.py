"""How tensors are stored between steps, and how whole matrices are made of them."""

from hf_muon.distributed.base import Executor, NewtonSchulz, Piece, is_dtensor, local_of, storage_complaint
from hf_muon.distributed.select import Shared, select_executors, shared

__all__ = [
    "Executor",
    "NewtonSchulz",
    "Piece",
    "Shared",
    "is_dtensor",
    "local_of",
    "select_executors",
    "shared",
    "storage_complaint",
]
