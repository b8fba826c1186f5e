"""Random models stepped in random layouts and in one process; pools import these functions by name."""

from __future__ import annotations

import copy
import functools
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from hf_muon import Muon
from hf_muon.storage.dtensor import stored_like
from hf_muon.storage.regions import regions
from hf_muon.storage.tensors import local_of
from tests.distributed.cases import store

STEPS = 2


class Model:
    """Random shapes, dtypes and views of parameters, and options of a run; many parameters share a shape."""

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.shapes, self.views, self.dtypes = [], [], []
        bases = [self.base() for _ in range(rng.randint(1, 3))]
        for _ in range(rng.randint(2, 9)):
            shape, view = self.stored(*rng.choice(bases))
            self.add(shape, view, rng.choice([torch.float32] * 4 + [torch.bfloat16, torch.bfloat16, torch.float16]))
        self.matrices = len(self.shapes)
        for _ in range(rng.randint(0, 3)):
            shape = rng.choice([(rng.randint(1, 40),), (rng.randint(1, 9), rng.randint(1, 9)), ()])
            self.add(shape, "", rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
        self.options = {
            "ns_dtype": rng.choice(["fp32", "fp32", "fp32", "bf16"]),
            "momentum_dtype": rng.choice(["auto", "fp32", "bf16", "int8"]),
            "nesterov": rng.random() < 0.7,
            "ns_steps": rng.choice([2, 3, 5]),
            "ns_coefficients": rng.choice(["polar_express", "original", "cans"]),
            "adjust_lr_fn": rng.choice(["match_rms_adamw", "original", "spectral_unclamped"]),
        }
        self.bounds = {}
        if rng.random() < 0.7:
            self.bounds["max_batch_bytes"] = rng.choice([1, 150, 2000, 20000])
        # Gradients that no rank has, and gradients of stacks in which some experts saw no token.
        self.missing = {(step, i) for step in range(STEPS) for i in range(len(self.shapes)) if rng.random() < 0.12}
        self.partly = {(step, i) for step in range(STEPS) for i in range(len(self.shapes)) if rng.random() < 0.3}
        self.decays = [rng.choice([0.0, 0.1]) for _ in range(rng.choice([1, 1, 2]))]

    def base(self):
        rng = self.rng
        if rng.random() < 0.12:  # wide enough for the Gram form and for several blocks of int8
            return rng.choice([(65, 130), (130, 66), (7, 130), (64, 97)])
        return rng.randint(1, 18), rng.randint(1, 24)

    def stored(self, m, n):
        """Draw a way to store matrices (m, n): alone, stacked, transposed, fused with others, as a convolution."""
        rng = self.rng
        stack = rng.randint(1, 9 if m * n < 4000 else 2)
        more = rng.randint(1, 6)
        ways = [
            ((m, n), ""),
            ((m, n), ""),
            ((stack, m, n), ""),
            ((stack, m, n), ""),
            ((n, m), "transposed"),
            ((stack, n, m), "transposed"),
            ((m + more, n), f"rows {m}+{more}"),
            ((2 * m, n), f"rows 2x{m}"),
            ((stack, m + more, n), f"rows {more}+{m}"),
            ((m, n + more), f"columns {n}+{more}"),
            ((2 * m, n), f"rows {m}*(1+1)"),
            ((n, 2 * m), f"transposed, columns {m}*(1+1)"),
            ((n, m + more), f"transposed, columns {m}+{more}"),
            ((m, n, 1), "flat"),
            ((2 * m, n, 2), f"flat, rows 2x{m}"),
            ((m, 2, 3), "flat"),
        ]
        return rng.choice(ways)

    def add(self, shape, view, dtype):
        self.shapes.append(shape)
        self.views.append(view)
        self.dtypes.append(dtype)

    def tensors(self, kind):
        generator = torch.Generator().manual_seed(1000 * self.seed + kind)
        drawn = [torch.randn(shape, generator=generator) for shape in self.shapes]
        for i, tensor in enumerate(drawn):
            if (kind - 1, i) in self.partly and tensor.ndim and tensor.shape[0] > 1:
                tensor[: tensor.shape[0] // 2] = 0
        return [tensor.to(dtype) for tensor, dtype in zip(drawn, self.dtypes, strict=True)]

    def optimizer(self, params, **options):
        cut = self.matrices // len(self.decays) if len(self.decays) > 1 else self.matrices
        groups = [
            {"params": params[a:b], "views": self.views[a:b], "use_muon": True, "weight_decay": decay}
            for a, b, decay in zip((0, cut), (cut, self.matrices), self.decays, strict=False)
        ]
        groups.append({"params": params[self.matrices :], "use_muon": False})
        groups = [group for group in groups if group["params"]]
        return Muon(groups, lr=0.02, **{**self.options, **self.bounds, **options})

    def __repr__(self):
        stored = [
            f"{shape} {view!r} {str(dtype).removeprefix('torch.')}"
            for shape, view, dtype in zip(self.shapes, self.views, self.dtypes, strict=True)
        ]
        return f"{stored}, {self.matrices} for Muon, decay {self.decays}, {self.options}, {self.bounds}"


@functools.cache
def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("ab"[: len(shape)]))


def somewhere(rng, ndim):
    """Draw a placement for a tensor with `ndim` dims."""
    dim = rng.randrange(ndim)
    return rng.choice([Replicate(), Shard(dim), Shard(0), _StridedShard(dim, split_factor=rng.randint(1, 3))])


def place(layout, model, i):
    """Return the mesh and the placements of a parameter; None for a plain one."""
    world, ndim = dist.get_world_size(), len(model.shapes[i])
    half = world // 2
    if layout == "ddp":
        return None
    rng = random.Random(f"{model.seed} {layout} {i}")
    if not ndim:
        return mesh_of(world), [Replicate()]
    last, stack = ndim - 1, ndim == 3
    if layout == "fsdp-tp":
        cut = [_StridedShard(0, split_factor=2), Shard(0)] if i % 2 else [Shard(0), Shard(last)]
        return (mesh_of(half, 2), cut) if ndim > 1 else (mesh_of(half, 2)["a"], [Shard(0)])
    if layout == "submesh":
        return (mesh_of(half, 2)["b"], [Shard(0)]) if stack else (mesh_of(half, 2)["a"], [Shard(last)])
    if layout == "mixed":
        mesh = mesh_of(world) if rng.random() < 0.5 else mesh_of(half, 2)
        return mesh, [somewhere(rng, ndim) for _ in range(mesh.ndim)]
    return {
        "fsdp": (mesh_of(world), [Shard(0)]),
        "last": (mesh_of(world), [Shard(last)]),
        "replicate": (mesh_of(world), [Replicate()]),
        "in turns": (mesh_of(world), [(Replicate(), Shard(0))[i % 2]]),
        "tp": (mesh_of(world), [(Shard(0), Shard(last), Replicate())[i % 3] if ndim > 1 else Replicate()]),
        "hsdp": (mesh_of(half, 2), [Replicate(), Shard(0)]),
        "experts": (mesh_of(half, 2), [Shard(1), Shard(0)]) if stack else (mesh_of(world), [Shard(0)]),
    }[layout]


# Here matrices of one shape live on two groups and do not share a unit; in one process they do.
SEVERAL_GROUPS = {"fsdp-tp", "submesh"}
LAYOUTS = {
    2: ["ddp", "fsdp", "last", "replicate", "in turns", "tp", "experts", "mixed"],
    4: ["ddp", "fsdp", "hsdp", "last", "in turns", "tp", "fsdp-tp", "experts", "submesh", "mixed", "mixed"],
}


def take_steps(model, put, options):
    params = [nn.Parameter(put(tensor, i)) for i, tensor in enumerate(model.tensors(0))]
    optimizer = model.optimizer(params, **options)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)
        for i, (param, grad) in enumerate(zip(params, model.tensors(step + 1), strict=True)):
            param.grad = None if (step, i) in model.missing else put(grad, i)
            if isinstance(param.grad, DTensor) and (step, i) in model.partly and not local_of(param.grad).any():
                param.grad = None  # the experts of this rank saw no token, those of others did
        optimizer.step()
    return [{"weight": param.detach(), **optimizer.state[param]} for param in params]


