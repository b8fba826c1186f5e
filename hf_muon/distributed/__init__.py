"""How tensors are stored between steps, and how whole matrices are made of them."""

from hf_muon.distributed.base import Executor, storage_complaint
from hf_muon.distributed.local import LocalExecutor

__all__ = ["Executor", "LocalExecutor", "storage_complaint"]
