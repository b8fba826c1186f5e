"""What may import what, read from the import lines and seen in fresh processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_muon

ROOT = Path(hf_muon.__file__).parent

# Lowest first; a module imports only from lines above its own.
ORDER = [
    ["_autoload"],
    ["coefficients", "forms", "momentum"],
    ["gram"],
    ["update", "diagnostics", "patterns", "foreign", "damage", "views", "cards", "charts", "text_config"],
    ["metrics", "distributed.layout", "distributed.ownership"],
    ["report"],
    ["newton_schulz", "distributed.base", "distributed.agreement"],
    ["distributed.storage"],
    ["options", "distributed.local", "distributed.replicated", "distributed.dtensor", "distributed.exchange"],
    ["config", "parts", "places"],
    ["fused_rules"],
    ["fused"],
    ["facts", "kinds", "outputs"],
    ["distributed.select", "routing"],
    ["distributed.zero"],
    ["distributed"],
    ["checkpoint", "copies", "empty_steps"],
    ["state_check"],
    ["gradients"],
    ["preflight"],
    ["consensus"],
    ["loading", "step"],
    ["step_report"],
    ["optimizer"],
    ["build", "foreign_names"],
    ["ready_groups", "convert", "plan"],
    [
        "integrations",
        "integrations.deepspeed_arguments",
        "integrations.deepspeed_files",
        "integrations.deepspeed_gradients",
        "integrations.llamafactory_v1",
        "integrations.ulysses",
    ],
    ["integrations.deepspeed_layout"],
    ["integrations.deepspeed_order", "integrations.deepspeed_saving"],
    ["integrations.overrides"],
    ["integrations.deepspeed_checkpoint"],
    ["integrations.deepspeed"],
    ["integrations.accelerate", "integrations.trainer_layout"],
    ["integrations.transformers"],
    ["integrations.llamafactory"],
    ["integrations.training_file", "quantized"],
    ["integrations.ulysses_launch", "sources"],
    ["cli_output"],
    ["cli_convert", "cli_inspect"],
    ["cli_doctor", "cli_plan", "cli_report"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
OUTSIDE = {"torch", "typing", "__future__"} | set(sys.stdlib_module_names)
ALSO = {
    "cli": {"typer", "hf_muon"},
    "cli_convert": {"typer", "rich"},
    "cli_output": {"typer", "rich"},
    "cli_doctor": {"typer", "rich"},
    "cli_inspect": {"typer", "rich"},
    "cli_plan": {"typer", "rich"},
    "cli_report": {"typer", "rich"},
    "quantized": {"peft"},
    "sources": {"transformers", "peft"},
    "integrations.deepspeed": {"deepspeed"},
    "integrations.deepspeed_arguments": {"hjson"},
    "integrations.deepspeed_gradients": {"deepspeed"},
    "integrations.deepspeed_layout": {"deepspeed"},
    "integrations.trainer_layout": {"transformers", "accelerate"},
    "integrations.training_file": {"transformers", "accelerate", "yaml"},
    "integrations.transformers": {"transformers"},
    "integrations.overrides": {"yaml"},
    "integrations.ulysses": {"transformers", "deepspeed"},
    "integrations.ulysses_launch": {"transformers", "accelerate"},
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
            if node.module == "hf_muon":
                yield from (f"hf_muon.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_go_downward(name, path):
    for imported in imports(path):
        if imported.startswith("hf_muon."):
            target = imported.removeprefix("hf_muon.")
            assert LEVEL[target] < LEVEL[name], f"{name} imports {target}"
        else:
            top = imported.split(".")[0]
            assert top in OUTSIDE | ALSO.get(name, set()), f"{name} imports {imported}"


def loaded_after(code):
    script = f"{code}\nimport sys; print(' '.join(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"torch", "transformers", "deepspeed", "llamafactory", "accelerate", "peft", "typer", "rich"}


def test_importing_the_package_imports_nothing_heavy():
    assert not loaded_after("import hf_muon") & HEAVY


def test_using_the_optimizer_imports_torch_only():
    found = loaded_after("from hf_muon import Muon, build_optimizer, orthogonalize, MuonConfig, route_parameters")
    assert found & HEAVY == {"torch"}


def test_a_submodule_is_reached_by_its_path_after_importing_the_package_alone():
    found = loaded_after("import hf_muon; hf_muon.convert.convert_state_dict")
    assert "hf_muon.convert" in found
    assert "hf_muon.convert" not in loaded_after("import hf_muon; hasattr(hf_muon, 'con')")


def test_this_test_can_fail():
    assert "yaml" in loaded_after("import hf_muon, yaml")


def test_public_names():
    for name in hf_muon.__all__:
        assert getattr(hf_muon, name) is not None
    assert set(hf_muon.__all__) <= set(dir(hf_muon))
    with pytest.raises(AttributeError, match="has no attribute 'Moon'"):
        _ = hf_muon.Moon
