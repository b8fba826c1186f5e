"""A fault on one rank of several: all ranks raise the same error, none waits for another, and nothing has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hf_muon import Muon, build_optimizer
from hf_muon.optimizer import step_plan
from tests.distributed.test_nameless import homeless
from tests.equality.cells import Cell
from tests.equality.layouts import FAULTS, Layout, changed, layout_of
from tests.equality.runs import VICTIM, digest, prepare, train
from tests.optimizer.cases import gradients, parameters
from tests.optimizer.cases import run as steps_of
from tests.refusals import error_of, table
from tests.rules.attention_models import backward, make, tokens

Fault = Iterator[None]


def _params(layout: Layout) -> list[Tensor]:
    return [param for group in layout.optimizer.param_groups for param in group["params"]]


@contextlib.contextmanager
def frozen(layout: Layout) -> Fault:
    param = _params(layout)[3]
    param.requires_grad_(False)
    param.grad = None
    yield
    param.requires_grad_(True)


@contextlib.contextmanager
def no_params(layout: Layout) -> Fault:
    lost = layout.optimizer.param_groups[1].pop("params")
    yield
    layout.optimizer.param_groups[1]["params"] = lost


@contextlib.contextmanager
def no_state(layout: Layout) -> Fault:
    param = _params(layout)[2]
    lost = layout.optimizer.state.pop(param)
    yield
    layout.optimizer.state[param] = lost


def _raise(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@contextlib.contextmanager
def no_memory(layout: Layout) -> Fault:
    """Have no memory for state, in a step that looks at it because it has one entry more."""
    own = layout.optimizer.state[_params(layout)[2]]
    own["of a user"] = 1
    with mock.patch.object(step_plan, "completed", _raise(torch.OutOfMemoryError("2 GiB"))):
        yield
    del own["of a user"]


OF_ONE_RANK = {
    **FAULTS,
    "frozen": frozen,
    "no params": no_params,
    "no state": no_state,
    "views": partial(changed, index=0, key="views", value=5),
    "initial_lr": partial(changed, index=0, key="initial_lr", value=0.5),
    "of a rule": partial(changed, index=0, key="of_a_rule", value=0.5),
    "placements": lambda _: mock.patch.object(DTensor, "placements", property(_raise(OSError("no space")))),
    "options": lambda _: mock.patch.object(step_plan, "hyperparameters", _raise(OSError("no space"))),
    "memory": no_memory,
}


@contextlib.contextmanager
def partial_gradient(layout: Layout) -> Fault:
    """Have a gradient that is no part of a sum, as some tensor parallel backward passes leave, but not on one rank."""
    param = _params(layout)[1]
    given = layout.given(2)[layout.optimizer.param_groups[0]["param_names"][1]]
    unsummed = DTensor.from_local(given, param.device_mesh, [Partial()] * param.device_mesh.ndim, run_check=False)
    param.grad = None if layout.rank == VICTIM else unsummed
    yield


@contextlib.contextmanager
def moved_weight(layout: Layout) -> Fault:
    """Have a parameter stored in another way than its momentum, on all ranks."""
    group = layout.optimizer.param_groups[0]
    param = group["params"][0]
    swapped = nn.Parameter(param.detach().redistribute(placements=[Replicate()] * param.device_mesh.ndim))
    swapped.grad = torch.zeros_like(swapped)
    layout.optimizer.state[swapped] = layout.optimizer.state.pop(param)
    group["params"][0] = swapped
    yield
    layout.optimizer.state[param] = layout.optimizer.state.pop(swapped)
    group["params"][0] = param


OF_ALL = {"partial gradient": partial_gradient, "moved weight": moved_weight}


def step(rank: int, place: str, fault: str) -> str:
    """Return the error of the second step, which has a fault."""
    layout = layout_of(Cell(place=place), rank)
    train(layout, 0, 1)
    before = digest(layout.tensors())
    prepare(layout, 1)
    if fault == "initial_lr":  # a scheduler has set it on all ranks
        layout.optimizer.param_groups[0][fault] = 0.25
    fault_of = OF_ALL.get(fault) or (OF_ONE_RANK[fault] if rank == VICTIM else lambda _: contextlib.nullcontext())
    with fault_of(layout):
        text = error_of(layout.optimizer.step)
    assert digest(layout.tensors()) == before
    return text


def other_parameters(rank: int, what: str) -> str:
    """Return the error of a step of ranks with different parameters."""
    # At the boundary between one and two words of 62 bits in a report.
    shapes = [(8, 6)] * (62 + (rank == VICTIM)) if what == "more" else [(8, 6), (4, 6)]
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    apart = what == "groups" and rank == VICTIM
    groups = [{"params": [param]} for param in params] if apart else [{"params": params}]
    optimizer = Muon(groups, replicate_group=dist.group.WORLD)
    for param in params:
        param.grad = torch.ones_like(param)
    text = error_of(optimizer.step)
    assert not optimizer.state
    assert all(bool((param == 1).all()) for param in params)
    return text


def load(rank: int, wrong: str) -> str:
    """Return the error of loading a state that is wrong on one rank; loading DTensors may communicate."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)]))
    optimizer = Muon([param], ns_dtype="fp32")
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = {key: value.to_local().clone() for key, value in optimizer.state[param].items()}
    state: Any = optimizer.state_dict()
    moments = state["state"][0] = dict(state["state"][0])
    moved = moments["momentum_buffer"].redistribute(mesh, [Shard(1)])
    if rank == VICTIM:
        if wrong == "not a mapping":
            state = None
        elif wrong == "a shape":
            moments["momentum_buffer"] = torch.zeros(5, 5)
        elif wrong == "a step":
            state["param_groups"][0]["step"] = 7
        elif wrong == "a hook":
            optimizer.register_load_state_dict_pre_hook(lambda *_: {}["mine"])
    elif wrong == "a placement":
        moments["momentum_buffer"] = moved
    kind = KeyError if wrong == "a hook" and rank == VICTIM else ValueError
    text = error_of(lambda: optimizer.load_state_dict(state), kind)
    text += " [load-hook-failed]" if kind is KeyError else ""  # it is the error of the user's own hook
    assert all(torch.equal(value, optimizer.state[param][key].to_local()) for key, value in before.items())
    return text


