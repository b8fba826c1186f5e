"""The import hooks. They change imported modules, so that each case runs in its own process."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import hf_muon
import hf_muon_autoload
from hf_muon import _autoload
from hf_muon.diagnostics import log
from tests import hooks

STATE = """
import json, sys
print("\\n" + json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] in ("transformers", "hf_muon"))))
"""


def run(code, check=True, **environment):
    env = {**os.environ, **environment}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    if check:
        assert process.returncode == 0, process.stderr
    return process


ARGUMENTS = "TrainingArguments('/tmp/unused', optim='muon', use_cpu=True, report_to='none')"
# Different ways to import transformers: the first import decides where the patch is applied.
ORDERS = {
    "transformers first": "from transformers import TrainingArguments",
    "torch first": "import torch; from transformers import TrainingArguments",
    "module itself": "from transformers.training_args import TrainingArguments",
    "trainer first": "from transformers import Trainer, TrainingArguments",
    "hf_muon first": "import hf_muon; from transformers import TrainingArguments",
    "hf_muon last": "from transformers import TrainingArguments; import hf_muon",
    "namespace": "import transformers; TrainingArguments = transformers.TrainingArguments",
    "star": "from transformers.training_args import *; from transformers import TrainingArguments",
}


@pytest.mark.extended(but="^torch first")
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_the_name_is_accepted_whatever_was_imported_first(order):
    code = f"{order}\nargs = {ARGUMENTS}\nfrom transformers import Trainer\n"
    code += "cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)\nprint(args.optim.value, cls.__name__)"
    assert run(code).stdout.split() == ["muon", "MuonFactory"]


def test_importing_torch_imports_neither_transformers_nor_our_optimizer():
    modules = json.loads(run("import torch" + STATE).stdout.strip())
    assert modules == ["hf_muon", "hf_muon._autoload"]


def test_switched_off():
    code = "import torch" + STATE
    assert json.loads(run(code, HF_MUON_AUTOLOAD="0").stdout.strip()) == []
    refused = run(f"{ORDERS['torch first']}\n{ARGUMENTS}", check=False, HF_MUON_AUTOLOAD="0")
    assert "muon is not a valid OptimizerNames" in refused.stderr


@pytest.mark.extended(but="HF_MUON")
@pytest.mark.parametrize("variable", ["HF_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_import_registers_where_the_entry_point_is_off(variable):
    run(f"import hf_muon; {ORDERS['torch first']}\n{ARGUMENTS}", **{variable: "0"})


def test_installing_again_changes_nothing():
    code = f"""
import hf_muon
from transformers.training_args import OptimizerNames, TrainingArguments
import transformers.trainer
before = TrainingArguments.__post_init__, transformers.trainer.Trainer.compute_loss
callbacks = list(transformers.trainer.DEFAULT_CALLBACKS)
hf_muon.install(); hf_muon.install()
{ARGUMENTS}
assert [m.value for m in OptimizerNames].count("muon") == [m.value for m in OptimizerNames].count("hf_muon") == 1
assert (TrainingArguments.__post_init__, transformers.trainer.Trainer.compute_loss) == before
assert transformers.trainer.DEFAULT_CALLBACKS == callbacks and len(callbacks) == 2
"""
    run(code)


def test_the_member_behaves_as_the_others():
    code = """
import copy, pickle
from transformers.training_args import OptimizerNames
m = OptimizerNames("muon")
assert m is OptimizerNames.MUON is OptimizerNames["MUON"] and m == "muon" and m.value == "muon" and m.name == "MUON"
assert isinstance(m, OptimizerNames) and m in list(OptimizerNames) and hash(m) == hash("muon")
assert pickle.loads(pickle.dumps(m)) is m and copy.deepcopy(m) is m and len(OptimizerNames) == len(list(OptimizerNames))
assert repr(m) == "<OptimizerNames.MUON: 'muon'>", repr(m)
"""
    run(code)


def test_command_line_accepts_both_names():
    code = """
import sys
from transformers import HfArgumentParser, TrainingArguments
for name in ("muon", "hf_muon"):
    options = {"output_dir": "/tmp/unused", "optim": name, "optim_args": "momentum=0.9", "use_cpu": "true"}
    sys.argv = ["train.py", *(part for key, value in options.items() for part in (f"--{key}", value))]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    assert args.optim == name and type(args.optim).__name__ == "OptimizerNames"
