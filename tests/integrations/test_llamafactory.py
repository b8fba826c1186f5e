"""The check of LLaMA-Factory's arguments, on stand-ins for its modules; `tests/e2e` runs the real ones."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from hf_muon.integrations.llamafactory.v0 import patch_parser
from tests.hooks import patched

pytestmark = pytest.mark.newest


@pytest.fixture
def parser(monkeypatch):
    """Return LLaMA-Factory's parser with the patch."""

    def get_train_args(optim, **finetuning):
        training = SimpleNamespace(optim=optim, do_train=True, optim_args=None)
        finetuning = SimpleNamespace(**{"finetuning_type": "full", "stage": "sft", **finetuning})
        return None, None, training, finetuning, None

    parser, tuner = ModuleType("llamafactory.hparams.parser"), ModuleType("llamafactory.train.tuner")
    parser.get_train_args = tuner.get_train_args = get_train_args
    monkeypatch.setitem(sys.modules, parser.__name__, parser)
    monkeypatch.setitem(sys.modules, tuner.__name__, tuner)
    with patched(patch_parser, parser):
        yield parser


@pytest.mark.parametrize(
    "change",
    [lambda parts: ({}, *parts), lambda parts: SimpleNamespace(a=parts[2], b=parts[3]), lambda parts: parts[::-1]],
    ids=["one more in front", "an object", "in another order"],
)
def test_a_parser_that_returns_its_parts_in_another_way(parser, change):
    """Expect runs of other optimizers untouched, and those of Muon checked as ever."""
    inner = parser.get_train_args.__wrapped__
    parser.get_train_args = lambda *args, **kwargs: change(inner(*args, **kwargs))
    with patched(patch_parser, parser):
        assert parser.get_train_args("adamw_torch")
        with pytest.raises(ValueError, match="use_muon: true would replace"):
            parser.get_train_args("muon", use_muon=True)


@pytest.mark.parametrize("result", [None, 3, {}, (), ({}, 1), [SimpleNamespace(optim="adamw_torch")]], ids=str)
def test_a_parser_that_returns_something_else(parser, result):
    parser.get_train_args = lambda: result
    with patched(patch_parser, parser):
        assert parser.get_train_args() is result


def test_a_run_of_muon_whose_arguments_are_not_found_is_refused_by_the_hook(parser):
    parser.get_train_args = lambda: (SimpleNamespace(optim="muon"),)
    with patched(patch_parser, parser), pytest.raises(RuntimeError, match='hook "LLaMA-Factory\'s parser"'):
        parser.get_train_args()


def test_modules_that_imported_the_function_already_are_guarded_too(parser):
    assert sys.modules["llamafactory.train.tuner"].get_train_args is parser.get_train_args
    assert parser.get_train_args.__wrapped__
