"""How ranks store a model and step it: what each framework must say of itself, in a class of some lines."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from hf_muon import Muon, build_optimizer
from hf_muon.optimizer.sharded_checkpoints import loading_from
from hf_muon.storage.dtensor import wrapped
from hf_muon.storage.tensors import local_of
from tests.equality.cells import RULES, Cell
from tests.equality.models import Given, Routed
from tests.equality.placed import placements_of, stored, whole


class Layout:
    """A model and its optimizer in one process; the base of all adapters.

    An adapter says how it wraps a model (`wrap`), or replaces what else it does in another way. `start` may make
    anything, as long as `module` holds the parameters by their names, and `optimizer` is the `Muon` that steps them.

    Args:
        cell: what to train.
        rank: of this process.
        folder: for files of the run.
    """

    def __init__(self, cell: Cell, rank: int = 0, folder: str = "") -> None:
        self.cell, self.rank, self.folder = cell, rank, folder
        self.device = "standin" if cell.on_device else "cpu"
        self.module: nn.Module = self.filled(cell)
        self.stack = contextlib.ExitStack()
        self.start()

    def filled(self, cell: Cell) -> nn.Module:
        """Return a module with the weights of a cell."""
        dtype = getattr(torch, cell.dtype)
        module = module_of(cell).to(dtype)
        for name, weight in self.given(0).items():
            replace_(module, name, weight.to(dtype).to(self.device))
        self.allow_grad_dtype(module)
        return module

    def allow_grad_dtype(self, module: nn.Module) -> None:
        for param in module.parameters() if self.cell.grad_dtype else ():
            param.grad_dtype = None  # any

    def given(self, seed: int) -> dict[str, Tensor]:
        """Return whole random tensors by name: weights for the seed 0, and the gradients of a step."""
        cell, generator = self.cell, torch.Generator().manual_seed(seed)
        dtype = getattr(torch, (cell.grad_dtype if seed else "") or cell.dtype)
        with torch.device("meta"):
            shapes = {name: param.shape for name, param in module_of(cell).named_parameters()}
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        if dtype is torch.float16:  # half of a number so small that it would lose bits
            tensors = {name: tensor.mul(2**10).round().div(2**10) for name, tensor in tensors.items()}
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    # --- what adapters replace

    def start(self) -> None:
        self.model = self.wrap(self.module)
        self.optimizer = self.build()

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def build(self, **options: Any) -> Muon:
        """Return the optimizer of the module's parameters, as they are stored now."""
        options = {**self.cell.options, **self.of_rank(), **options}
        if self.cell.model == "routed":
            return build_optimizer(self.model, **options)
        params = dict(self.module.named_parameters())
        groups: list[dict[str, Any]] = [{"use_muon": True, "weight_decay": 0.1}, {"use_muon": False}]
        for group in groups:
            own = [(name, view) for name, _, view, use_muon in self.cell.shapes() if use_muon is group["use_muon"]]
            group["params"] = [(name, params[name]) for name, _ in own]
            if group["use_muon"] and any(view for _, view in own):
                group["views"] = [view for _, view in own]
            if "scaled" in RULES[self.cell.rule]:
                group["lr_factors"] = [0.5 + i % 3 for i in range(len(own))]
        return Muon(groups, **options)

    def of_rank(self) -> dict[str, Any]:
        """Return options that belong to the place."""
        if self.cell.options.get("diagnostics_every"):
            return {"diagnostics_file": f"{self.folder}/metrics-{self.rank}.jsonl"}
        return {}

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        """Compute gradients that are, averaged over ranks, the given ones."""
        self.model({name: grad.to(self.device) for name, grad in gradients.items()}).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Return whole weights and moments; all ranks take part. A layout that has no whole moments leaves them out."""
        results = {}
        for group in self.optimizer.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                for key, value in {"weight": param, **self.optimizer.state[param]}.items():
                    results[f"{name.removeprefix('module.')} {key}"] = whole(value)
        return results

    def save(self, path: str, without: str = "") -> None:
        """Write a checkpoint.

        Args:
            path: of a folder; a checkpoint of whole tensors is a file in it.
            without: a key that the state of no parameter has there, as if it were lost.
        """
        state = self._state()
        if without:
            moments = state["optimizer"]["state"]
            state["optimizer"]["state"] = {
                name: {key: value for key, value in own.items() if key != without} for name, own in moments.items()
            }
        if self.cell.form != "full":
            dcp.save(state, checkpoint_id=path)
        elif self.rank == 0:
            torch.save(state, f"{path}.pt")
        if dist.is_initialized():
            dist.barrier()

    def load(self, path: str, *, converts: bool = False) -> None:
        """Load a checkpoint.

        Args:
            path: as of `save`.
            converts: read a sharded one as it was written, and then convert it.
        """
        if self.cell.form == "full":
            state = torch.load(f"{path}.pt", weights_only=True)
        else:
            with loading_from(self.optimizer, path) if converts else contextlib.nullcontext():
                state = self._state()
            dcp.load(state, checkpoint_id=path)
        options = self._options()
        set_model_state_dict(self.model, state["model"], options=options)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)

    def end(self) -> None:
        self.stack.close()

    def _options(self, *, saving: bool = False) -> StateDictOptions:
        form = self.cell.form
        full = form == "full"
        return StateDictOptions(
            full_state_dict=full, cpu_offload=full and saving, flatten_optimizer_state_dict=form == "flat"
        )

    def _state(self) -> dict[str, Any]:
        options = self._options(saving=True)
        return {
            "model": get_model_state_dict(self.model, options=options),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }


def module_of(cell: Cell) -> nn.Module:
    return Routed() if cell.model == "routed" else Given({name: shape for name, shape, *_ in cell.shapes()})


class DDP(Layout):
    def wrap(self, module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)


class Plain(Layout):
    """Plain parameters whose gradients are simply there."""

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        for name, param in self.module.named_parameters():
            param.grad = gradients[name].to(self.device) if name in gradients else None


class Copies(Plain):
    """Plain parameters on all ranks, whose gradients are equal, in a `replicate_group`."""

    def of_rank(self) -> dict[str, Any]:
        return {**super().of_rank(), "replicate_group": dist.group.WORLD}


class FSDP(Layout):
    """FSDP2 on a mesh of one axis or two, reshard or not, over tensor parallelism or not."""

    def __init__(
        self, *args: Any, axes: tuple[str, ...] = ("shard",), tp: bool = False, rows: bool = False, **options: Any
    ) -> None:
        self.axes, self.tp, self.rows, self.options = axes, tp, rows, options
        super().__init__(*args)

    def wrap(self, module: nn.Module) -> nn.Module:
        world = dist.get_world_size()
        if self.tp:
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
            tp = (lambda i, param: Shard(0)) if self.rows else tensor_parallel
            place_parameters(module, lambda i, param: (mesh["tp"], [tp(i, param)]))
            mesh = mesh["dp"]
        else:
            shape = (2, world // 2) if len(self.axes) == 2 else (world,)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=self.axes)
        return fully_shard(module, mesh=mesh, **self.options)


class Emptied(FSDP):
    """FSDP2 over tensor parallelism that leaves some ranks no row, of which torch has shards of a shape of their own.

    It has no backward pass for them: gradients are put there.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, tp=True, rows=True)

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        for name, param in self.module.named_parameters():
            own = stored(gradients[name], param.device_mesh, param.placements).to_local()
            param.grad = wrapped(param, own.reshape(param.to_local().shape), param.shape)


