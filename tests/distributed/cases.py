"""What the ranks of a pool do; imported by name in their processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_muon import Muon
from hf_muon.optimizer.first_step_report import FirstStepReport
from hf_muon.storage.regions import regions

# Shapes that no number of ranks divides, fewer rows than ranks, and stacks of experts.
SHAPES = [(7, 5), (10, 16), (3, 7, 5), (10, 16), (1, 9), (2, 3), (16, 10), (5, 6, 4), (7, 5)]
# Large and wide enough for the Gram form.
LARGE = [((65, 130), ""), ((130, 65), ""), ((3, 65, 130), ""), ((66, 101), "")]
VECTORS = [(9,), (3,), (11, 4)]
# Fused, interleaved, transposed and folded weights, and stacks of such, which no number of ranks divides.
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
# Rows of several blocks of int8 momentum, of one, and of too few elements for one.
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
    """Mesh shape, and placements of a parameter of so many dims, by its place among the others where they differ."""
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
        # Stacks of experts on a mesh of their own, the rest on another.
        "experts": lambda world: ((world // 2, 2), [Shard(1), Shard(0)]) if ndim == 3 else ((world,), [Shard(0)]),
        "middle": lambda world: ((world,), [Shard(1)]),
        "odd": lambda world: ((world // 2, 2), [_StridedShard(0, split_factor=3), Replicate()]),
    }[layout](dist.get_world_size())


def store(tensor, mesh, placements):
    """Return a DTensor of a tensor that all ranks have whole, without communication."""
    coordinate = mesh.get_coordinate()
    flat = 0
    for size, position in zip(mesh.mesh.shape, coordinate, strict=True):
        flat = flat * size + position
    local = tensor
    for dim, ranges in enumerate(regions(tensor.shape, mesh.mesh.shape, placements)[flat].dims):
        kept = [i for start, stop in ranges for i in range(start, stop)]
        local = local.index_select(dim, torch.tensor(kept, dtype=torch.long, device=local.device))
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def make(shapes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def muon_over(params, dtype, views=None, **options):
    count = len(views or SHAPES)
    groups = [
        {"params": params[:count], "use_muon": True, "weight_decay": 0.1, **({"views": views} if views else {})},
        {"params": params[count:], "use_muon": False},
    ]
    return Muon(groups, lr=0.02, **{"ns_dtype": "bf16" if dtype is torch.bfloat16 else "fp32", **options})


def given_gradients(rank, layout, steps=4, dtype="float32", missing=(), plain=(), device="cpu", viewed=(), **options):
    """Step with given whole gradients in a layout, and return whole parameters and moments."""
    dtype = getattr(torch, dtype)
    shapes = ([shape for shape, _ in viewed] or SHAPES) + VECTORS
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
            return store(tensor, meshes[mesh_shape], placements)

        params = [nn.Parameter(put(w, i)) for i, w in enumerate(weights)]
    optimizer = muon_over(params, dtype, **options)
    for step in range(steps):
        for i, (param, grad) in enumerate(zip(params, make(shapes, step + 1, dtype), strict=True)):
            param.grad = None if (i + step) % len(params) in missing else put(grad.to(device), i)
        optimizer.step()
    return whole_state(params, optimizer)


def refusal(rank, case, **options):
    """Return the error of a case that all ranks refuse."""
    from tests.distributed.training import train

    try:
        {"given_gradients": given_gradients, "train": train}[case](rank, **options)
    except BaseException as error:  # noqa: BLE001  that of torch.distributed.checkpoint is no Exception
        return str(error)
    return ""


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def whole_state(params, optimizer):
    """Return parameters and every tensor of their state, whole."""
    return [[whole(p).cpu(), *(whole(v).cpu() for _, v in sorted(optimizer.state[p].items()))] for p in params]


class Counted:
    """What a step sends and computes: bytes to other ranks and collectives by kind, Newton-Schulz FLOPs."""

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
            def counting(received, send, expected, sizes, group, async_op):
                mine = dist.get_rank(group)
                self.bytes += sum(n for r, n in enumerate(sizes) if r != mine) * send.element_size()
                self.calls += 1
                return original(received, send, expected, sizes, group=group, async_op=async_op)

            return counting

        def all_gather(original):
            def counting(gathered, own, group):
                self.words += 1
                return original(gathered, own, group=group)

            return counting

        def orthogonalize(original):
            def counting(this, matrices):
                short, long = sorted(matrices.shape[-2:])
                steps = len(this.coefficients)
                self.flops += len(matrices) * steps * (4 * short * short * long + 2 * short**3)
                return original(this, matrices)

            return counting

        patch(exchange.dist, "all_to_all_single", all_to_all)
        patch(agreement, "_all_gather", all_gather)
        patch(Orthogonalizer, "__call__", orthogonalize)
        return self

    def __exit__(self, *_):
        for module, name, original in self.undo:
            setattr(module, name, original)


LAYER = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32), "gate": (88, 32), "up": (88, 32), "down": (32, 88)}
DEEP = [shape for _ in range(24) for shape in LAYER.values()]


def counted_step(rank, layout, shapes=DEEP, **options):
    """Step a deep model; return FLOPs, bytes, collectives, buckets, and bytes of all updates."""
    weights, grads = make(shapes, 0), make(shapes, 1)
    if layout in ("single", "ddp"):
        params = [nn.Parameter(w) for w in weights]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        if layout == "ddp":
            options["replicate_group"] = dist.group.WORLD
    else:
        mesh_shape, _ = placements_of(layout, 2)
        mesh = init_device_mesh("cpu", mesh_shape)
        params = [nn.Parameter(store(w, mesh, placements_of(layout, w.ndim)[1])) for w in weights]
        for param, grad in zip(params, grads, strict=True):
            param.grad = store(grad, mesh, placements_of(layout, grad.ndim)[1])
    optimizer = Muon(params, ns_dtype="fp32", **options)
    with Counted() as counted:
        optimizer.step()
    rounds = [getattr(executor, "_planned", (0, []))[1] for executor in optimizer._layout().works[0].executors]
    return {
        "flops": counted.flops,
        "bytes": counted.bytes,
        "calls": counted.calls,
        "words": counted.words,
        "rounds": sum(len(some) for some in rounds),
        "buckets": sum(len(each.buckets) for some in rounds for each in some),
        "updates": 4 * sum(w.numel() for w in weights),
    }


def complaint(rank, layout, fault):
    """Return the error of a step in which something is wrong on one rank, and whether nothing has changed."""
    ddp = layout == "ddp"
    mesh = None if ddp else init_device_mesh("cpu", placements_of(layout, 2)[0])
    weights = make(SHAPES + VECTORS, 0)

    def put(tensor):
        return tensor if ddp else store(tensor, mesh, placements_of(layout, tensor.ndim)[1])

    params = [nn.Parameter(put(w)) for w in weights]
    optimizer = muon_over(params, torch.float32, replicate_group=dist.group.WORLD if ddp else None)

    def set_gradients(seed):
        for param, grad in zip(params, make(SHAPES + VECTORS, seed), strict=True):
            param.grad = put(grad)

    set_gradients(1)
    optimizer.step()
    before = whole_state(params, optimizer)
    set_gradients(2)
    if rank == 1:
        if fault == "missing":
            params[1].grad = params[10].grad = None
        elif fault == "frozen":
            params[3].requires_grad_(False)
            params[3].grad = None
        elif fault == "nan":
            params[0].grad.to_local().fill_(float("nan")) if not ddp else params[0].grad.fill_(float("nan"))
        elif fault == "option":
            optimizer.param_groups[0]["momentum"] = 0.5
        elif fault == "state":
            del optimizer.state[params[2]]
        elif fault == "lr":
            optimizer.param_groups[0]["lr"] = None
        elif fault == "views":
            optimizer.param_groups[0]["views"] = 5
        elif fault == "step":
            optimizer.param_groups[1]["step"] = 7
        elif fault == "report":
            FirstStepReport.add, add = _fail, FirstStepReport.add
    if fault == "partial":  # as tensor parallel backward passes leave some
        if rank == 1:
            params[1].grad = None
        else:
            whole_grad = make(SHAPES, 2)[1]
            params[1].grad = DTensor.from_local(whole_grad, mesh, [Partial()] * mesh.ndim, run_check=False)
    if fault == "placements":
        swapped = nn.Parameter(params[0].detach().redistribute(mesh, [Replicate()] * mesh.ndim))
        swapped.grad = torch.zeros_like(swapped)
        optimizer.state[swapped] = optimizer.state.pop(params[0])
        optimizer.param_groups[0]["params"][0] = swapped
    try:
        optimizer.step()
    except RuntimeError as error:
        text = str(error)
    else:
        return None, True
    finally:
        if rank == 1 and fault == "report":
            FirstStepReport.add = add
    if fault in ("state", "placements"):
        return text, True
    after = whole_state(params, optimizer)
    same = all(torch.equal(a, b) for one, two in zip(before, after, strict=True) for a, b in zip(one, two, strict=True))
    return text, same


def _fail(*_):
    raise OSError("no space left on device")


def unequal(rank, what):
    """Return the error of ranks that do not have the same parameters, and whether nothing has changed."""
    shapes = [(8, 6)] * 62 if what == "count" else [(8, 6), (4, 6)]
    groups = [{"params": [nn.Parameter(torch.ones(shape)) for shape in shapes]}]
    if rank == 1 and what == "count":
        groups[0]["params"].append(nn.Parameter(torch.ones(8, 6)))
    if rank == 1 and what == "groups":
        groups = [{"params": [param]} for param in groups[0]["params"]]
    optimizer = Muon(groups, replicate_group=dist.group.WORLD)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    try:
        optimizer.step()
    except RuntimeError as error:
        untouched = not optimizer.state and all(bool((p == 1).all()) for g in groups for p in g["params"])
        return str(error), untouched


def pipeline(rank, meshed, steps=2):
    """Step a data and tensor parallel stage, all other ranks as stages of one, and one process of each stage.

    Args:
        rank: of this process.
        meshed: whether there is a matrix that all ranks of the first stage store parts of.
    """
    others = range(4, dist.get_world_size())
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    dist.new_group([0, *others])  # tied embeddings: some ranks are in more groups than others
    shapes = [(7, 6), (9, 5), (6, 10), (4,)] if rank < 4 else [(5, 3), (7, 2)]

    def put(tensor, i):
        if rank >= 4 or i in (1, 3) or (i == 2 and not meshed):
            return tensor.clone()
        return store(tensor, *((mesh["tp"], [Shard(0)]) if i == 0 else (mesh, [Shard(0), Shard(1)])))

    results = []
    for single in (False, True):
        place = (lambda tensor, i: tensor.clone()) if single else put
        params = [nn.Parameter(place(w, i)) for i, w in enumerate(make(shapes, 0))]
        groups = [{"params": [p for p in params if p.ndim == 2]}]
        groups += [{"params": [p for p in params if p.ndim == 1], "use_muon": False}]
        shared = mesh["dp"].get_group() if rank < 4 and not single else None
        optimizer = Muon(groups, ns_dtype="fp32", replicate_group=shared)
        for step in range(steps):
            for i, (param, grad) in enumerate(zip(params, make(shapes, step + 1), strict=True)):
                param.grad = place(grad, i)
            with Counted() as counted:
                optimizer.step()
        if not single:
            words = counted.words
        results.append(whole_state(params, optimizer))
    return results, words


def gradients_missing_on_one_rank(rank, layout, steps=3):
    """Step without some gradients on rank 1, and with zeros in their place."""
    results = []
    for zeros in (False, True):
        mesh_shape, _ = placements_of(layout, 2)
        mesh = init_device_mesh("cpu", mesh_shape)
        params = [nn.Parameter(store(w, mesh, placements_of(layout, w.ndim)[1])) for w in make(SHAPES + VECTORS, 0)]
        optimizer = muon_over(params, torch.float32)
        for step in range(steps):
            for i, (param, grad) in enumerate(zip(params, make(SHAPES + VECTORS, step + 1), strict=True)):
                param.grad = store(grad, mesh, placements_of(layout, grad.ndim)[1])
                if rank == 1 and i in (1, 2, 5, 9, 11):
                    param.grad = torch.zeros_like(param) if zeros else None
            optimizer.step()
        results.append(whole_state(params, optimizer))
    return results


def idle(rank, layout):
    """Collectives of a step without any gradient, and of one in which only AdamW's parameters have some."""
    mesh = init_device_mesh("cpu", placements_of(layout, 2)[0])
    params = [nn.Parameter(store(w, mesh, placements_of(layout, w.ndim)[1])) for w in make(SHAPES + VECTORS, 0)]
    optimizer = muon_over(params, torch.float32)
    with Counted() as nothing:
        optimizer.step()
    for param in params[len(SHAPES) :]:
        param.grad = torch.ones_like(param)
    with Counted() as vectors:
        optimizer.step()
    return nothing.calls, vectors.calls, len(optimizer.state)


