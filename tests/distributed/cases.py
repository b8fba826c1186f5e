"""Models stored in every layout, stepped by the ranks of a pool, which import these functions by name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_muon import Muon
from hf_muon.storage.regions import regions

# Shapes that no number of ranks divides, fewer rows than ranks, and stacks of experts.
SHAPES = [(7, 5), (10, 16), (3, 7, 5), (10, 16), (1, 9), (2, 3), (16, 10), (5, 6, 4), (7, 5)]
# Large and wide enough for the Gram form.
LARGE = [((65, 130), ""), ((130, 65), ""), ((3, 65, 130), ""), ((66, 101), "")]
VECTORS = [(9,), (3,), (11, 4)]
# Fused, interleaved, transposed and folded weights and stacks, whose sizes no number of ranks divides.
VIEWS = [
    ((16, 5), "rows 7+4+5"),
    ((12, 7), "rows 3*(2+1+1)"),
    ((7, 10), "transposed, columns 5*(1+1)"),
    ((5, 14), "transposed, columns 6+8"),
    ((3, 8, 5), "rows 4+4"),
    ((3, 5, 8), "transposed, columns 4*(1+1)"),
    ((6, 5, 3), "flat"),
    ((8, 3, 2, 2), "flat, rows 2x4"),
    ((4, 3, 5), "transposed, flat"),
    ((11, 6), "rows 2x(3+1)+3"),
    ((8, 5), ""),
    ((13, 7), "columns 3*(1+1)+1"),
]
# Rows of several blocks of int8 momentum, of a single block, and too short for a block.
WIDE = [
    ((7, 130), ""),
    ((3, 5, 70), "rows 2+3"),
    ((9, 64), "rows 3*(2+1)"),
    ((6, 150), "transposed, columns 75*(1+1)"),
    ((8, 20), ""),
    ((6, 8), ""),
    ((5, 2, 33), "flat"),
    ((7, 130), ""),
    ((2, 4, 66), "transposed"),
]


def placements_of(layout, ndim, index=0):
    """Return the mesh shape and the placements of a parameter with `ndim` dims; some layouts alternate by `index`."""
    if layout.startswith("mixed"):
        world = dist.get_world_size()
        kinds = [[Replicate()], [Shard(0)], [Shard(ndim - 1)]]
        return (world,), kinds[(index + (layout == "mixed-turned")) % 3]
    return {
        "fsdp": lambda world: ((world,), [Shard(0)]),
        "last": lambda world: ((world,), [Shard(ndim - 1)]),
        "replicate": lambda world: ((world,), [Replicate()]),
        "hsdp": lambda world: ((2, world // 2), [Replicate(), Shard(0)]),
        "hsdp-last": lambda world: ((2, world // 2), [Shard(0), Replicate()]),
        "fsdp-tp": lambda world: ((world // 2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        "fsdp-tp-row": lambda world: ((world // 2, 2), [Shard(0), Shard(ndim - 1)]),
        "fsdp-fsdp": lambda world: ((world // 2, 2), [Shard(0), Shard(0)]),
        # Stacks of experts on a 2-D mesh, all other parameters on a 1-D mesh.
        "experts": lambda world: ((world // 2, 2), [Shard(1), Shard(0)]) if ndim == 3 else ((world,), [Shard(0)]),
        "middle": lambda world: ((world,), [Shard(1)]),
        "odd": lambda world: ((world // 2, 2), [_StridedShard(0, split_factor=3), Replicate()]),
    }[layout](dist.get_world_size())


def store(tensor, mesh, placements):
    """Return the DTensor of a tensor that every rank has in full, without communication."""
    coordinate = mesh.get_coordinate()
    flat = 0
    for size, position in zip(mesh.mesh.shape, coordinate, strict=True):
        flat = flat * size + position
    local = tensor
    for dim, ranges in enumerate(regions(tensor.shape, mesh.mesh.shape, placements)[flat].dims):
        indices = [i for start, stop in ranges for i in range(start, stop)]
        local = local.index_select(dim, torch.tensor(indices, dtype=torch.long).to(local.device))
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def make(shapes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def muon_over(params, dtype, views=None, scaled=False, **options):
    count = len(views or SHAPES)
    groups = [
        {"params": params[:count], "use_muon": True, "weight_decay": 0.1, **({"views": views} if views else {})},
        {"params": params[count:], "use_muon": False},
    ]
    for group in groups if scaled else []:
        group["lr_factors"] = [0.5 + i % 3 for i in range(len(group["params"]))]
    return Muon(groups, lr=0.02, **{"ns_dtype": "bf16" if dtype is torch.bfloat16 else "fp32", **options})


def given_gradients(
    rank,
    layout,
    steps=4,
    dtype="float32",
    missing=(),
    plain=(),
    device="cpu",
    viewed=(),
    tables=(),
    grad_dtype=None,
    parameters_on_host=False,
    scheduled=False,
    **options,
):
    """Step with given whole gradients in a layout, and return whole parameters and moments.

    `tables` are shapes of matrices that AdamW steps, as embeddings; `grad_dtype` is that of gradients that have another
    dtype than their parameters. With `parameters_on_host`, the mesh's device computes and the CPU stores, as with
    FSDP2's CPUOffloadPolicy. If `scheduled`, every step has another rate.
    """
    of_grads = getattr(torch, grad_dtype or dtype)
    dtype = getattr(torch, dtype)
    shapes = [*([shape for shape, _ in viewed] or SHAPES), *VECTORS, *tables]
    options["views"] = [view for _, view in viewed] or None
    if device == "cuda":
        torch.cuda.set_device(rank)
    weights = [w.to(device) for w in make(shapes, 0, dtype)]
    if layout == "single":
        params, put = [nn.Parameter(w) for w in weights], lambda tensor, i: tensor
    elif layout == "ddp":
        params, put = [nn.Parameter(w) for w in weights], lambda tensor, i: tensor
        options["replicate_group"] = dist.group.WORLD
    else:
        meshes = {}

        def put(tensor, i):
            if i in plain:
                return tensor
            mesh_shape, placements = placements_of(layout, tensor.ndim, i)
            if mesh_shape not in meshes:
                meshes[mesh_shape] = init_device_mesh(device, mesh_shape)
            stored = store(tensor, meshes[mesh_shape], placements)
            return stored.to("cpu") if parameters_on_host else stored

        params = [nn.Parameter(put(w, i)) for i, w in enumerate(weights)]
    for param in params if grad_dtype else ():
        param.grad_dtype = None  # any
    optimizer = muon_over(params, dtype, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) if scheduled else None
    for step in range(steps):
        for i, (param, grad) in enumerate(zip(params, make(shapes, step + 1, of_grads), strict=True)):
            param.grad = None if (i + step) % len(params) in missing else put(grad.to(device), i)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return whole_state(params, optimizer)


def refusal(rank, case, **options):
    """Return the error of a case that all ranks refuse."""
    from tests.distributed.training import train

    try:
        {"given_gradients": given_gradients, "train": train}[case](rank, **options)
    except BaseException as error:  # noqa: BLE001  torch.distributed.checkpoint raises one that is no Exception
        return str(error)
    return ""


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def whole_state(params, optimizer):
    """Return parameters and every tensor of their state as full tensors."""
    return [[whole(p).cpu(), *(whole(v).cpu() for _, v in sorted(optimizer.state[p].items()))] for p in params]


class Counted:
    """Counts bytes to other ranks, collectives by kind, and Newton-Schulz FLOPs of a step."""

    def __enter__(self):
        from hf_muon.distributed import agreement, exchange
        from hf_muon.math.newton_schulz import Orthogonalizer

        self.bytes, self.calls, self.flops, self.words = 0, 0, 0, 0
        self.in_flight = self.peak = 0
        self.undo = []

        def patch(module, name, replacement):
            original = getattr(module, name)
            self.undo.append((module, name, original))
            setattr(module, name, replacement(original))

        def all_to_all(original):
            def counting(received, send, expected=None, sizes=None, *, group, async_op=False):
                if sizes is None:  # ranks connect
                    return original(received, send, group=group)
                mine = dist.get_rank(group)
                self.bytes += sum(n for r, n in enumerate(sizes) if r != mine) * send.element_size()
                self.calls += 1
                return original(received, send, expected, sizes, group=group, async_op=async_op)

            return counting

        def all_gather(original):
            def counting(gathered, own, **options):
                self.words += 1
                return original(gathered, own, **options)

            return counting

        def copied(original):
            def counting(own, sizes, group):
                self.bytes += (len(sizes) - 1) * own.nbytes
                self.calls += 1
                return original(own, sizes, group)

            return counting

        def orthogonalize(original):
            def counting(this, matrices, **options):
                short, long = sorted(matrices.shape[-2:])
                steps = len(this.coefficients)
                self.flops += len(matrices) * steps * (4 * short * short * long + 2 * short**3)
                return original(this, matrices, **options)

            return counting

        patch(dist, "all_to_all_single", all_to_all)
        patch(exchange, "Copied", copied)
        patch(agreement, "all_gather", all_gather)
        patch(Orthogonalizer, "__call__", orthogonalize)
        return self

    def __exit__(self, *_):
        for module, name, original in self.undo:
            setattr(module, name, original)
