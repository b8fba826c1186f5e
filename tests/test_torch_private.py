"""torch's private names: each is used in one module, and its absence is refused by name, before anything changes."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import hf_muon
from hf_muon import Muon
from hf_muon.config import MuonConfig
from hf_muon.distributed.agreement import report_device
from hf_muon.distributed.groups import make_group
from hf_muon.math import compiler, torch_private
from hf_muon.plan import plan_step
from hf_muon.storage.dtensor import stored_like
from tests.accelerated import compiling

ROOT = Path(hf_muon.__file__).parent
HOME = Path(torch_private.__file__)
# Operators on lists and assertions for the compiler, which torch documents.
OPERATORS = ("_foreach_", "_check")
# What namedtuples have.
OF_TUPLES = {"_replace", "_asdict", "_fields"}


def stepped():
    """Return an optimizer that has taken a step."""
    optimizer = Muon([nn.Parameter(torch.eye(3))], lr=0.1)
    step(optimizer)
    return optimizer


def step(optimizer):
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.fixture
def world():
    """Be one of four ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def without_memory(patch, world):
    patch.setattr(torch, "UntypedStorage", type("UntypedStorage", (), {}))
    stepped()


def without_dispatch_modes(patch, world):
    patch.delattr(torch._C, "_len_torch_dispatch_stack")
    stepped()
    with compiling():
        stepped()


def without_options_of_inductor(patch, world):
    import torch._inductor

    patch.delattr(torch._inductor, "list_options")
    patch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # tests of DeepSpeed set it where they are imported
    with compiling(backend="inductor"):
        readiness, reason = compiler.readiness({torch.device("cpu"): [torch.float32]})
    assert readiness is compiler.Readiness.CANNOT
    raise RuntimeError(reason)


def without_hooks(when):
    def load(patch, world):
        optimizer, other = stepped(), stepped()
        step(other)
        before = optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
        optimizer.__dict__.pop(f"_optimizer_load_state_dict_{when}_hooks")
        try:
            optimizer.load_state_dict(other.state_dict())
        finally:
            assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], before)

    return load


def without_device_types(patch, world):
    report_device(SimpleNamespace(), torch.device("cpu"))


def without_name_of_c10d(name):
    def make(patch, world):
        patch.delattr(c10d, name)
        try:
            make_group([0, 1])
        finally:
            patch.undo()

    return make


def without_count_of_groups(patch, world):
    patch.setattr(c10d, "_world", SimpleNamespace())
    try:
        make_group([0, 1])
    finally:
        patch.undo()


def without_attribute_of_ddp(name):
    def step_under_ddp(patch, world):
        model = DistributedDataParallel(nn.Linear(3, 3))
        optimizer = Muon([model.module.weight])
        before = model.module.weight.detach().clone()
        delattr(model, name)
        try:
            step(optimizer)
        finally:
            assert torch.equal(model.module.weight, before)
            assert not optimizer.state

    return step_under_ddp


def without_order_of_joins(patch, world):
    model = DistributedDataParallel(nn.Linear(3, 3))
    model._join_config = SimpleNamespace()
    step(Muon([model.module.weight]))


def without_specification(patch, world):
    torch_private.shard_orders(SimpleNamespace(placements=[Shard(0)]))


def without_split(patch, world):
    torch_private.part_of(torch.arange(4), SimpleNamespace(), 2, 0)


CASES = {
    "_cdata": without_memory,
    "_len_torch_dispatch_stack": without_dispatch_modes,
    "list_options": without_options_of_inductor,
    "_optimizer_load_state_dict_pre_hooks": without_hooks("pre"),
    "_optimizer_load_state_dict_post_hooks": without_hooks("post"),
    "_device_types": without_device_types,
    "_world": without_name_of_c10d("_world"),
    "_hash_ranks_to_str": without_name_of_c10d("_hash_ranks_to_str"),
    "_process_group_name": without_name_of_c10d("_process_group_name"),
    "group_count": without_count_of_groups,
    "_join_config": without_attribute_of_ddp("_join_config"),
    "enable": without_order_of_joins,
    "_comm_hooks": without_attribute_of_ddp("_comm_hooks"),
    "_spec": without_specification,
    "_split_tensor": without_split,
}


def test_every_name_has_a_case():
    assert set(torch_private.NEEDS) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_name_that_is_gone_is_refused_by_name(name, monkeypatch, world):
    with pytest.raises(RuntimeError, match=rf"torch \S+ .*\.{name}, .* {torch_private.NEEDS[name]}.*\[torch-changed\]"):
        CASES[name](monkeypatch, world)


@pytest.mark.parametrize("gone", ["module", "argument"])
def test_moments_of_dtensors_on_the_host_are_refused_where_torch_makes_dtensors_in_another_way(
    gone, monkeypatch, world
):
    mesh = init_device_mesh("cpu", (4,))
    param = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])
    monkeypatch.setattr(type(mesh), "device_type", "cuda")
    from torch.distributed.tensor import _dtensor_spec

    if gone == "module":
        monkeypatch.setitem(sys.modules, "torch.distributed.tensor._dtensor_spec", None)
    else:
        monkeypatch.setattr(_dtensor_spec, "TensorMeta", lambda shape: shape)
    with pytest.raises(RuntimeError, match=r"\[torch-changed\]"):
        stored_like(param, torch.ones(2, 3), (8, 3))


def test_plans_of_several_ranks_are_refused_where_torch_has_no_fake_process_group(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    with pytest.raises(RuntimeError, match=r"\[torch-changed\]"):
        plan_step(nn.Linear(4, 4), MuonConfig(), "ddp", 2)
    assert not dist.is_initialized()


def test_a_step_that_torch_does_not_compile_needs_no_private_name(monkeypatch):
    import torch._compile

    monkeypatch.delattr(torch._compile, "_disable_dynamo")
    assert torch_private.disable_dynamo(lambda: 3)() == 3


def uses(path):
    """Yield the private names of torch that a file uses, with their lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and of_self(node)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            of = getattr(node, "module", None) or ""
            for name in (f"{of}.{alias.name}".strip(".") for alias in node.names):
                if name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            known = own | OF_TUPLES
            if not of_self(node) and node.attr not in known and not node.attr.startswith(OPERATORS):
                yield node.lineno, ast.unparse(node)


def of_self(node):
    return getattr(node.value, "id", "") in ("self", "cls")


# These rooms reach into other packages, whose names are theirs to check; of torch they use what a hook replaces.
OF_OTHERS = {"integrations", "cli", "_autoload.py", "diagnostics"}


@pytest.mark.parametrize(
    "room", sorted(path.name for path in ROOT.iterdir() if path.name not in {*OF_OTHERS, "__pycache__", "py.typed"})
)
def test_no_other_module_uses_a_private_name(room):
    files = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}:{line} {name}" for path in files if path != HOME for line, name in uses(path)]
    assert not found


def test_the_search_finds_private_names(tmp_path):
    text = "from torch._compile import _x\nimport torch._inductor\nparam._spec\nself._own = one._own\ntorch._check(1)\n"
    (tmp_path / "a.py").write_text(text)
    assert [line for line, _ in uses(tmp_path / "a.py")] == [1, 2, 3]