class TP(Layout):
    """Tensor parallelism alone: columns, rows or nothing of each parameter in turn."""

    def wrap(self, module: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        place_parameters(module, lambda i, param: (mesh, [tensor_parallel(i, param)]))
        return module


class Placed(Layout):
    """Placements of any kind, also such as no framework makes; gradients are stored as their parameters."""

    def wrap(self, module: nn.Module) -> nn.Module:
        meshes = functools.cache(lambda *shape: init_device_mesh(self.device, shape))

        def place(i: int, param: Tensor) -> Any:
            shape, placements = placements_of(self.cell.layout, param.ndim, i)
            return meshes(*shape), placements

        place_parameters(module, place, self._put)
        self.allow_grad_dtype(module)
        return module

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        for name, param in self.module.named_parameters():
            if name in gradients:
                param.grad = self._put(gradients[name].to(self.device), param.device_mesh, param.placements)

    def _put(self, tensor: Tensor, mesh: Any, placements: Any) -> Tensor:
        placed = stored(tensor, mesh, placements)
        return placed.to("cpu") if self.cell.numbers == "host" else placed


class Accelerate(Layout):
    """DDP as `Accelerator.prepare` makes it, before or after the optimizer."""

    def start(self) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        from tests.integrations.accelerate_cases import accelerate_states

        self.stack.enter_context(accelerate_states(self.rank, self.cell.ranks))
        self.model = self.module
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[unused])
        self.model, self.prepared = self.accelerator.prepare(self.module, self.build())
        self.optimizer = self.prepared.optimizer

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        self.accelerator.backward(self.model(gradients))

    def step(self) -> None:
        self.prepared.step()
        self.prepared.zero_grad()