def reference(model, options):
    return take_steps(model, lambda tensor, i: tensor.clone(), options)


def part(tensor, where):
    """Return the part of a full tensor that this rank stores."""
    if where is None or not tensor.ndim:
        return tensor
    return local_of(store(tensor, *where))


def options_of(model, layout):
    """Return the options with which a layout is bit-identical to one process."""
    options = {}
    if layout in SEVERAL_GROUPS:
        options["max_batch_bytes"] = 1  # each matrix by itself, whatever its unit is
    if model.options["momentum_dtype"] == "int8" and any(cuts_blocks(model, layout, i) for i in range(model.matrices)):
        options["momentum_dtype"] = "bf16"  # int8 raises an error there
    return options


def cuts_blocks(model, layout, i):
    """Return whether a rank stores a piece of a row that does not begin and end at a multiple of 64."""
    where, shape = place(layout, model, i), model.shapes[i]
    if where is None or shape[-1] < 16:
        return False
    mesh, placements = where
    dims = [region.dims[-1] for region in regions(shape, tuple(mesh.mesh.shape), placements)]
    return any(ranges != ((0, shape[-1]),) for ranges in dims)


def compare(rank, runs):
    """Return the differences from one process, for cases `(seed, layout)`.

    Each rank computes its share of the references, and all ranks take part in each run.
    """
    world = dist.get_world_size()
    models = {seed: Model(seed) for seed, _ in runs}
    reference_keys = sorted({(seed, str(sorted(options_of(models[seed], layout).items()))) for seed, layout in runs})
    texts = {str(sorted(o.items())): o for o in (options_of(models[seed], layout) for seed, layout in runs)}
    mine = {key: reference(models[key[0]], texts[key[1]]) for key in reference_keys[rank::world]}
    shares = [None] * world
    dist.all_gather_object(shares, mine)
    references = {key: results for share in shares for key, results in share.items()}
    differences = []
    for seed, layout in runs:
        model, options = models[seed], options_of(models[seed], layout)
        expected = references[seed, str(sorted(options.items()))]
        places = [place(layout, model, i) for i in range(len(model.shapes))]

        def put(tensor, i, places=places):
            return tensor.clone() if places[i] is None else store(tensor, *places[i])

        group = dist.group.WORLD if layout == "ddp" else None
        try:
            results = take_steps(model, put, {**options, "replicate_group": group})
        except Exception as error:
            raise AssertionError(f"seed {seed}, layout {layout}, {world} ranks: {model}") from error
        for i, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
            if ours.keys() != theirs.keys():
                differences.append(f"seed {seed}, layout {layout}, parameter {i}: {ours.keys()} {theirs.keys()}")
                continue
            for key, value in ours.items():
                whole = part(theirs[key], places[i])
                if value.dtype != whole.dtype or not torch.equal(local_of(value), whole):
                    differences.append(
                        f"seed {seed}, layout {layout}, {world} ranks, parameter {i}, {key}: {places[i]}; {model}"
                    )
    return differences


