"""The check of LLaMA-Factory's arguments, on stand-ins for its modules; `tests/e2e` runs the real ones."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hf_muon.integrations.llamafactory.v0.hooks import patch_parser, patch_plots
from hf_muon.integrations.llamafactory.v0.refusals import MEGATRON, RIVALS, refuse_rivals


@pytest.fixture
def parser(monkeypatch):
    def get_train_args(optim, **finetuning):
        return None, None, SimpleNamespace(optim=optim), SimpleNamespace(**finetuning), None

    parser, tuner = ModuleType("llamafactory.hparams.parser"), ModuleType("llamafactory.train.tuner")
    parser.get_train_args = tuner.get_train_args = get_train_args
    monkeypatch.setitem(sys.modules, parser.__name__, parser)
    monkeypatch.setitem(sys.modules, tuner.__name__, tuner)
    return parser


def test_two_muons_are_refused_with_which_one_to_keep():
    with pytest.raises(
        ValueError, match=r"use_muon: true and optim: muon are two different optimizers.*Keep optim: muon"
    ):
        refuse_rivals(SimpleNamespace(use_muon=True))


@pytest.mark.parametrize("rival", RIVALS)
def test_rivals_are_refused_with_optim_muon_only(parser, rival):
    undo = patch_parser(parser)
    for name in ("muon", "hf_muon"):
        with pytest.raises(ValueError, match=f"{rival}: true"):
            parser.get_train_args(name, **{rival: True})
    assert parser.get_train_args("adamw_torch", **{rival: True})
    assert parser.get_train_args("muon", **{rival: False})
    undo()


@pytest.mark.parametrize(
    ("route", "words"),
    [
        *((option, rf"does not run with {variable}=1.*Unset {variable}") for option, (variable, _) in MEGATRON.items()),
        ("use_hyper_parallel", "use_hyper_parallel: true.*FSDP2"),
    ],
)
def test_routes_that_never_ask_for_the_optimizer_are_refused(parser, route, words):
    undo = patch_parser(parser)
    with pytest.raises(RuntimeError, match=words):
        parser.get_train_args("muon", **{route: True})
    assert parser.get_train_args("adamw_torch", **{route: True})
    assert parser.get_train_args("muon", **{route: False})
    undo()


def test_modules_that_imported_the_function_already_are_guarded_too(parser):
    original = parser.get_train_args
    undo = patch_parser(parser)
    assert patch_parser(parser) is None
    assert sys.modules["llamafactory.train.tuner"].get_train_args is parser.get_train_args is not original
    undo()
    assert sys.modules["llamafactory.train.tuner"].get_train_args is parser.get_train_args is original


def test_plots_of_what_was_logged(tmp_path):
    drawn = []
    module = ModuleType("llamafactory.extras.ploting")
    module.plot_loss = original = lambda folder, keys: drawn.append(keys)
    undo = patch_plots(module)
    assert patch_plots(module) is None
    module.plot_loss(tmp_path, keys=["loss"])
    history = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.0, "muon/stable_rank": 3.0, "muon/update_rms/mlp.up": 0.2},
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    module.plot_loss(tmp_path, keys=["loss", "eval_loss"])
    assert drawn == [["loss"], ["loss", "eval_loss", "muon/stable_rank"]]
    undo()
    assert module.plot_loss is original
