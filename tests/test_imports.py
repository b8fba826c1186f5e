"""Which module may import which: read from the import lines, and checked in fresh processes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_muon

ROOT = Path(hf_muon.__file__).parent

# Lowest first: a room imports only from lines above its own.
ROOMS = [
    ["_autoload", "math", "diagnostics", "versions"],
    ["storage"],
    ["distributed", "options"],
    ["rules"],
    ["config"],
    ["optim_args", "routing"],
    ["optimizer"],
    ["build", "convert"],
    ["ready_groups"],
    ["plan", "integrations"],
    ["cli"],
]
# The same order inside each room with more than one file.
FLOORS = {
    "math": [
        "coefficients cost rounding torch_private",
        "compiler precision",
        "elementwise",
        "codes logits products weight_rounding",
        "gram moments update",
        "adamw_functions momentum newton_schulz",
        "adamw",
    ],
    "diagnostics": ["facts log measures charts", "watch", "metrics", "run_file", "findings", "page"],
    "storage": [
        "blocks tensors",
        "factors host views",
        "transport",
        "regions",
        "dtensor shared",
        "partitions",
        "rows",
    ],
    "options": ["patterns", "types", "declaration"],
    "rules": [
        *("heads", "rule", "cautious momentum_schedule normalize qk_clip"),
        *("registry", "fields"),
    ],
    "distributed": [
        "agreement units",
        "groups executor",
        "ddp holdings local transfers",
        "schedule",
        "exchange",
        "select",
    ],
    "routing": [
        "fused parameters",
        "model_facts outputs",
        "rules",
        "route",
        "attention live_models",
    ],
    "optimizer": [
        "state copies empty_steps lost_updates unmarked",
        "factor_runs groups gradients layout_lines offloaded rule_state",
        "state_check layout",
        "compilation preflight first_step_report step_rules watching",
        "consensus head_rules partitioned step",
        "prepared_steps",
        "load_notices sharded_checkpoints",
        "loading",
        "muon",
    ],
    "plan": [
        "activations stand_ins",
        "costs",
        "memory",
        "step_plan",
    ],
    "integrations": [
        "names archives",
        "torch_states",
        "timm",
        "ulysses.batches ulysses.gradients ulysses.refusals",
        "ulysses.hooks deepspeed.gradients",
        "deepspeed.partitions",
        "deepspeed.saving deepspeed.refusals",
        "deepspeed.loading",
        "deepspeed.engine",
        "accelerate transformers.attention",
        "transformers.callback",
        "llamafactory.v0 llamafactory.v1 transformers.refusals",
        "transformers.handler",
        "transformers.hooks transformers.training_file",
    ],
    "cli": [
        "console model_source",
        "convert inspect",
        "doctor plan report sweep",
        "app",
    ],
}
ROOM = {name: level for level, names in enumerate(ROOMS) for name in names}
FLOOR = {
    f"{room}.{name}": k for room, floors in FLOORS.items() for k, names in enumerate(floors) for name in names.split()
}


def may_import(importer, imported):
    """Return whether a module stands above another one."""
    room, other = importer.split(".")[0], imported.split(".")[0]
    if room != other:
        return ROOM[room] > ROOM[other]
    if is_package(importer):
        return imported.startswith(f"{importer}.")
    return not is_package(imported) and FLOOR[importer] > FLOOR[imported]


def is_module(name):
    path = ROOT.parent / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def is_package(name):
    return (ROOT / name.replace(".", "/")).is_dir()


OUTSIDE = {"torch", "typing", "__future__"} | set(sys.stdlib_module_names)
ALSO = {
    "cli": {"typer", "rich", "plotly"},
    "diagnostics.charts": {"plotly"},
    "diagnostics.page": {"plotly"},
    "cli.app": {"hf_muon"},
    "cli.sweep": {"yaml"},
    "cli.model_source": {"transformers", "peft", "yaml"},
    "integrations.deepspeed": {"deepspeed", "hjson"},
    "integrations.transformers": {"transformers", "accelerate", "yaml"},
    "integrations.ulysses": {"transformers", "accelerate", "deepspeed"},
}


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        if name:
            yield name, path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if node.module.startswith("hf_muon") and is_module(name) else node.module


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_go_downward(name, path):
    for imported in imports(path):
        if imported.startswith("hf_muon."):
            target = imported.removeprefix("hf_muon.")
            assert may_import(name, target), f"{name} imports {target}"
        else:
            top = imported.split(".")[0]
            allowed = OUTSIDE.union(*(ALSO[home] for home in ALSO if f"{name}.".startswith(f"{home}.")))
            assert top in allowed, f"{name} imports {imported}"


FRAMEWORKS = re.compile(r"deepspeed|^ds_|transformers|accelerate\b|llama.?factory|trainer", re.IGNORECASE)
FRAMEWORK_FREE = ("math", "storage", "distributed", "optimizer")
# It recognizes tensors that frameworks leave behind, and names the framework in its error.
MAY_NAME_FRAMEWORKS = {"storage.tensors"}


def words_of(tree):
    """Yield identifiers, imports and string literals, without docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(word := getattr(node, field, None), str):
                yield word
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize(
    ("name", "path"),
    [each for each in modules() if each[0].split(".")[0] in FRAMEWORK_FREE],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_frameworks_are_named_in_integrations_only(name, path):
    named = {word for word in words_of(ast.parse(path.read_text())) if FRAMEWORKS.search(word)}
    assert bool(named) == (name in MAY_NAME_FRAMEWORKS), named


def loaded_after(code):
    script = f"{code}\nimport sys; print(' '.join(sorted(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(process.stdout.split())


HEAVY = {"torch", "transformers", "deepspeed", "llamafactory", "accelerate", "peft", "typer", "rich"}


def test_importing_the_package_imports_nothing_heavy():
    assert not loaded_after("import hf_muon") & HEAVY


def test_using_the_optimizer_imports_torch_only():
    names = loaded_after("from hf_muon import Muon, build_optimizer, orthogonalize, MuonConfig, route_parameters")
    assert names & HEAVY == {"torch"}


def test_this_test_can_fail():
    assert "yaml" in loaded_after("import hf_muon, yaml")


def test_public_names():
    for name in hf_muon.__all__:
        assert getattr(hf_muon, name) is not None
    assert set(hf_muon.__all__) <= set(dir(hf_muon))
    with pytest.raises(AttributeError, match=r"'Moon' \[unknown-name\]"):
        _ = hf_muon.Moon
