"""How many attributes of other packages the hooks replace, on the installed packages and on stand-ins."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest

from hf_muon._autoload import HOOKS
from tests import hooks
from tests.integrations.program_stand_ins import PROGRAMS

MOST = 11
"""The rest of the 30 is DeepSpeed's, whose engines are changed when they are made, and the attention of qk_clip."""


def replaced(name):
    """Return the attributes that a hook sets, each with its owner; entries of registries and lists are additions.

    A function that other modules have imported, as here all have, counts once.
    """
    path, _, function = HOOKS[name].patch.partition(":")
    module = importlib.import_module(HOOKS[name].module)
    changes = getattr(importlib.import_module(path), function)(module)
    owners = [(owner, attribute) for owner, attribute, _ in changes if not isinstance(owner, (dict, list))]
    return {(owner.__name__, name) for owner, name in owners if owner is module or not isinstance(owner, ModuleType)}


def test_few_attributes_are_replaced(monkeypatch):
    found = {name: replaced(name) for name in HOOKS if HOOKS[name].module.split(".")[0] not in ("timm", "llamafactory")}
    for program in PROGRAMS.values():
        with monkeypatch.context() as patch:
            hooks.imported(patch, program, hooks=False)
            found |= {name: replaced(name) for name in HOOKS if program.get(HOOKS[name].module)}
    parser = ModuleType(HOOKS["LLaMA-Factory's parser"].module)
    parser.get_train_args = tuple
    monkeypatch.setitem(sys.modules, parser.__name__, parser)
    found["LLaMA-Factory's parser"] = replaced("LLaMA-Factory's parser")
    assert found.keys() == HOOKS.keys()
    attributes = set().union(*found.values())
    assert 5 < len(attributes) <= MOST, sorted(attributes)


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_says_why_it_is_there(name):
    assert len(HOOKS[name].lost.split()) > 3
    assert len(HOOKS[name].seam.split()) > 3