def load_replicas(rank: int) -> str:
    """Return the error of replicas of which one has lost an entry of a rule's state."""
    weights = parameters()
    optimizer = Muon(weights, replicate_group=dist.group.WORLD, normalize="rows")
    steps_of(optimizer, weights, gradients(steps=1))
    saved = optimizer.state_dict()
    if rank == VICTIM:
        saved["state"][1]["row_second_moment"] = saved["state"][1]["row_second_moment"][1:]
    return error_of(lambda: optimizer.load_state_dict(saved), ValueError)


def cut_blocks(rank: int) -> str:
    """Return the error of moments in 8 bits where ranks store parts of rows."""
    return error_of(lambda: layout_of(Cell(place="last-2", model="wide", momentum="int8"), rank))


def step_alone(rank: int) -> str:
    """Return the error of `qk_clip` on ranks whose gradients nobody reduces."""
    model = make("llama")
    optimizer = build_optimizer(model, qk_clip=100)
    backward(model, tokens(1))
    return error_of(optimizer.step)


def on(function: Any, ranks: int = 2, *, alike: bool = True, **options: Any) -> Any:
    """Return an attempt by the ranks of a pool, which all say the same."""

    def attempt(pools: Any) -> list[str]:
        texts = pools[ranks].run(function, **options)
        assert not alike or len(set(texts)) == 1, texts
        return texts

    return attempt


# Where, what, the code, and what the error must say.
STEPS = [
    ("copies-2", "missing", "diverging-gradients", r"m0 \(7, 5\) has a gradient on rank 0 .* rank 1"),
    ("hsdp-last-4", "missing", "diverging-gradients", r"m0 \(7, 5\) has a gradient on rank .* rank 1"),
    ("copies-2", "frozen", "diverging-gradients", r"m3 \(10, 16\).* rank 1"),
    ("copies-2", "nan", "gradient-not-finite", r"m0 \(7, 5\).*rank 1"),
    ("placed-fsdp-2", "nan", "gradient-not-finite", r"m0 \(7, 5\).*rank 1"),
    ("placed-fsdp-2", "option", "ranks-disagree", r"momentum=0\.95 in param group 0, rank 1 has momentum=0\.5"),
    ("copies-2", "initial_lr", "ranks-disagree", r"initial_lr=0\.25 in param group 0, rank 1 has initial_lr=0\.5"),
    ("copies-2", "of a rule", "ranks-disagree", r"rank 1 has of_a_rule=0\.5 in param group 0"),
    ("placed-fsdp-2", "no state", "moments-gone", r"taken 1 steps .*\(3, 7, 5\) lacks momentum_buffer.*rank 1"),
    ("placed-fsdp-2", "lr", "invalid-value", "lr=None.*rank 1"),
    ("copies-2", "lr", "invalid-value", "lr=None.*rank 1"),
    ("placed-fsdp-2", "views", "", "TypeError.*rank 1"),
    ("copies-2", "step", "ranks-disagree", "step=1 in param group 1, rank 1 has step=7"),
    ("placed-fsdp-2", "placements", "", "OSError: no space.*rank 1"),
    ("copies-2", "options", "", "OSError: no space.*rank 1"),
    ("copies-2", "memory", "", "OutOfMemoryError: 2 GiB.*rank 1"),
    *(
        (place, "no params", "no-params", r"^[^\n]*\n[^\n]*param group 1 [^\n]*rank 1\]\Z")
        for place in ("copies-2", "placed-fsdp-2")
    ),
    ("placed-fsdp-2", "partial gradient", "gradient-placements", r"m1 \(10, 16\).*Partial.* rank 0, .*rank 1"),
    ("placed-fsdp-2", "moved weight", "moment-misfit", "momentum_buffer.*Shard.*Replicate"),
]


ON, LOAD = "Muon.step on ranks", "Muon.load_state_dict on ranks"
LOADS = {
    "not a mapping": ("not-a-state", "None.*rank 1"),
    "a shape": ("moment-shape", "momentum_buffer.*rank 1"),
    "a step": ("ranks-disagree", "param group 0 after .* steps"),
    "a hook": ("load-hook-failed", "mine"),
    "a placement": ("ranks-disagree", "stored as"),
}
CASES = table(
    [
        *((code, ON, on(step, int(at[-1]), place=at, fault=fault), says) for at, fault, code, says in STEPS),
        ("int8-blocks", ON, on(cut_blocks), r"\(7, 130\) .*Shard\(dim=1\).* 130 .* 64,.* bf16"),
        ("logits-of-one-rank", ON, on(step_alone), "one of 2"),
        ("no-names", ON, on(homeless, named=False), r"parameter 0 .*, parameter 1 .*\(name, parameter\)"),
        ("ranks-disagree", ON, on(other_parameters, what="more"), "62 .*, rank 1 has 63"),
        ("ranks-disagree", ON, on(other_parameters, what="groups"), "of 2, rank 1 .* 1 and 1"),
        *((code, LOAD, on(load, alike=wrong != "a hook", wrong=wrong), says) for wrong, (code, says) in LOADS.items()),
        ("moment-shape", LOAD, on(load_replicas), "rank 1"),
    ]
)
