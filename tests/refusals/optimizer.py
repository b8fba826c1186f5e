"""Arguments, parameters, gradients and states that the optimizer refuses, in one process."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as Cut

from hf_muon import Muon, MuonOfGroups, build_optimizer, route_parameters
from hf_muon.optimizer.partitioned import attach_partitions, expect_partitions
from tests.optimizer.cases import REST, SHAPES, parameters, step, stepped
from tests.refusals import Refusal, error_of, table

NAN, INF = float("nan"), float("inf")
HUGE = 10**5000  # more digits than Python prints


# --- arguments


def muon(**options: Any) -> Callable[[], Any]:
    return lambda: Muon(parameters([(4, 4)]), **options)


def of_group(**group: Any) -> Callable[[], Any]:
    return lambda: Muon([{"params": parameters(), **group}])


def add(**group: Any) -> Callable[..., Any]:
    return lambda given: given[1].add_param_group(group)


def add_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    build_optimizer(model).add_param_group({"params": model[1].parameters()})


TWO = [(3, -3, 1)] * 2
ARGUMENTS = [
    *table(
        [
            ("not-a-matrix", "Muon", lambda: Muon(parameters([(4,)])), r"parameter 0 \(4,\)"),
            ("not-a-matrix", "Muon", lambda: Muon(parameters([(4, 4), (2, 3, 4, 5)])), r"parameter 1 \(2, 3, 4, 5\)"),
            ("invalid-value", "Muon", muon(lr=-1.0), "lr=-1.0.*at least 0"),
            *(("invalid-value", "Muon", muon(lr=form(-4.4e-21)), "lr=") for form in (float, torch.tensor)),
            *(("invalid-value", "Muon", muon(lr=form(NAN)), "lr=") for form in (float, torch.tensor)),
            ("invalid-value", "Muon", muon(lr=torch.tensor(INF)), r"lr=tensor\(.*at least 0"),
            ("invalid-value", "Muon", muon(lr=torch.ones(2)), "lr="),
            ("invalid-value", "Muon", of_group(lr=-1e-8), "lr=-1e-08"),
            ("invalid-value", "Muon", muon(weight_decay=-0.1), "weight_decay=-0.1"),
            ("invalid-value", "Muon", muon(momentum=1.0), "momentum=1.0.*0 to below 1"),
            ("invalid-value", "Muon", muon(nesterov=1), "nesterov=1.*true or false"),
            ("invalid-value", "Muon", muon(ns_steps=0), "ns_steps=0"),
            ("invalid-value", "Muon", muon(update_rms=-0.2), "update_rms=-0.2.*above 0"),
            ("invalid-value", "Muon", muon(adjust_lr_fn="none"), "match_rms_adamw, original or spectral_unclamped"),
            ("invalid-value", "Muon", muon(adamw_betas=(0.9, 1.0)), "adamw_betas="),
            ("invalid-value", "Muon", of_group(use_muon=HUGE), "use_muon=<int>"),
            *(
                ("not-one-for-each", "Muon", of_group(**{key: HUGE}), f"{key}: <int>")
                for key in ("views", "param_names", "lr_factors")
            ),
            ("not-one-for-each", "Muon", of_group(lr_factors=[HUGE] * len(SHAPES)), "lr_factors: <list>"),
            ("not-one-for-each", "Muon", of_group(lr_factors=[np.float32("inf")] * len(SHAPES)), "lr_factors: "),
            ("ns-steps-misfit", "Muon", muon(ns_coefficients=TWO, ns_steps=5), "lists 2 "),
            ("unused-update-rms", "Muon", muon(update_rms=0.3, adjust_lr_fn="spectral_unclamped"), "update_rms=0.3"),
            ("fp16-on-cpu", "Muon", muon(ns_dtype="fp16"), ""),
            ("no-params", "Muon", lambda: Muon([{"lr": 0.1, "momentum": 0.1}]), "group 0 .*lr, momentum"),
            ("no-params", "MuonOfGroups", lambda: MuonOfGroups([{"params": parameters()}, {"lr": 0.1}]), "group 1"),
            ("not-a-mapping", "MuonOfGroups", lambda: MuonOfGroups(parameters(), 0.5), ""),
            ("invalid-value", "build_optimizer", lambda: build_optimizer(nn.Linear(3, 3), {"lr": -1e-8}), "lr="),
        ]
    ),
    Refusal("nothing-trained", "add_param_group", add_frozen, says="param group 2"),
    *table(
        [
            ("no-params", "add_param_group", add(), "group 2"),
            ("unknown-option", "add_param_group", add(params=parameters(), betas=0.9), "'betas'.*'adamw_betas'"),
            ("unknown-option", "add_param_group", add(params=parameters(), nesterof=True), "'nesterov'.*: params"),
            ("unknown-option", "add_param_group", add(params=parameters(), muon=True), "'muon'"),
            ("names-differ", "add_param_group", add(params=[("new", parameters()[0])]), "without names"),
            ("not-a-matrix", "add_param_group", add(params=parameters([(3,)])), r"\(3,\)"),
            ("only-default", "add_param_group", add(params=parameters(), differentiable=True), "differentiable"),
            ("unknown-option", "add_param_group", add(params=parameters(), comm_dtype="bf16"), "Muon as a whole"),
            ("ns-steps-misfit", "add_param_group", add(params=parameters(), ns_coefficients=TWO, ns_steps=6), "2"),
        ],
        given=lambda: (None, unnamed()),
    ),
]  # fmt: skip


# --- parameters


class Shard(torch.Tensor):
    """A tensor like another framework's DTensor: its shape is the shape of its shard."""


