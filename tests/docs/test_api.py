"""docs/api.md has every public name, with the parameters and defaults that it has."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

import hf_muon
from hf_muon.rules import Rule

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SIGNATURES = [line.partition(" ->")[0] for block in BLOCKS for line in block.splitlines()]


def found(path):
    """Return what a path from the package or in it names, such as `MuonConfig.from_mapping`."""
    module, _, name = path.rpartition(".") if path.startswith("hf_muon.") else ("hf_muon", "", path)
    value = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_every_public_name_is_on_the_page():
    assert {line.partition("(")[0] for line in SIGNATURES} >= set(hf_muon.__all__)


@pytest.mark.parametrize("line", SIGNATURES, ids=lambda line: line.partition("(")[0])
def test_signatures_are_those_of_the_code(line):
    """Compare parameters, and defaults that are constants; `...` leaves parameters out."""
    path, _, shown = line.removesuffix(")").partition("(")
    parameters = inspect.signature(found(path)).parameters
    arguments = ast.parse(f"lambda {shown.replace(', ...', '')}: 0".replace(", *:", ":"), mode="eval").body.args
    positional = zip(arguments.args[::-1], [*arguments.defaults[::-1], *[None] * len(arguments.args)], strict=False)
    given = [*positional, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    for argument, default in given:
        has_default = parameters[argument.arg].default is not inspect.Parameter.empty
        assert has_default == (default is not None)
        if isinstance(default, ast.Constant):
            assert default.value == parameters[argument.arg].default
    if "..." not in shown:
        rest = filter(None, (arguments.vararg, arguments.kwarg))
        assert {argument.arg for argument in [*(argument for argument, _ in given), *rest]} == parameters.keys()


def test_a_rule_has_the_fields_of_the_table():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE[PAGE.index("`hf_muon.rules.Rule`") :], re.MULTILINE)
    assert rows == [field.name for field in dataclasses.fields(Rule)]
