"""The check of LLaMA-Factory's arguments, on stand-ins for its modules; `tests/e2e` runs the real ones."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from hf_muon.integrations.llamafactory.v0 import MEGATRON, RIVALS, check_arguments, patch_parser
from tests.hooks import patched


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


@pytest.mark.parametrize("rival", RIVALS)
def test_rivals_are_refused_with_optim_muon_only(parser, rival):
    for name in ("muon", "hf_muon"):
        with pytest.raises(ValueError, match=f"{rival}: true would replace .*remove {rival}, or keep {rival}"):
            parser.get_train_args(name, **{rival: True})
    assert parser.get_train_args("adamw_torch", **{rival: True})
    assert parser.get_train_args("muon", **{rival: False})


@pytest.mark.parametrize(
    ("route", "words"),
    [
        *((option, rf"does not run with {variable}=1.*Unset {variable}") for option, (variable, _) in MEGATRON.items()),
        ("use_hyper_parallel", "use_hyper_parallel: true.*FSDP2"),
    ],
)
def test_routes_that_never_ask_for_the_optimizer_are_refused(parser, route, words):
    with pytest.raises(RuntimeError, match=words):
        parser.get_train_args("muon", **{route: True})
    assert parser.get_train_args("adamw_torch", **{route: True})
    assert parser.get_train_args("muon", **{route: False})


@pytest.mark.parametrize(
    "changes",
    [
        {"optim": "adamw_torch"},
        {"finetuning_type": "full"},
        {"finetuning_type": "freeze"},
        {"additional_target": "embed_tokens"},
        {"stage": "rm"},
        {"training": {"optim_args": "lora=muon"}},
        {"training": {"optim_args": {"muon_patterns": "lora_A"}}},
        {"training": {"do_train": False}},
    ],
    ids=str,
)
def test_lora_alone_is_refused_with_both_ways_out(changes):
    """LoRA is LLaMA-Factory's default, and the model is loaded after the arguments are parsed."""
    changes = {"optim": "muon", "finetuning_type": "lora", **changes}
    training = {"do_train": True, "optim_args": None, **changes.pop("training", {})}

    def parse(optim="muon", training=training, **finetuning):
        values = SimpleNamespace(optim=optim, **training), SimpleNamespace(**{"stage": "sft", **finetuning})
        check_arguments(values)

    with pytest.raises(ValueError, match=r'finetuning_type: full .* optim_args: "lora=muon"'):
        parse(training={"do_train": True, "optim_args": "momentum=0.9"}, finetuning_type="lora")
    parse(**changes)


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