"""
    run(code)


@pytest.mark.parametrize("muon", ["a member without a handler", "a member with a handler"])
def test_a_muon_of_transformers_own_does_not_change_what_the_name_means(muon):
    """Give transformers a muon before it is patched: ours runs, and a warning names both, once; AdamW hears nothing."""
    code = f"""
import os, torch
os.environ["HF_MUON_AUTOLOAD"] = "0"
import transformers.training_args as module, transformers.trainer_optimizer as registry
class Names(str, __import__("enum").Enum):
    locals().update({{m.name: m.value for m in module.OptimizerNames}})
    MUON = "muon"
module.OptimizerNames = Names
if {muon.endswith("with a handler")}:
    registry._OPTIMIZER_HANDLERS["muon"] = "theirs"
import hf_muon
from transformers import Trainer, TrainingArguments
options = dict(use_cpu=True, report_to="none")
args = TrainingArguments("/tmp/unused", optim="adamw_torch", **options)
print("adamw is made", file=__import__("sys").stderr)
for _ in range(2):
    args = {ARGUMENTS}
assert args.optim is Names.MUON
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
assert type(Trainer(model, args).create_optimizer()).__module__ == "hf_muon.optimizer.muon"
try:
    TrainingArguments("/tmp/unused", optim="muon", optim_args="of=theirs", **options)
except ValueError as error:
    assert "'of'" in str(error) and "[unknown-option]" in str(error)
else:
    raise SystemExit("not checked")
"""
    heard = run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stderr
    assert "hf_muon" not in heard[: heard.index("adamw is made")]
    assert heard.count("[another-muon]") == 1
    assert "HF_MUON_AUTOLOAD=0" in heard


def test_a_failing_hook_breaks_no_import_and_is_not_noticed_without_muon():
    code = """
import hf_muon
from hf_muon import _autoload
name = "optim: muon"
_autoload.HOOKS[name] = _autoload.HOOKS[name]._replace(patch="hf_muon.nowhere:patch")
from transformers import TrainingArguments
TrainingArguments("/tmp/unused", use_cpu=True, report_to="none")
assert "failed: ModuleNotFoundError" in _autoload.status()[name]
"""
    assert "muon" not in run(code).stderr


def test_a_patch_makes_all_its_changes_or_none():
    module = SimpleNamespace(first=1, items=[1], names={"a": 1})

    def patch(module, fails=True):
        yield module, "first", 2
        yield module.items, slice(1, None), [2]
        yield module.names, "b", 2
        if fails:
            yield module, "missing", module.missing

    with pytest.raises(AttributeError):
        _autoload.apply(patch, module)
    assert vars(module) == {"first": 1, "items": [1], "names": {"a": 1}}
    changed = {"first": 2, "items": [1, 2], "names": {"a": 1, "b": 2}}
    with hooks.patched(functools.partial(patch, fails=False), module):
        assert vars(module) == changed
    assert vars(module) == {"first": 1, "items": [1], "names": {"a": 1}}


def test_a_broken_package_does_not_break_import_torch(tmp_path):
    broken = tmp_path / "hf_muon"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('broken')")
    process = run("import torch; print(torch.ones(1).item())", PYTHONPATH=str(tmp_path))
    assert process.stdout.strip() == "1.0"
    assert "broken" not in process.stderr


@pytest.mark.extended
@pytest.mark.parametrize(
    "again",
    [
        "importlib.reload(sys.modules['transformers.training_args'])",
        "[sys.modules.pop(name) for name in list(sys.modules) if name.partition('.')[0] == 'transformers']",
    ],
    ids=["reload", "purge"],
)
def test_a_reloaded_transformers_is_patched_again(again):
    code = f"import importlib, sys\n{ORDERS['torch first']}\n{ARGUMENTS}\n{again}\n"
    run(code + f"from transformers.training_args import TrainingArguments\n{ARGUMENTS}")


@pytest.mark.extended
@pytest.mark.parametrize("text", ["", " ", "1", "0", "false", "False ", "off", "no", "yes", "true", "n", "2"])
def test_the_switch_is_read_as_all_variables_are(text, monkeypatch):
    monkeypatch.setenv(hf_muon_autoload.VARIABLE, text)
    assert hf_muon_autoload.is_on() == log.is_on(hf_muon_autoload.VARIABLE, unset=True)
    monkeypatch.delenv(hf_muon_autoload.VARIABLE)
    assert hf_muon_autoload.is_on()


@pytest.mark.parametrize("hook", sorted({hook.patch for hook in _autoload.HOOKS.values()}))
def test_each_hook_names_a_patch_of_an_integration(hook):
    path, _, function = hook.partition(":")
    assert path.startswith("hf_muon.integrations.")
    assert function.startswith("patch_")
    assert callable(getattr(importlib.import_module(path), function))


def test_source_of_patched_modules_is_found():
    code = "import inspect, transformers.training_args as m; assert 'class OptimizerNames' in inspect.getsource(m)"
    run("import torch\n" + code)


THREADS = """
import sys, threading, time
class Slow:  # gives the other threads time to look at a module that is not patched yet
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "hf_muon.integrations":
            time.sleep(1)