def events(rank, max_bucket_bytes):
    """Return what a step does, in order, as (what, round, bucket), and rounds and bytes in flight at each gather."""
    from hf_muon.distributed.exchange import Exchange

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [nn.Parameter(store(w, mesh, [Shard(0)])) for w in make(DEEP, 0)]
    for param, grad in zip(params, make(DEEP, 1), strict=True):
        param.grad = store(grad, mesh, [Shard(0)])
    optimizer = Muon(params, ns_dtype="fp32", max_bucket_bytes=max_bucket_bytes)
    log, under_way, in_flight = [], {}, []
    originals = Exchange._gather, Exchange._orthogonalize, Exchange._complete

    def place(exchange, bucket):
        return next(
            (i, each.buckets.index(bucket)) for i, each in enumerate(exchange._planned[1]) if bucket in each.buckets
        )

    def gather(self, bucket, updates_of):
        which = place(self, bucket)
        log.append(("gather", *which))
        under_way[which[0]] = self._planned[1][which[0]].nbytes
        in_flight.append((len(under_way), sum(under_way.values())))
        return originals[0](self, bucket, updates_of)

    def orthogonalize(self, bucket, received, newton_schulz):
        log.append(("orthogonalize", *place(self, bucket)))
        return originals[1](self, bucket, received, newton_schulz)

    def complete(self, bucket, leaving):
        which = place(self, bucket)
        log.append(("complete", *which))
        if which[1] == len(self._planned[1][which[0]].buckets) - 1:
            under_way.pop(which[0])
        return originals[2](self, bucket, leaving)

    Exchange._gather, Exchange._orthogonalize, Exchange._complete = gather, orthogonalize, complete
    try:
        optimizer.step()
    finally:
        Exchange._gather, Exchange._orthogonalize, Exchange._complete = originals
    return log, in_flight