PLACED = ("last", "replicate", "hsdp-last", "fsdp-tp-row", "fsdp-fsdp", "experts", "mixed", "mixed-turned")
LAYOUTS: dict[str, Callable[..., Layout]] = {
    "single": Plain,
    "ddp": DDP,
    "copies": Copies,
    "fsdp": FSDP,
    "fsdp-keep": functools.partial(FSDP, reshard_after_forward=False),
    "hsdp": functools.partial(FSDP, axes=("replicate", "shard")),
    "tp": TP,
    "fsdp-tp": functools.partial(FSDP, tp=True),
    "emptied": Emptied,
    "accelerate": Accelerate,
    **{f"placed-{name}": Placed for name in ("fsdp", "hsdp", "fsdp-tp")},
    **dict.fromkeys((*PLACED, "middle", "odd"), Placed),
}
PLACES = {
    2: ("ddp", "copies", "fsdp", "fsdp-keep", "tp", "fsdp-tp", "accelerate", "last", "replicate", "mixed"),
    4: ("ddp", "fsdp", "hsdp", "tp", "fsdp-tp", *PLACED),
}
"""The layouts that make sense on so many ranks."""
CUTS_COLUMNS = {"tp", "fsdp-tp", "last", "fsdp-tp-row", "mixed", "mixed-turned", "odd"}
"""Layouts that cut rows, of which moments in 8 bits are stored by blocks."""


def layout_of(cell: Cell, rank: int = 0, folder: str = "") -> Layout:
    """Start the run of a cell on this rank. DeepSpeed's adapters are in `tests.deepspeed.layouts`."""
    found = LAYOUTS.get(cell.layout)
    if found is None:
        found = importlib.import_module("tests.deepspeed.layouts").LAYOUTS[cell.layout]
    return found(cell, rank, folder)


def place_parameters(
    module: nn.Module, place: Callable[[int, Tensor], tuple[Any, Any]], put: Callable[..., Tensor] = stored
) -> None:
    """Store each parameter as `place` says of its number and itself."""
    for i, (name, param) in enumerate(list(module.named_parameters())):
        replace_(module, name, put(param.detach(), *place(i, param)))


def replace_(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, own = name.rpartition(".")
    module.get_submodule(owner).register_parameter(own, nn.Parameter(tensor))


def tensor_parallel(i: int, param: Tensor) -> Any:
    if param.ndim < 2:
        return Replicate()
    return (Shard(0), Shard(param.ndim - 1), Replicate())[i % 3]


# --- faults of one rank


def _first_gradient(layout: Layout) -> Tensor:
    grads = (param.grad for group in layout.optimizer.param_groups for param in group["params"])
    return next(local for grad in grads if grad is not None and (local := local_of(grad)).numel())


@contextlib.contextmanager
def changed(layout: Layout, index: int, key: str, value: Any) -> Iterator[None]:
    with mock.patch.dict(layout.optimizer.param_groups[index], {key: value}):
        yield


@contextlib.contextmanager
def _gradient(layout: Layout, value: float | None) -> Iterator[None]:
    if value is None:
        next(iter(layout.optimizer.param_groups[0]["params"])).grad = None
    else:
        _first_gradient(layout).view(-1)[0] = value
    yield


FAULTS: dict[str, Callable[[Layout], contextlib.AbstractContextManager[None]]] = {
    "nan": lambda layout: _gradient(layout, torch.nan),
    "inf": lambda layout: _gradient(layout, torch.inf),
    "missing": lambda layout: _gradient(layout, None),
    "option": lambda layout: changed(layout, 0, "momentum", 0.5),
    "lr": lambda layout: changed(layout, 0, "lr", None),
    "step": lambda layout: changed(layout, 1, "step", 7),
}
"""What one rank alone has before a step, in a context; gradients are computed anew after it."""
