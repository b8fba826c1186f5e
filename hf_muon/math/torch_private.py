"""All uses of torch's private names, to be checked for each new version of torch.

They have no public replacement unless a function says so. They exist in torch 2.10.0, 2.11.0, 2.12.0, 2.13.0 and
2.15.0. If one is gone, the function that needs it raises with the name and the feature, before a step changes anything;
other features continue to work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

_F = TypeVar("_F", bound=Callable[..., Any])

_COMPILING, _LOADING, _GROUPS = "compiled functions", "hooks of loads", "process groups"
NEEDS = {
    "_len_torch_dispatch_stack": _COMPILING,
    "list_options": _COMPILING,
    "_optimizer_load_state_dict_pre_hooks": _LOADING,
    "_optimizer_load_state_dict_post_hooks": _LOADING,
    "_device_types": "several ranks",
    "_world": _GROUPS,
    "group_count": _GROUPS,
    "_hash_ranks_to_str": _GROUPS,
    "_process_group_name": _GROUPS,
    "_join_config": "DDP",
    "enable": "DDP",
    "_comm_hooks": "DDP",
    "_accum_grad_hooks": "DDP",
    "_static_graph_delay_allreduce_enqueued": "DDP",
    "_spec": "DTensors",
    "_split_tensor": "DTensors",
}
"""The feature that needs each name."""


def lacking(what: str, feature: str) -> RuntimeError:
    """Return the error of a torch that lacks something that a feature needs."""
    return RuntimeError(
        f"torch {torch.__version__} has no {what}, which hf_muon needs for {feature}. Use a torch that hf_muon was "
        "tested with, or a newer hf_muon [torch-changed]"
    )


def _private(owner: Any, name: str) -> Any:
    """Return an attribute.

    Raises:
        RuntimeError: it is gone; with the name, what needs it, and what to do.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        kind = owner if hasattr(owner, "__name__") else type(owner)
        raise lacking(f"{kind.__name__}.{name}", NEEDS[name]) from error


def disable_dynamo(function: _F) -> _F:
    """Return a function that torch.compile does not compile.

    The public `torch.compiler.disable` does the same, but imports the compiler at once, which takes seconds; it is
    used if the private one is gone.
    """
    disable = getattr(getattr(torch, "_compile", None), "_disable_dynamo", None) or torch.compiler.disable
    disabled: _F = disable(function)
    return disabled


def is_watched() -> bool:
    """Return whether a dispatch mode is active, such as fake tensors or FlopCounterMode: torch then never compiles."""
    length: int = _private(torch._C, "_len_torch_dispatch_stack")()
    return length > 0


def inductor_options() -> list[str]:
    """Return the names of the options that torch.compile has with its default backend; torch documents it so."""
    import torch._inductor

    options: list[str] = _private(torch._inductor, "list_options")()
    return options


def cpu_multiplies_bf16() -> bool:
    """Return whether a CPU has instructions for bf16 products.

    `torch.cpu.get_capabilities` is public, and torch 2.10 lacks it. A torch without any of these says no, and
    products are then computed in fp32.
    """
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(flag, False) for flag in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return any(getattr(torch.cpu, probe, bool)() for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def load_hooks(optimizer: Optimizer, when: str) -> list[Callable[..., Any]]:
    """Return the hooks that users have registered to run around `load_state_dict`.

    Args:
        optimizer: the optimizer.
        when: `pre` or `post`.
    """
    hooks = _private(optimizer, f"_optimizer_load_state_dict_{when}_hooks")
    return list(hooks.values())


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the device types whose tensors a process group sends, in the same order on all ranks."""
    devices = _private(group, "_device_types")
    return [torch.device(device).type for device in devices]


def new_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """Create a process group of a given name without the other ranks taking part.

    torch would derive its name from how many groups a rank is in, or since 2.14 was asked to create, and hang where
    ranks differ in that; and since 2.14 the other ranks would name their next groups differently. So the name is given
    here, and torch's count of groups stays as it was.

    Raises:
        RuntimeError: this torch names groups in another way.
    """
    from torch.distributed import distributed_c10d as c10d

    world, original = _private(c10d, "_world"), _private(c10d, "_hash_ranks_to_str")
    count, name_of = _private(world, "group_count"), _private(c10d, "_process_group_name")
    c10d._hash_ranks_to_str = lambda *_, **__: name
    try:
        # Before the group is made: a name that differs between ranks would hang.
        if name_of(list(ranks), use_hashed_name=True) != name:
            raise lacking("name of a process group that can be given", _GROUPS)
        group: dist.ProcessGroup = c10d.new_group(list(ranks), use_local_synchronization=True)
    finally:
        c10d._hash_ranks_to_str = original
        world.group_count = count
    return group


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Return whether ranks may have no batch left: they take no step, so that the others must not wait for them."""
    return bool(_private(_private(ddp, "_join_config"), "enable"))


def communication_hooks(ddp: DistributedDataParallel) -> list[Callable[..., Any]]:
    """Return what reduces the gradients of a wrapper in place of its own reduction."""
    return [hook for hook, _ in _private(ddp, "_comm_hooks")]


def reduces_in_hooks(ddp: DistributedDataParallel) -> bool:
    """Return whether a wrapper reduces by Python hooks in place of its reducer, as compiled autograd needs it."""
    return bool(_private(ddp, "_accum_grad_hooks"))


def has_begun_static(ddp: DistributedDataParallel) -> bool:
    """Return whether a wrapper has reduced the first pass of a static graph, or is about to."""
    return ddp.static_graph and bool(_private(ddp, "_static_graph_delay_allreduce_enqueued"))


def current_pass() -> int:
    """Return the number of the backward pass that calls this; -1 outside of one, or if this torch has no numbers."""
    number: int = getattr(torch._C, "_current_graph_task_id", lambda: -1)()
    return number


def is_of_fsdp1(param: Tensor) -> bool:
    """Return whether a parameter is flat, or a slice of a flat one, of FSDP1, which marks them so."""
    return getattr(param, "_is_flat_param", False) or hasattr(param, "_fsdp_flattened")


def is_strided(placement: Any) -> bool:
    """Return whether a placement is a `_StridedShard`: a sibling of Shard or a subclass of it, by version."""
    return type(placement).__name__ == "_StridedShard"


def shard_orders(param: DTensor) -> Mapping[int, Sequence[int]]:
    """Return the order in which mesh dims shard a dim of a DTensor, for each dim with another than the default order.

    A torch without such orders has only the default.
    """
    orders = getattr(_private(param, "_spec"), "shard_order", None) or ()
    # A `_StridedShard` is one way to write an order, which torch 2.10 then repeats here.
    strided = {getattr(placement, "dim", None) for placement in param.placements if is_strided(placement)}
    return {
        entry.tensor_dim: tuple(entry.mesh_dims)
        for entry in orders
        if list(entry.mesh_dims) != sorted(entry.mesh_dims) and entry.tensor_dim not in strided
    }


def part_of(indices: Tensor, placement: Any, size: int, at: int) -> Tensor:
    """Return the part of a tensor that a placement gives to coordinate `at` of a mesh dim of some size."""
    split = _private(placement, "_split_tensor")
    part: Tensor = split(indices, size, with_padding=False, contiguous=False)[0][at]
    return part


def dtensor_on_host(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """Return a DTensor whose local tensor is on another device than its mesh; `from_local` would move it there.

    Raises:
        RuntimeError: this torch makes such tensors in another way.
    """
    from torch.distributed.tensor import DTensor

    try:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    except (ImportError, TypeError) as error:
        raise lacking(f"DTensor of a spec ({error})", "moments of DTensors on the host") from error