def as_parameters_do(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return nn.Parameter.__torch_function__(func, types, args, kwargs or {})


def as_it_is(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


def behaving(name: str, *bases: type, **attributes: Any) -> Any:
    return type(name, bases or (nn.Parameter,), attributes)


FUNCTION, DISPATCH = "__torch_function__", "__torch_dispatch__"
Behaving = behaving("Behaving", **{FUNCTION: classmethod(as_parameters_do)})
DTensorBase = behaving("DTensorBase")  # of another framework
STRANGE = [
    *(Behaving, behaving("BehavingTagged", Behaving), behaving("Int8Params", Behaving, has_fp16_weights=True)),
    *(behaving("Dispatching", **{DISPATCH: classmethod(as_it_is)}), DTensorBase, behaving("Of", DTensorBase)),
]


def shard(*shape: int, requires_grad: bool = True) -> torch.Tensor:
    return torch.zeros(shape).as_subclass(Shard).requires_grad_(requires_grad)


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    model[1]._parameters["weight"] = shard(4, 6)
    return model


def ready(model: nn.Module) -> Muon:
    return MuonOfGroups([{"params": list(model.parameters())}])


def tagged(**attributes: Any) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(4, 4))
    param.__dict__.update(attributes)
    return param


def flat() -> nn.Module:
    """Return a module of FSDP1, which has no matrix."""
    module = nn.LayerNorm(4)
    module.weight.__dict__["_is_flat_param"] = True
    return module


def alone(attempt: Callable[[Any], Any]) -> Callable[[], Any]:
    """Make an attempt with a mesh of one rank."""

    @functools.wraps(attempt)
    def with_mesh() -> Any:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return attempt(init_device_mesh("cpu", (1,)))
        finally:
            dist.destroy_process_group()

    del with_mesh.__wrapped__
    return with_mesh


def dtensor(mesh: Any, placement: Any, local: torch.Tensor | None = None) -> nn.Parameter:
    param = nn.Parameter(DTensor.from_local(torch.zeros(4, 6), mesh, [placement]))
    if local is not None:
        param._local_tensor = local
    return param


def step_of_swapped(mesh: Any, param: nn.Parameter, grad: torch.Tensor) -> Any:
    """Step DTensors that stand in the groups of an optimizer over plain parameters, as those of accelerate's FSDP2."""
    optimizer = Muon(parameters([(4, 6)]))
    optimizer.param_groups[0]["params"][0] = param
    param.grad = grad
    optimizer.step()


def of_dtype(dtype: torch.dtype, use_muon: bool) -> Callable[[], Any]:
    param = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
    return lambda: Muon([{"params": [param], "use_muon": use_muon}])


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 4))


def one_of(cls: type) -> Callable[[], Any]:
    return lambda: Muon([torch.Tensor._make_subclass(cls, torch.zeros(4, 6), True)])