class Narrow(nn.Module):
    """Layers so narrow that tensor parallelism leaves some ranks without a row or column."""

    def __init__(self):
        super().__init__()
        sizes = {"a": (6, 1), "b": (1, 6), "c": (6, 3), "d": (3, 6)}
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(*size, bias=False))
        self.embed = nn.Embedding(1, 6)


def narrow(rank):
    """Return the differences from one process, before and after loading its state, for layers that torch shards."""
    torch.manual_seed(0)
    mesh = mesh_of(2, 2)
    single = Narrow()
    model = copy.deepcopy(single)
    plan = {"a": ColwiseParallel(), "b": RowwiseParallel(), "c": ColwiseParallel(), "d": RowwiseParallel()}
    parallelize_module(model, mesh["b"], {**plan, "embed": ColwiseParallel()})
    fully_shard(model, mesh=mesh["a"])

    def optimizer_of(model):
        named = dict(model.named_parameters())
        muon = [item for item in named.items() if item[0] != "embed.weight"]
        groups = [{"params": muon}, {"params": [("embed.weight", named["embed.weight"])], "use_muon": False}]
        return Muon(groups, lr=0.1, ns_dtype="fp32")

    def own(param, tensor):
        return part(tensor, (param.device_mesh, param.placements)).reshape(param.to_local().shape)

    optimizers = [optimizer_of(single), optimizer_of(model)]
    assert any(local_of(p).shape == (0, 0) for p in model.parameters()) == (rank % 2 == 1)
    differences = []
    for step in range(4):
        if step == 2:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for alone, cut in zip(single.parameters(), model.parameters(), strict=True):
            alone.grad = torch.randn(alone.shape, generator=torch.Generator().manual_seed(step))
            cut.grad = stored_like(cut, own(cut, alone.grad), alone.shape)
        for optimizer in optimizers:
            optimizer.step()
        for (name, alone), cut in zip(single.named_parameters(), model.parameters(), strict=True):
            state = [(optimizers[1].state[cut][key], value) for key, value in optimizers[0].state[alone].items()]
            for ours, theirs in [(cut.detach(), alone.detach()), *state]:
                if not torch.equal(local_of(ours), own(cut, theirs) if theirs.ndim else theirs):
                    differences.append((step, name))
    return differences