sys.meta_path.insert(0, Slow)
unknown = []
def use():
    from transformers.training_args import OptimizerNames
    try:
        OptimizerNames("muon")
    except ValueError as error:
        unknown.append(str(error))
threads = [threading.Thread(target=use, daemon=True) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join(100)
assert not any(thread.is_alive() for thread in threads), "deadlock"
assert not unknown, f"{len(unknown)} of {len(threads)} threads: {unknown[0]}"
import transformers.training_args
assert type(transformers.training_args) is type(sys), "the awaiting class stayed"
"""


@pytest.mark.extended
@pytest.mark.parametrize("first", ["import torch", "import transformers"])
def test_the_first_threads_know_the_name(first):
    run(f"{first}\n{THREADS}")


@pytest.mark.extended
def test_threads_that_import_all_hooked_modules_do_not_wait_for_one_another():
    """Check for deadlocks only: transformers and accelerate import each other in a cycle and may fail on their own."""
    code = """
import contextlib, importlib, os, threading
names = ["transformers.training_args", "transformers.trainer", "transformers.trainer_optimizer", "torch", "hf_muon",
         "accelerate.accelerator", "hf_muon.integrations.transformers.hooks", "hf_muon.build"]
def use(name):
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module(name)
threads = [threading.Thread(target=use, args=(name,), daemon=True) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join(100)
os._exit(sum(thread.is_alive() for thread in threads))
"""
    run(code)


OPTIMIZERS = """
import json, logging
logging.disable(logging.CRITICAL)
import torch
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames
seen = {}
for name in (member.value for member in OptimizerNames if member.value not in ("muon", "hf_muon")):
    for optim_args in (None, "momentum=0.5", "rank=4,scale=0.25"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
        try:
            options = dict(optim=name, optim_args=optim_args, optim_target_modules=["0"], learning_rate=3e-4)
            args = TrainingArguments("/tmp/unused", use_cpu=True, report_to="none", weight_decay=0.1, **options)
            cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
            optimizer = Trainer(model, args).create_optimizer()
            groups = [{k: str(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            words = sorted((k, str(v)) for k, v in kwargs.items() if k != "params")
            result = [cls.__module__, cls.__name__, words, groups]
        except Exception as error:
            result = [type(error).__name__, str(error)[:80]]
        seen[f"{name} {optim_args}"] = result
print("\\n" + json.dumps(seen))
"""


@pytest.mark.extended
def test_other_optimizers_are_what_they_are_without_us():
    """Compare class, arguments and groups, or the error, of each of transformers' own names with and without hooks."""
    on, off = (run(OPTIMIZERS, HF_MUON_AUTOLOAD=value).stdout.strip().splitlines()[-1] for value in ("1", "0"))
    on, off = json.loads(on), json.loads(off)
    assert on.keys() == off.keys()
    assert [name for name in on if on[name] != off[name]] == []
    assert sum(len(result) == 4 for result in on.values()) >= 10  # those that can be built on this machine


def test_names_that_the_package_lacks():
    with pytest.raises(AttributeError, match=r"'nothing' \[unknown-name\]"):
        _ = hf_muon.nothing
    assert not hasattr(hf_muon, "nothing")
