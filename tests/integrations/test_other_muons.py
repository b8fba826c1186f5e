"""The warning where another program's Muon runs, on stand-ins for its modules."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from hf_muon._autoload import apply
from hf_muon.integrations import other_muons
from hf_muon.integrations.llamafactory.v0.hooks import patch_parser
from hf_muon.integrations.other_muons import patch_axolotl, patch_swift


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    monkeypatch.setattr(other_muons, "_warned", set())


def axolotl():
    """Return axolotl.contribs.mit.muon: factories that axolotl calls as ``factory()(model, args, **kwargs)``."""
    module = ModuleType("axolotl.contribs.mit.muon")
    for name in ("MuonOptimizerFactory", "DistMuonOptimizerFactory"):
        factory = type(name, (), {"__call__": lambda self, model, args, **kwargs: (type(self).__name__, model, kwargs)})
        setattr(module, name, factory)
    return module


def swift():
    """Return swift.optimizers.muon: a callback whose base class makes other optimizers."""
    base = type("OptimizerCallback", (), {"create_optimizer": lambda self, model=None: "theirs"})
    module = ModuleType("swift.optimizers.muon")
    module.MuonOptimizerCallback = type(
        "MuonOptimizerCallback", (base,), {"create_optimizer": lambda self, model=None: ("muon", model)}
    )
    return module


def test_axolotl(caplog):
    module = axolotl()
    apply(patch_axolotl, module)
    assert not caplog.messages
    result = module.MuonOptimizerFactory()("model", "args", lr=1)
    assert result == ("MuonOptimizerFactory", "model", {"lr": 1})
    assert module.DistMuonOptimizerFactory()("model", "args")[0] == "DistMuonOptimizerFactory"
    assert caplog.messages == [
        "optimizer: muon asks for axolotl's own Muon, which runs now; hf_muon is installed and is not used. To train "
        "with hf_muon, write optimizer: hf_muon"
    ]


def test_swift(caplog):
    module = swift()
    base = module.MuonOptimizerCallback.__mro__[1]
    apply(patch_swift, module)
    assert base().create_optimizer() == "theirs"
    assert not caplog.messages
    assert module.MuonOptimizerCallback().create_optimizer(model="model") == ("muon", "model")
    (message,) = caplog.messages
    assert message.startswith("--optimizer muon asks for ms-swift's own Muon, which runs now")
    assert message.endswith("write --optim hf_muon and remove --optimizer")


def test_llamafactory(caplog, monkeypatch):
    def get_train_args(optim, **finetuning):
        finetuning["finetuning_type"] = "full"
        return None, None, SimpleNamespace(optim=optim), SimpleNamespace(**finetuning), None

    parser = ModuleType("llamafactory.hparams.parser")
    parser.get_train_args = get_train_args
    monkeypatch.setitem(sys.modules, parser.__name__, parser)
    apply(patch_parser, parser)
    parser.get_train_args("adamw_torch", use_muon=False)
    assert not caplog.messages
    for _ in range(2):
        parser.get_train_args("adamw_torch", use_muon=True)
    (message,) = caplog.messages
    assert message.startswith("use_muon: true asks for LLaMA-Factory's own Muon")
    assert message.endswith("write optim: hf_muon and remove use_muon")


def test_through_the_import_hooks(tmp_path, caplog, monkeypatch):
    """Import stand-ins by the names that axolotl and ms-swift import, and call them."""
    for path, source in {
        "axolotl/contribs/mit/muon": "class MuonOptimizerFactory:\n    def __call__(self, *args): return args\n",
        "swift/optimizers/muon": "class MuonOptimizerCallback:\n    def create_optimizer(self): return 1\n",
    }.items():
        folder = tmp_path / path
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
        for part in folder.parents[: len(path.split("/")) - 1]:
            (part / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    from axolotl.contribs.mit.muon import MuonOptimizerFactory
    from swift.optimizers.muon import MuonOptimizerCallback

    assert MuonOptimizerFactory()(3) == (3,)
    assert MuonOptimizerCallback().create_optimizer() == 1
    assert [program in message for program, message in zip(("axolotl", "ms-swift"), caplog.messages, strict=True)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("axolotl", "swift")]:
        del sys.modules[name]
