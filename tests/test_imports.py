"""Which room may import what, and what importing the package imports."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import hf_muon

ROOT = Path(hf_muon.__file__).parent
# Lowest first: a room imports only from itself and from rooms above it in this list.
ROOMS = [
    ["_autoload", "math", "diagnostics", "versions"],
    ["storage"],
    ["distributed", "options"],
    ["config"],
    ["rules"],
    ["optim_args", "routing"],
    ["optimizer"],
    ["split_groups"],
    ["build"],
    ["ready_groups"],
    ["plan", "integrations"],
    ["dry_run"],
    ["cli"],
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
EVERYWHERE = {"torch", *sys.stdlib_module_names}
ALSO = {
    "cli": {"yaml", "transformers", "hf_muon", "plotly"},
    "optimizer": {"hf_muon"},  # its version
    "integrations": {"deepspeed", "hjson", "transformers", "accelerate", "yaml"},
}
FRAMEWORKS = re.compile(r"deepspeed|^ds_|transformers|accelerate\b|llama.?factory|trainer", re.IGNORECASE)
HEAVY = {"torch", "transformers", "deepspeed", "llamafactory", "accelerate", "peft"}


def files(room):
    return sorted((ROOT / room).rglob("*.py")) or [ROOT / f"{room}.py"]


def imports(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [name for name in names if name.removeprefix("hf_muon.") in LEVEL] or [node.module]


def test_every_room_is_in_the_list():
    there = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__"} == LEVEL.keys()


def test_imports_go_downward():
    for room, path in [(name, path) for name in LEVEL for path in files(name)]:
        for imported in imports(path.read_text(encoding="utf-8")):
            top, *rest = imported.split(".")
            if top == "hf_muon" and rest:
                assert rest[0] == room or LEVEL[rest[0]] < LEVEL[room], f"{path} imports {imported}"
            else:
                assert top in EVERYWHERE | ALSO.get(room, set()), f"{path} imports {imported}"


@pytest.mark.parametrize("room", ["math", "storage", "distributed", "optimizer"])
def test_frameworks_are_named_in_integrations_only(room):
    """But for tensors that frameworks leave behind, whose errors name the framework. Docstrings may name them, too."""
    named = {}
    for path in files(room):
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        words = {t.string for t in tokens if t.type in (tokenize.NAME, tokenize.STRING) and t.string[:3] != '"""'}
        if found := set(filter(FRAMEWORKS.search, words)):
            named[path.stem] = found
    assert named.keys() == ({"tensors"} if room == "storage" else set()), named


def test_importing_the_package_imports_nothing_heavy_and_using_the_optimizer_torch_alone():
    names = ", ".join(hf_muon.__all__)
    code = f"import sys, hf_muon; print(*sys.modules); from hf_muon import {names}; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    imported, used = (HEAVY.intersection(line.split()) for line in output.splitlines())
    assert (imported, used) == (set(), {"torch"})


def test_public_names():
    assert all(getattr(hf_muon, name) is not None for name in hf_muon.__all__)
    assert set(hf_muon.__all__) <= set(dir(hf_muon))
    with pytest.raises(AttributeError, match=r"'Moon' \[unknown-name\]"):
        _ = hf_muon.Moon


# --- torch's global defaults

FACTORIES = {"zeros", "ones", "full", "tensor", "arange", "randn", "rand", "randint", "empty", "eye", "as_tensor"}


def test_no_tensor_is_made_in_torchs_default_dtype_or_on_its_default_device():
    """Users set both, and steps must not depend on them."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {id(node) for with_ in ast.walk(tree) if is_on_a_device(with_) for node in ast.walk(with_)}
        for node in ast.walk(tree):
            call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and id(node) not in inside
            if not call or ast.unparse(node.func.value) != "torch" or node.func.attr not in FACTORIES:
                continue
            if not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert found == []


def is_on_a_device(node):
    return isinstance(node, ast.With) and "torch.device(" in ast.unparse(node.items[0])
