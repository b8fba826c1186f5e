"""Factors of whole rows, or columns, of a parameter, however it is stored."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_muon.storage.partitions import Slice
from hf_muon.storage.tensors import is_dtensor, local_of


@torch.no_grad()
def scale_rows_(param: Tensor, factors: Tensor, dim: int) -> None:
    """Multiply the indices of one dim of a parameter by factors, as far as this rank stores them.

    Products are computed in fp32 or more and rounded to nearest; a factor of 1 changes no bit.

    Args:
        param: plain, or a DTensor of any placements of shards and replicas.
        factors: one for each index of the whole dim, fp32.
        dim: the dim.
    """
    local = local_of(param)
    if not local.numel():
        return
    if is_dtensor(param):
        from hf_muon.storage.dtensor import own_region

        ranges = own_region(param, param.shape).dims[dim]  # type: ignore[arg-type]
        factors = torch.cat([factors[start:stop] for start, stop in ranges])
    _multiply_(local, factors.view([-1 if d == dim else 1 for d in range(local.ndim)]))


@torch.no_grad()
def scale_rows_of_slice_(flat: Tensor, part: Slice, rank: int, factors: Tensor, dim: int) -> None:
    """Multiply the indices of one dim of a parameter by factors, in a flat partition that holds some of its elements.

    Args:
        flat: the partition of this rank.
        part: the elements of the parameter.
        rank: of this process.
        factors: one for each index of the whole dim, fp32.
        dim: the dim, 0 or 1.
    """
    first, last = part.bounds[rank]
    columns = part.shape[1] if len(part.shape) > 1 else 1
    elements = torch.arange(first, last)
    _multiply_(flat[part.elements(rank)], factors[elements % columns if dim else elements // columns])


def _multiply_(local: Tensor, factors: Tensor) -> None:
    exact = torch.promote_types(local.dtype, torch.float32)
    local.copy_(local.to(exact) * factors.to(local.device, exact))
