"""Which rows of a DTensor a rank stores is compared with torch; another order of the mesh dims is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import _dtensor_spec as specs
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_muon.storage import dtensor
from hf_muon.storage.dtensor import mesh_complaint


def stored(mesh, order=None):
    whole = torch.arange(8.0)[:, None].expand(8, 3).contiguous()
    meta = specs.TensorMeta(whole.shape, whole.stride(), whole.dtype)
    entries = {} if order is None else {"shard_order": (specs.ShardOrderEntry(tensor_dim=0, mesh_dims=order),)}
    spec = specs.DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, **entries)
    for dim in order or (0, 1):
        whole = whole.chunk(2)[mesh.get_coordinate()[dim]]
    return DTensor(whole.clone(), spec, requires_grad=False)


@pytest.mark.parametrize("rank", range(4))
def test_rows_that_are_not_torchs_default_are_refused(rank, monkeypatch):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        assert mesh_complaint(stored(mesh)) is None
        if hasattr(specs, "ShardOrderEntry"):  # this torch has orders
            assert mesh_complaint(stored(mesh, (0, 1))) is None
            assert "dim 0 sharded over the mesh dims (1, 0) in this order" in mesh_complaint(stored(mesh, (1, 0)))
        own = dtensor.regions  # compute the regions of another mesh
        monkeypatch.setattr(dtensor, "regions", lambda shape, *rest: list(reversed(own(shape, *rest))))
        dtensor._regions.cache_clear()
        assert "splits into other rows or columns than hf_muon expects" in mesh_complaint(stored(mesh))
    finally:
        dtensor._regions.cache_clear()
        dist.destroy_process_group()
