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
from hf_muon.distributed import ddp
from hf_muon.distributed.groups import make_group
from hf_muon.distributed.ranks import report_device
from hf_muon.math import compiler, torch_private
from hf_muon.storage.dtensor import wrapped
from tests.refusals import differences, snapshot
from tests.support.accelerated import compiling

ROOT = Path(hf_muon.__file__).parent


def stepped(steps=1):
    weight = nn.Parameter(torch.eye(3))
    optimizer = Muon([weight], lr=0.1)
    for _ in range(steps):
        weight.grad = torch.ones(3, 3)
        optimizer.step()
    return optimizer


@pytest.fixture
def world():
    """Be one of four ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def compile_a_step():
    with compiling():
        stepped()


def ask_for_options_of_inductor():
    with compiling(backend="inductor"):
        compiler.try_on(torch.device("cpu"), [torch.float32])
        reason = compiler.why_off()
    raise RuntimeError(reason)


def take_away(name, patch):
    """Take a name from torch; return what must not change, and what needs the name."""
    if name == "_len_torch_dispatch_stack":
        patch.delattr(torch._C, name)
        stepped()  # what is not compiled does not need it
        return None, compile_a_step
    if name == "list_options":
        patch.delattr("torch._inductor.list_options")
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # tests of DeepSpeed set it where they are imported
        return None, ask_for_options_of_inductor
    if name.startswith("_optimizer_load_state_dict"):
        optimizer, saved = stepped(), stepped(2).state_dict()
        del optimizer.__dict__[name]
        return optimizer, lambda: optimizer.load_state_dict(saved)
    if name == "_device_types":
        return None, lambda: report_device(SimpleNamespace(), torch.device("cpu"))
    if name in ("_world", "group_count", "_hash_ranks_to_str", "_process_group_name"):
        if name == "group_count":
            patch.setattr(c10d, "_world", SimpleNamespace())
        else:
            patch.delattr(c10d, name)
        return None, lambda: make_group([0, 1])
    if torch_private.NEEDS[name] == "DDP":
        model = DistributedDataParallel(nn.Linear(3, 3), static_graph=name.startswith("_static"))
        optimizer = Muon([model.module.weight], lr=0.1)
        weight = model.module.weight
        weight.grad = torch.ones(3, 3)
        ddp._wrappers[model].accumulated(weight)  # DDP cannot reduce in this group
        if name == "enable":
            model._join_config = SimpleNamespace()
        else:
            delattr(model, name)
        return (optimizer, model), optimizer.step
    if name == "_spec":
        return None, lambda: torch_private.shard_orders(SimpleNamespace(placements=[Shard(0)]))
    assert name == "_split_tensor", f"{name} has no case"
    return None, lambda: torch_private.part_of(torch.arange(4), SimpleNamespace(), 2, 0)


@pytest.mark.parametrize("name", torch_private.NEEDS)
def test_a_name_that_is_gone_is_refused_by_name(name, world, monkeypatch):
    given, act = take_away(name, monkeypatch)
    before = snapshot(given)
    with pytest.raises(RuntimeError, match=rf"\.{name}, .* {torch_private.NEEDS[name]}.*\[torch-changed\]"):
        act()
    assert not differences(before, snapshot(given))


@pytest.mark.parametrize("gone", ["module", "argument"])
def test_dtensors_on_the_host_are_refused_where_torch_makes_them_in_another_way(gone, world, monkeypatch):
    mesh = init_device_mesh("cpu", (4,))
    param = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])
    monkeypatch.setattr(type(mesh), "device_type", "cuda")
    if gone == "module":
        monkeypatch.setitem(sys.modules, "torch.distributed.tensor._dtensor_spec", None)
    else:
        monkeypatch.setattr("torch.distributed.tensor._dtensor_spec.TensorMeta", lambda shape: shape)
    with pytest.raises(RuntimeError, match=r"\[torch-changed\]"):
        wrapped(param, torch.ones(2, 3), (8, 3))


def test_a_step_that_torch_does_not_compile_needs_no_private_name(monkeypatch):
    monkeypatch.delattr("torch._compile._disable_dynamo")
    assert torch_private.disable_dynamo(lambda: 3)() == 3


# --- No other module uses a private name

# Operators on lists and assertions for the compiler, which torch documents; and what namedtuples have.
PUBLIC = ("_foreach_", "_check", "_replace", "_asdict", "_fields", "__")
# These rooms reach into other packages, whose names are theirs to check; of torch they use what a hook replaces.
OF_OTHERS = {"integrations", "cli", "dry_run", "_autoload.py", "diagnostics"}


def uses(source):
    """Return the lines of a module that use private names of torch: those that it does not define itself."""
    nodes = list(ast.walk(ast.parse(source)))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
    own = {node.attr for node in attributes if getattr(node.value, "id", "") in ("self", "cls")}
    own |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    lines = {node.lineno for node in attributes if node.attr not in own and not node.attr.startswith(PUBLIC)}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [f"{getattr(node, 'module', '')}.{alias.name}".strip(".") for alias in node.names]
            lines |= {node.lineno for name in names if name.startswith("torch.") and "._" in name}
    return sorted(lines)


def test_no_other_module_uses_a_private_name():
    text = "from torch._compile import _x\nimport torch._inductor\nparam._spec\nself._own = one._own\ntorch._check(1)\n"
    assert uses(text) == [1, 2, 3]
    home = Path(torch_private.__file__)
    paths = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in OF_OTHERS and path != home]
    found = {str(path): lines for path in paths if (lines := uses(path.read_text(encoding="utf-8")))}
    assert not found