UNKNOWN, PARTIAL, WRAPPED = "unknown-tensor-class", "partial-placement", "wrapped-after-backward"
PARAMETERS = table(
    [
        (UNKNOWN, "build_optimizer", lambda: build_optimizer(network()), "optimizer.Shard"),
        (UNKNOWN, "MuonOfGroups", lambda: ready(network()), "Shard"),
        (UNKNOWN, "Muon", lambda: Muon([shard(4, 6)]), r"parameter 0 \(4, 6\).*optimizer.Shard"),
        (UNKNOWN, "Muon", lambda: Muon([{"params": [shard(4, 6)], "use_muon": False}]), "Shard"),
        *((UNKNOWN, "Muon", one_of(cls), rf"\.{cls.__name__}, ") for cls in STRANGE),
        (UNKNOWN, "Muon", alone(lambda mesh: Muon([dtensor(mesh, Cut(0), shard(4, 6))])), "DTensor.*Shard"),
        (UNKNOWN, "Muon", alone(lambda mesh: Muon([dtensor(mesh, Replicate(), shard(4, 6))])), "DTensor.*Shard"),
        *(
            ("unsupported-dtype", "Muon", of_dtype(dtype, use_muon), rf"parameter 0 \(4, 4\).*{dtype}.*float32")
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
            for use_muon in (True, False)
        ),
        *(("unsupported-dtype", "Muon", of_dtype(torch.complex64, side), "view_as_real") for side in (True, False)),
        ("lazy-parameter", "build_optimizer", lambda: build_optimizer(lazy()), "0.weight"),
        ("lazy-parameter", "route_parameters", lambda: route_parameters(lazy()), "0.weight"),
        ("lazy-parameter", "Muon", lambda: Muon(lazy().parameters()), "parameter 0"),
        ("fsdp1", "Muon", lambda: Muon([tagged(_is_flat_param=True)]), ""),
        ("fsdp1", "build_optimizer", lambda: build_optimizer(flat()), "weight is .*strategy=fsdp2"),
        (PARTIAL, "Muon", alone(lambda mesh: Muon([dtensor(mesh, Partial())])), ""),
        (PARTIAL, "Muon.step", alone(lambda m: step_of_swapped(m, dtensor(m, Partial()), dtensor(m, Partial()))), ""),
        (WRAPPED, "Muon.step", alone(lambda m: step_of_swapped(m, dtensor(m, Cut(0)), torch.ones(4, 6))), ""),
    ],
    error=RuntimeError,
)  # fmt: skip

# --- steps


def spoiled(change: Callable[[dict[str, Any], Muon], Any], momentum_dtype: str = "auto") -> tuple[Any, Muon]:
    """Return a model and its optimizer after some steps, with gradients, and with something that a step refuses."""
    model, optimizer = stepped(momentum_dtype=momentum_dtype)
    change(dict(model.named_parameters()), optimizer)
    return model, optimizer


def entry(name: str, value: float) -> Callable[..., None]:
    """Return a change of one entry of a gradient."""
    return lambda params, _: params[name].grad.view(-1)[-1:].fill_(value)


def written(group: int, **options: Any) -> Callable[..., None]:
    """Return what a scheduler, a hook or a user may write into a group."""
    return lambda _, optimizer: optimizer.param_groups[group].update(options)


def grad_of(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return an attempt to step with a gradient of a dtype that torch lets a user set by force."""

    def attempt() -> None:
        model, optimizer = stepped(torch.bfloat16)
        param = dict(model.named_parameters())[name]
        param.grad = param.grad_dtype = None  # torch accepts any dtype then
        param.grad = torch.ones(param.shape).to(dtype)
        optimizer.step()

    return attempt


def in_fp16(use_muon: bool) -> Muon:
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.float16))
    param.grad = torch.ones_like(param)
    return Muon([{"params": [param], "use_muon": use_muon}])


def sparse() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = Muon([{"params": embedding.parameters(), "use_muon": False}])
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


def resized(params: dict[str, Any], optimizer: Muon) -> None:
    params["2.bias"].grad = None
    params["2.bias"].data = torch.zeros(7)
    params["2.bias"].grad = torch.zeros(7)
    optimizer.param_groups[0]["ns_dtype"] = "fp16"


def transposed(params: dict[str, Any], optimizer: Muon) -> None:
    momentum = optimizer.state[params["0.weight"]]["momentum_buffer"]
    momentum.data = momentum.t().contiguous()


def swapped(params: dict[str, Any], optimizer: Muon) -> None:
    """Put a tensor of an unknown class into a group, as accelerate puts DTensors."""
    optimizer.param_groups[0]["params"][1] = shard(3, 8)
    optimizer.param_groups[0]["params"][1].grad = torch.ones(3, 8)


def added_with(state: dict[str, Any], **group: Any) -> Callable[..., None]:
    """Return the addition of a parameter that has state already."""

    def change(_: dict[str, Any], optimizer: Muon) -> None:
        param = nn.Parameter(torch.ones(3, 4))
        param.grad = torch.ones(3, 4)
        optimizer.state[param] = dict(state)
        optimizer.add_param_group({"params": [("new", param)], "use_muon": True, **group})

    return change


def without_scales(_: dict[str, Any], optimizer: Muon) -> None:
    for state in optimizer.state.values():
        state.pop("momentum_scale", None)


def pickled_with_a_group(_: Any) -> Any:
    optimizer = Muon(parameters(), replicate_group=dist.group.WORLD)
    assert copy.deepcopy(optimizer).replicate_group is dist.group.WORLD
    return pickle.dumps(optimizer)


WRITTEN = [
    *({"lr": lr} for lr in (NAN, -1.1e-12, torch.tensor(NAN), torch.tensor(-1.0), None)),
    *({"weight_decay": INF}, {"momentum": 1.5}, {"adamw_betas": (0.9, 1.0)}, {"adamw_eps": -1e-8}, {"ns_steps": 0}),
]
LISTS = [("views", ""), ("lr_factors", 1.0)]
KEPT = "weights and moments are as they were"
# The code, what is done to parameters and optimizer before the step, and what the text says.
SPOILED = [
    *(("gradient-not-finite", entry("0.weight", bad), "0.weight") for bad in (NAN, INF, -INF)),
    *(("gradient-not-finite", entry(name, NAN), f"{KEPT}.*{name}") for name in ("2.weight", "0.bias", "1.weight")),
    *(("gradient-too-large", entry(name, 3e38), rf"{name} \(.*3e\+38") for name in ("0.weight", "1.bias")),
    (
        "gradient-not-finite gradient-too-large",
        lambda *own: (entry("0.weight", NAN)(*own), entry("2.bias", 3e38)(*own)),
        "0.weight.*2.bias",
    ),
    *(("invalid-value", written(k, **each), f"{KEPT}.*{next(iter(each))}=") for k in (0, 1) for each in WRITTEN),
    ("ns-steps-misfit", written(0, ns_coefficients=TWO), "ns_steps=5.* 2 "),
    ("unknown-option", written(1, betas=(0.8, 0.9)), "'betas' is 'adamw_betas'.*group"),
    ("unknown-option", written(0, eps=1e-3), "'eps' is 'adamw_eps'"),
    ("unknown-option", written(0, momentun=0.5), "'momentum'"),
    ("only-default", written(0, maximize=True), "maximize"),
    ("replaced-by-flat moments-gone", written(1, use_muon=True), "use_muon: True.*write False"),
    # Entries belong by their positions: others would get another matrix, rate or name.
    (
        "not-one-for-each",
        lambda _, optimizer: optimizer.param_groups[0]["params"].pop(0),
        "has param_names: 2 of 1 ",
    ),
    *(("not-one-for-each", written(0, **{key: [own] * n}), f"{key}: {n} of 2 ") for key, own in LISTS for n in (1, 3)),
    *(
        ("not-one-for-each", written(0, lr_factors=[1.0, bad]), "lr_factors: .*at least 0")
        for bad in (-1.0, NAN, INF, "2")
    ),
    ("moment-misfit fp16-on-cpu", resized, r"exp_avg.*\(3,\)"),
    ("moment-misfit", transposed, "0.weight.*momentum_buffer"),
    ("moments-gone", lambda _, optimizer: optimizer.state.clear(), "0.weight"),
    ("moments-gone", lambda _, optimizer: optimizer.state.popitem()[1].clear(), "2.bias|1.bias"),
    ("moments-gone", added_with({}, step=4), r"has taken 4 steps"),
    ("moments-gone", added_with({"step": 1.0}), r"\(3, 4\) lacks momentum_buffer.*of their own"),
    ("moments-gone", added_with({"exp_avg": torch.ones(3, 4)}, use_muon=False), r"lacks step, exp_avg_sq"),
    (f"{UNKNOWN} moments-gone", swapped, "2.weight.*Shard"),
    ("not-started", lambda _, optimizer: expect_partitions(optimizer, "ZeRO"), "ZeRO"),
]
STEPS = [
    *(
        Refusal(code, "Muon.step", lambda given: given[1].step(), RuntimeError, partial(spoiled, change), says, str(k))
        for k, (code, change, says) in enumerate(SPOILED)
    ),
    *table(
        [
            ("moments-gone", "Muon.step", lambda given: given[1].step(), "momentum_scale"),
            ("moments-gone", "Muon.state_dict", lambda given: given[1].state_dict()),
        ],
        error=RuntimeError,
        given=lambda: spoiled(without_scales, momentum_dtype="int8"),
    ),
    Refusal(
        "no-params",
        "Muon.step",
        lambda given: given[1].step(),
        given=partial(spoiled, lambda _, optimizer: optimizer.param_groups[1].pop("params")),
        says="group 1",
    ),
    *table(
        [
            ("fp16-weights", "Muon.step", partial(in_fp16, use_muon), r"parameter 0 \(4, 4\)")
            for use_muon in (True, False)
        ],
        attempt=lambda given: given.step(),
        error=RuntimeError,
    ),
    *table(
        [
            ("sparse-gradient", "Muon.step", sparse, ""),
            ("step-the-engine", "Muon.step", lambda: Muon([tagged(ds_id=1)]).step(), ""),
            ("gradient-dtype", "Muon.step", grad_of("0.weight", torch.float8_e4m3fn), "0.weight.*float8_e4.*float32"),
            ("gradient-dtype", "Muon.step", grad_of("0.bias", torch.complex64), "0.bias.*complex64.*float32"),
            ("gradient-dtype", "Muon.step", grad_of("0.weight", torch.int32), "0.weight.*int32.*float32"),
            ("not-copyable", "pickle.dumps", alone(pickled_with_a_group), "replicate_group"),
        ],
        error=RuntimeError,
    ),
    *table(
        [
            ("not-copyable", "copy.deepcopy", lambda given: copy.deepcopy(given[1]), "engine.save_checkpoint"),
            ("not-copyable", "pickle.dumps", lambda given: pickle.dumps(given[1]), "engine.save_checkpoint"),
        ],
        error=RuntimeError,
        given=partial(spoiled, lambda _, optimizer: attach_partitions(optimizer, {})),
    ),
]

# --- states


def put(path: tuple[Any, ...], value: Any) -> Callable[[Any], Any]:
    def change(state_dict: Any) -> Any:
        *most, last = path
        holder = functools.reduce(lambda tree, key: tree[key], most, state_dict)
        if value is REMOVED:
            del holder[last]
        else:
            holder[last] = value
        return state_dict

    return change


def optimizers(**options: Any) -> dict[str, Any]:
    """Return an optimizer that has taken steps, and one that has not."""
    other = stepped(**options)[1]
    other.state.clear()
    for group in other.param_groups:
        group["step"] = 0
    return {"stepped": stepped(**options), "new": other}


def load(code: str, name: str, change: Callable[[Any], Any], says: str = "", **options: Any) -> Refusal:
    def attempt(given: Any) -> list[str]:
        state_dict = change(copy.deepcopy(given["stepped"][1].state_dict()))
        loads = [partial(optimizer.load_state_dict, state_dict) for optimizer in (given["stepped"][1], given["new"])]
        return [error_of(each, ValueError, "nothing was changed") for each in loads]

    return Refusal(code, "load_state_dict", attempt, given=lambda: optimizers(**options), says=says, name=name)


REMOVED = object()
GROUP, OTHER, MATRIX, VECTOR = ("param_groups", 0), ("param_groups", 1), ("state", 0), ("state", 2)
SCALES, BUFFER = (*MATRIX, "momentum_scale"), (*MATRIX, "momentum_buffer")
SMALLER = put(("state", 1, "momentum_buffer"), torch.zeros(2, 2))
# What is put where, or taken out, and the code and the facts that the refusal has.
MUTATIONS = [
    ("no-steps", (*VECTOR, "step"), torch.tensor([1.0, 2.0]), r"\(2,\)"),
    ("no-steps", (*VECTOR, "step"), torch.tensor(-1.0), r"tensor\(-1.\)"),
    ("no-steps", (*VECTOR, "step"), torch.tensor(0.5), r"tensor\(0.5"),
    ("no-steps", (*VECTOR, "step"), torch.tensor(INF), r"tensor\(inf\)"),
    ("no-steps", (*VECTOR, "step"), "2", "'2'"),
    ("no-steps", (*GROUP, "step"), None, "group 0 .*None"),
    ("no-steps", (*OTHER, "step"), 0.5, "group 1 .*0.5"),
    ("no-steps", (*GROUP, "step"), -1, "step=-1"),
    ("no-steps", (*OTHER, "step"), REMOVED, "group 1 "),
    ("invalid-value", (*GROUP, "lr"), NAN, "lr=nan"),
    ("invalid-value", (*GROUP, "lr"), torch.tensor(NAN), r"lr=tensor\(nan\)"),
    ("invalid-value", (*GROUP, "lr"), 10**400, r"lr=10+\.\.\."),
    ("invalid-value", (*GROUP, "ns_dtype"), "fp8", "ns_dtype=fp8|ns_dtype='fp8'"),
    ("invalid-value", (*GROUP, "momentum"), 2.0, "momentum=2.0"),
    ("invalid-value", (*GROUP, "adamw_betas"), (0.9,), "adamw_betas="),
    ("invalid-value", (*GROUP, "use_muon"), "yes", "use_muon='yes'"),
    *(
        ("invalid-value", (*GROUP, name), value, f"group 0 .*{name}={value!r}")
        for name in ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
        for value in ("0.1", None)
    ),
    ("not-a-mapping", OTHER, 2.5, r"group 1 .*2\.5"),
    ("no-params", (*GROUP, "params"), None, "group 0 "),
    ("no-params", (*GROUP, "params"), [{}, {}], r"\[{}, {}\]"),
    ("parameter-twice", (*GROUP, "params"), [0, 0], ""),
    ("not-one-for-each", (*GROUP, "param_names"), 3, "param_names: 3 "),
    ("not-one-for-each", (*GROUP, "views"), ["", "", ""], "3 views.* 2 "),
    ("not-a-state", ("param_groups",), None, ""),
    ("not-a-state", ("state",), None, ""),
    ("not-a-mapping", MATRIX, torch.ones(2), r"0.weight \(8, 18\).*\(2,\)"),
    ("moments-missing", MATRIX, REMOVED, "0.weight"),
    ("moments-missing", BUFFER, REMOVED, r"0.weight.*\['momentum_buffer'\]"),
    ("moments-missing", (*VECTOR, "exp_avg"), REMOVED, r"\['exp_avg'\]"),
    ("not-a-tensor", (*VECTOR, "exp_avg"), "zeros", "exp_avg .*'zeros'"),
    ("not-a-tensor", (*VECTOR, "exp_avg"), [0.0] * 8, "exp_avg "),
    ("moment-shape", BUFFER, torch.zeros(5, 5), r"0.weight \(8, 18\).*momentum_buffer.*\(5, 5\)"),
    ("moment-dtype", BUFFER, torch.zeros(8, 18).to_sparse(), "sparse_coo"),
    ("moment-dtype", BUFFER, torch.zeros(8, 18).to(torch.float8_e5m2), "float8_e5m2"),
    ("moment-on-meta", BUFFER, torch.zeros(8, 18, device="meta"), ""),
    ("foreign-moments", (*VECTOR, "momentum_buffer"), torch.ones(8), "momentum_buffer.*AdamW"),
    ("foreign-moments", (*MATRIX, "exp_avg"), torch.ones(8, 18), "exp_avg.*Muon"),
    ("foreign-state", (*GROUP, "hf_muon"), REMOVED, "`hf_muon` is not among them"),
    *(("invalid-value", (*GROUP, "hf_muon"), wrong, "hf_muon=") for wrong in ("{", 3, '{"format": 1}')),
    (
        "newer-state",
        (*GROUP, "hf_muon"),
        '{"format": 2, "version": "7.8"}',
        r"format 2 of hf_muon 7\.8.*format 1",
    ),
]


def of_groups(*groups: tuple[str, list[tuple[int, ...]], bool], reverse: bool = False) -> Muon:
    """Return a stepped optimizer over groups of named parameters."""
    made = []
    for prefix, shapes, use_muon in groups:
        named = [(f"{prefix}.{i}", param) for i, param in enumerate(parameters(shapes))]
        made.append({"params": named[::-1] if reverse and use_muon else named, "use_muon": use_muon})
    optimizer = Muon(made)
    step(optimizer)
    return optimizer


ALL = (("layers", SHAPES, True), ("rest", REST, False))
EQUAL = (("layers", [(4, 4), (4, 4)], True),)
FEWER = (("layers", SHAPES[:3], True), ("rest", REST, False))


def of_another(code: str, name: str, other: Callable[[], Any], says: str = "", into: Any = ALL) -> Refusal:
    def attempt(given: Any) -> None:
        given.load_state_dict(other().state_dict())

    return Refusal(code, "load_state_dict", attempt, given=lambda: of_groups(*into), says=says, name=name)


def unnamed() -> Muon:
    optimizer = Muon([{"params": parameters()}, {"params": parameters(REST), "use_muon": False}])
    step(optimizer)
    return optimizer


def codes_as_numbers(state_dict: Any) -> Any:
    """Leave what a template of fp32 would read."""
    for own in state_dict["state"].values():
        if own.pop("momentum_scale", None) is not None:
            own["momentum_buffer"] = own["momentum_buffer"].float()
    return state_dict


def codes_into_numbers(given: Any) -> None:
    given["stepped"][1].load_state_dict(codes_as_numbers(stepped(momentum_dtype="int8")[1].state_dict()))


STATES = [
    *(load(code, f"{k} {path[-1]}", put(path, value), says) for k, (code, path, value, says) in enumerate(MUTATIONS)),
    *(load("not-a-state", repr(other), lambda _, other=other: other) for other in (None, 3, [], "state", {"model": 1})),
    load("moment-shape moments-missing", "several", lambda s: put(MATRIX, REMOVED)(SMALLER(s)), "2.weight.*0.weight"),
    load("moments-missing", "scales", put(SCALES, REMOVED), "momentum_scale", momentum_dtype="int8"),
    load("moments-missing", "codes as numbers", codes_as_numbers, momentum_dtype="int8"),
    load("moment-shape", "scales", put(SCALES, torch.ones(8, 2)), r"momentum_scale.*\(8, 2\)", momentum_dtype="int8"),
    Refusal("moments-missing", "load_state_dict", codes_into_numbers, given=optimizers, name="codes into numbers"),
    *(
        of_another("foreign-state", name, lambda name=name: getattr(torch.optim, name)(parameters()), "use_muon")
        for name in ("AdamW", "SGD", "Muon")
        if hasattr(torch.optim, name)
    ),
    of_another("other-parameters", "fewer", lambda: of_groups(*FEWER), r"layers.3, layers.4, layers.5 .*6.* 9"),
    of_another("other-parameters", "more", lambda: of_groups(*ALL), "layers.3", into=FEWER),
    of_another("groups-differ", "unnamed", unnamed, "9 .* 6 Muon .* 3 AdamW.* 6", into=ALL[:1]),
    of_another(
        "routing-changed",
        "routing",
        lambda: of_groups(("layers", SHAPES[:-1], True), ("rest", REST, False), ("layers.5", SHAPES[-1:], False)),
        "layers.5.*AdamW",
        into=(("layers", SHAPES[:-1], True), ("rest", REST, False), ("layers.5", SHAPES[-1:], True)),
    ),
    of_another("other-order", "order", lambda: of_groups(*EQUAL, reverse=True), into=EQUAL),
]  # fmt: skip

CASES = [*ARGUMENTS, *PARAMETERS, *STEPS, *STATES]
