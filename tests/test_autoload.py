"""The import hooks. Cases that change imported modules run in processes of their own, most of them forked."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import pickle
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import transformers.trainer
import transformers.training_args
from transformers import AttentionInterface, TrainingArguments
from transformers.training_args import OptimizerNames

import hf_muon
import hf_muon_autoload
from hf_muon import _autoload
from hf_muon._autoload import HOOKS
from hf_muon.diagnostics import log
from hf_muon.routing import attention_logits
from tests.e2e.harness import ROOT, STARTUP, Server, run
from tests.integrations import plain_script
from tests.integrations.trainer_runs import by_hand
from tests.support import hooks
from tests.support.reference import relative_difference

without_hooks = Server("transformers.trainer", HF_MUON_AUTOLOAD="0", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
"""Runs code after transformers was imported without hf_muon."""

ARGUMENTS = "TrainingArguments('/tmp/unused', optim='muon', use_cpu=True, report_to='none')"
IMPORT = "from transformers import TrainingArguments"
STATE = """
import json, sys
print("\\n" + json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] in ("transformers", "hf_muon"))))
"""
IS_OURS = f"""
args = {ARGUMENTS}
from transformers import Trainer
cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
print(args.optim.value, cls.__name__)
"""


def fresh(code, cwd, *words, **variables):
    """Run code in a new interpreter."""
    return run([sys.executable, "-c", code, *words], cwd=cwd, path=STARTUP, **variables)


# --- what brings the name in


@pytest.mark.promise("no-import")
@pytest.mark.slow
def test_a_script_that_does_not_import_hf_muon_trains_with_it(tmp_path):
    """Compare with the loop. Plotly is not there; `import torch` imports no more than the hooks."""
    code = f"""
import runpy, sys
sys.modules["plotly"] = None
import torch
{STATE}
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    watched = {"HF_MUON_STEP_REPORT": "1", "HF_MUON_DIAGNOSTICS_EVERY": "2"}
    printed = fresh(code, tmp_path, plain_script.__file__, "muon", tmp_path / "weights.pt", **watched)
    modules = next(json.loads(line) for line in printed.splitlines() if line.startswith("["))
    assert modules == ["hf_muon", "hf_muon._autoload"]
    expected = plain_script.model()
    by_hand(expected, ns_dtype="fp32")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    ours = [weights[name] for name, _ in expected.named_parameters()]
    start = plain_script.model().parameters()
    assert relative_difference(list(start), list(expected.parameters()), ours) < 1e-6


# The first import decides where the patch is applied.
ORDERS = {
    "transformers first": IMPORT,
    "module itself": "from transformers.training_args import TrainingArguments",
    "hf_muon first": f"import hf_muon; {IMPORT}",
    "star": f"from transformers.training_args import *; {IMPORT}",
}


@pytest.mark.extended
@pytest.mark.second_tier("module")
@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_the_name_is_accepted_whatever_was_imported_first(order, tmp_path):
    assert fresh(ORDERS[order] + IS_OURS, tmp_path).split() == ["muon", "MuonFactory"]


@pytest.mark.slow
def test_switched_off_nothing_is_imported_and_our_own_import_registers_the_name(tmp_path):
    code = f"{STATE}\n{IMPORT}\ntry: {ARGUMENTS}\nexcept ValueError as error: print(error)\nimport hf_muon\n{IS_OURS}"
    modules, *refused, ours = without_hooks.run_code(code, cwd=tmp_path).strip().splitlines()
    assert [name for name in json.loads(modules) if name.startswith("hf_muon")] == []
    assert "muon is not a valid OptimizerNames" in "".join(refused)
    assert ours.split() == ["muon", "MuonFactory"]


def test_the_switch_is_read_as_all_variables_are(monkeypatch):
    for text in ("", " ", "1", "0", "false", "False ", "off", "no", "yes", "true", "n", "2"):
        monkeypatch.setenv(hf_muon_autoload.VARIABLE, text)
        assert hf_muon_autoload.is_on() == log.is_on(hf_muon_autoload.VARIABLE, unset=True), text
    monkeypatch.delenv(hf_muon_autoload.VARIABLE)
    assert hf_muon_autoload.is_on()


ASKED = """
import sys, torch
root, *folders = sys.argv[1:]
before, finders = set(sys.modules), [*sys.meta_path]
import hf_muon_autoload
hf_muon_autoload.activate()
print(*sorted(set(sys.modules) - before))
sys.meta_path[:] = finders
path = [entry for entry in sys.path if entry != root]
for folder in folders:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("hf_muon", "hf_muon_autoload")]:
        del sys.modules[name]
    sys.path[:] = [folder, *path]
    torch._import_device_backends()
    print(sys.modules["hf_muon_autoload"].__file__)
"""
FIRST_MODULE = (ROOT / "hf_muon" / "__init__.py").read_text(encoding="utf-8")
BROKEN = {
    "package gone": {},
    "empty package": {"hf_muon/__init__.py": ""},
    "syntax error": {"hf_muon/__init__.py": "def"},
    "error": {"hf_muon/__init__.py": "raise RuntimeError('broken')"},
    "module gone": {"hf_muon/__init__.py": FIRST_MODULE},
    "other module": {"hf_muon/__init__.py": FIRST_MODULE, "hf_muon/_autoload.py": "install = None"},
}


def installation(folder, entry_point, **files):
    """Write an installed distribution that hides ours, with the entry point that torch loads."""
    metadata = folder / "hf_muon-0.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hf_muon\nVersion: 0.0.1\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\nhf_muon = {entry_point}:activate\n")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_import_torch_imports_three_small_modules_with_us_and_does_not_break_with_the_package(tmp_path):
    """Have torch ask its entry points again, as `import torch` does at its end, for a package broken in each way."""
    autoload = (ROOT / "hf_muon_autoload.py").read_text(encoding="utf-8")
    for state, files in BROKEN.items():
        installation(tmp_path / state, "hf_muon_autoload", **{"hf_muon_autoload.py": autoload}, **files)
    folders = [tmp_path / state for state in BROKEN]
    asked = fresh(ASKED, tmp_path, ROOT, *folders, TORCH_DEVICE_BACKEND_AUTOLOAD="0").splitlines()
    assert asked[0].split() == ["hf_muon", "hf_muon._autoload", "hf_muon_autoload"]
    assert [line for line in asked[1:] if line.endswith("hf_muon_autoload.py")] == [
        str(folder / "hf_muon_autoload.py") for folder in folders
    ]


@pytest.mark.extended
@pytest.mark.slow
def test_metadata_without_its_module_breaks_import_torch_unless_torch_is_told_to_load_none(tmp_path):
    """Show torch's own rule, which no code of ours can soften: docs/troubleshooting.md has the ways out."""
    installation(tmp_path, "hf_muon_autoload_gone")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch; print(torch.ones(1).item())"
    failed = run([sys.executable, "-c", code], cwd=tmp_path, path=STARTUP, fails=True)
    assert "Failed to load the backend extension: hf_muon" in failed
    assert fresh(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "1.0\n"


FOLDER = """
import importlib.util, sys, warnings
sys.path[:] = [sys.argv[1], *(path for path in sys.path if path != sys.argv[2])]
import hf_muon
assert hf_muon.__file__ is None, hf_muon
spec = importlib.util.spec_from_file_location("hf_muon_autoload", sys.argv[3])
autoload = importlib.util.module_from_spec(spec)
spec.loader.exec_module(autoload)
warnings.simplefilter("error" if sys.argv[4:] else "always")
autoload.activate()
print(getattr(hf_muon, "__version__", None), sys.modules["hf_muon"] is hf_muon)
"""


def test_a_folder_of_its_name_does_not_hide_the_package(tmp_path):
    """Find the folder first, as the finder of an editable installation does in the folder of a checkout."""
    (tmp_path / "hf_muon").mkdir()
    entry_point = ROOT / "hf_muon_autoload.py"
    use = "import torch\nfrom hf_muon import Muon\nfrom transformers import TrainingArguments\n" + ARGUMENTS
    printed = fresh(FOLDER + use, tmp_path, tmp_path, ROOT, entry_point, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert printed.split() == [hf_muon.__version__, "True"]
    # Without a package beside the entry point, the folder is named, also where warnings are errors.
    alone = tmp_path / "elsewhere" / entry_point.name
    alone.parent.mkdir()
    alone.write_text(entry_point.read_text(encoding="utf-8"), encoding="utf-8")
    printed = fresh(FOLDER, tmp_path, tmp_path, ROOT, alone)
    assert (
        f"{tmp_path / 'hf_muon'} is imported in place of the package hf_muon, which is not in {alone.parent}" in printed
    )
    assert "None True" in fresh(FOLDER, tmp_path, tmp_path, ROOT, alone, "error")


# --- the name


def test_the_member_behaves_as_the_others():
    member = OptimizerNames("muon")
    assert member is OptimizerNames.MUON is OptimizerNames["MUON"]
    assert (member.value, member.name, repr(member)) == ("muon", "MUON", "<OptimizerNames.MUON: 'muon'>")
    assert member == "muon"
    assert hash(member) == hash("muon")
    assert pickle.loads(pickle.dumps(member)) is copy.deepcopy(member) is member
    assert list(OptimizerNames).count(member) == [name.value for name in OptimizerNames].count("hf_muon") == 1
    assert len(OptimizerNames) == len(list(OptimizerNames))
    assert "class OptimizerNames" in inspect.getsource(transformers.training_args)


def test_installing_again_changes_nothing():
    def state():
        functions = TrainingArguments.__post_init__, transformers.trainer.Trainer.compute_loss
        return [*functions, *transformers.trainer.DEFAULT_CALLBACKS, *OptimizerNames, *sys.meta_path]

    before = state()
    hf_muon.install()
    hf_muon.install()
    assert state() == before
    assert len(transformers.trainer.DEFAULT_CALLBACKS) == 2


ANOTHER = """
import sys, torch, transformers.training_args as module, transformers.trainer_optimizer as registry
class Names(str, __import__("enum").Enum):
    locals().update({m.name: m.value for m in module.OptimizerNames})
    MUON = "muon"
module.OptimizerNames = Names
class Theirs(torch.optim.SGD): pass
registry._OPTIMIZER_HANDLERS["muon"] = theirs = lambda context: (Theirs, dict(lr=context.args.learning_rate))
if sys.argv[1:]:
    import hf_muon
from transformers import Trainer, TrainingArguments
options = dict(use_cpu=True, report_to="none", max_steps=2, save_strategy="no", logging_steps=1, disable_tqdm=True)
args = TrainingArguments("/tmp/unused", optim="adamw_torch", **options)
print("adamw is made")
for _ in range(2):
    args = TrainingArguments("/tmp/unused", optim="muon", optim_args="of=theirs", **options)
class Net(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}
torch.manual_seed(0)
trainer = Trainer(Net(4, 4), args, train_dataset=[{"x": torch.ones(4)}] * 16)
trainer.train()
assert registry._OPTIMIZER_HANDLERS["muon"] is theirs and args.optim is Names.MUON
logged = map(sorted, trainer.state.log_history)
print(type(trainer.optimizer.optimizer).__name__, trainer.model.weight.sum().item(), *logged)
if sys.argv[1:]:
    from hf_muon.integrations.names import is_muon
    assert [is_muon(name) for name in ("muon", "hf_muon")] == [False, True]
    args = TrainingArguments("/tmp/unused", optim="hf_muon", **options)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4), torch.nn.Linear(4, 4))
    assert type(Trainer(model, args).create_optimizer()).__module__ == "hf_muon.optimizer.muon"
"""


@pytest.mark.slow
def test_a_muon_of_transformers_own_is_what_the_name_means_there(tmp_path):
    """Give transformers a muon before it is patched: it trains as without us, and one warning names `hf_muon`."""
    alone, beside_ours = (without_hooks.run_code(ANOTHER, *words, cwd=tmp_path) for words in ((), ("with hf_muon",)))
    trained = [next(line for line in text.splitlines() if line.startswith("Theirs ")) for text in (alone, beside_ours)]
    assert trained[0] == trained[1]
    assert "hf_muon" not in beside_ours[: beside_ours.index("adamw is made")]
    assert beside_ours.count("[another-muon]") == beside_ours.count("write hf_muon in place of muon") == 1


# --- what fails: names of other packages that the hooks touch, any of which may be renamed

# Runs with AdamW do not notice, and those with Muon go on or are refused. The names are replaced in the source while
# Python imports it, in every module that uses them, so that the package itself works as before.

RENAMING = ROOT / "tests/integrations/renaming.py"
TRAINER, ACCELERATOR = "transformers.trainer", "accelerate.accelerator"
FSDP, DCP = "accelerate.utils.fsdp_utils", "torch.distributed.checkpoint.state_dict"
OPTIMIZERS = "transformers.trainer_optimizer"


class Row(NamedTuple):
    """A name that a hook touches, the modules that have it, and whether a plain run of Muon is refused without it."""

    hook: str
    name: str
    modules: tuple[str, ...]
    is_needed: bool = False


# The names of a case are renamed together: each is of another hook.
CASES = {
    "handlers": [Row("optimizer of Trainer", "_OPTIMIZER_HANDLERS", (OPTIMIZERS, TRAINER), is_needed=True)],
    "callbacks": [Row("callback of Trainer", "DEFAULT_CALLBACKS", (TRAINER,), is_needed=True)],
    "first": [
        Row("Ulysses", "compute_loss", (TRAINER,)),
        Row("weights of checkpoints", "_issue_warnings_after_load", (TRAINER,)),
        Row("batches of Ulysses", "deepspeed_ulysses_dl_adapter", (TRAINER, ACCELERATOR)),
        Row("accelerate's shards", "fsdp_plugin", (FSDP,)),
        Row("whole states", "info", (DCP,)),
    ],
    "second": [
        Row("Ulysses", "skip_first_batches", (TRAINER, "accelerate", "accelerate.data_loader", ACCELERATOR)),
        Row("accelerate's shards", "input_dir", (FSDP,)),
        Row("whole states", "_load_optim_state_dict", (DCP,)),
    ],
    "third": [Row("whole states", "fqn_param_mapping", (DCP,))],
}


@functools.cache
def seen_with(*rows):
    """Train three steps with AdamW and with Muon where these names are other ones; return what came of it."""
    renames = {}
    for row in rows:
        for module in row.modules:
            renames.setdefault(module, {})[row.name] = f"renamed{row.name}"
    printed = without_hooks.run([RENAMING, json.dumps(renames)], cwd=ROOT)
    return json.loads(printed.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.first_tier("handlers")
@pytest.mark.parametrize("case", CASES)
def test_a_renamed_name(case):
    ours = seen_with()
    rows = [row for row in CASES[case] if row.hook != "batches of Ulysses" or ours["has sequence parallel"]]
    seen = seen_with(*rows)
    assert seen["adamw"] == ours["adamw"] == ours["without hooks"], f"AdamW notices {rows}"
    assert all(isinstance(weights, list) for weights in (ours["adamw"][0], ours["muon"]))
    assert seen["heard of adamw"] == []
    for row in rows:
        assert ours["states"][row.hook] == "patched"
        assert seen["states"][row.hook].startswith("failed"), row
        assert row.hook in str(seen["muon"]) if row.is_needed else seen["muon"] == ours["muon"]


def test_every_hook_has_a_row_and_says_what_is_lost_without_it():
    assert all(len(hook.lost.split()) > 3 for hook in HOOKS.values())
    rows = {row.hook for rows in CASES.values() for row in rows}
    assert {name for name in HOOKS.keys() - rows if "LLaMA-Factory" not in name} == {
        *("optim: muon", "Accelerator.prepare"),  # public
        "newer v1's optimizers",  # on stand-ins, as those of LLaMA-Factory
    }


def test_what_is_put_in_place_of_functions_can_be_pickled():
    """Pickle each attribute that a hook or a run with qk_clip replaces, as those who send it to other processes do."""
    attention_logits._patch(AttentionInterface)
    found = [(AttentionInterface, "get_interface")]
    for hook in HOOKS.values():
        if hook.module in sys.modules and hook.module.partition(".")[0] in ("accelerate", "torch", "transformers"):
            path, _, function = hook.patch.partition(":")
            changes = getattr(importlib.import_module(path), function)(sys.modules[hook.module])
            found += [(owner, name) for owner, name, _ in changes if not isinstance(owner, (dict, list))]
    assert len(found) > 10
    for owner, name in found:
        value = getattr(owner, name)
        assert pickle.loads(pickle.dumps(value)) == value, (owner, name)


def test_a_patch_makes_all_its_changes_or_none():
    module = SimpleNamespace(first=1, items=[1], names={"a": 1})

    def patch(module, fails=True):
        yield module, "first", 2
        yield module.items, slice(1, None), [2]
        yield module.names, "b", 2
        if fails:
            yield module, "missing", module.missing

    before = {"first": 1, "items": [1], "names": {"a": 1}}
    with pytest.raises(AttributeError):
        _autoload.apply(patch, module)
    assert vars(module) == before
    with hooks.patched(functools.partial(patch, fails=False), module):
        assert vars(module) == {"first": 2, "items": [1, 2], "names": {"a": 1, "b": 2}}
    assert vars(module) == before


# --- modules that are imported again, threads, and other optimizers

AGAIN = {
    "reload": "importlib.reload(sys.modules['transformers.training_args'])",
    "purge": "[sys.modules.pop(name) for name in list(sys.modules) if name.partition('.')[0] == 'transformers']",
}


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("again", AGAIN)
def test_a_reloaded_transformers_is_patched_again(again, tmp_path):
    code = f"import importlib, sys, hf_muon\n{IMPORT}\n{ARGUMENTS}\n{AGAIN[again]}\n"
    code += f"from transformers.training_args import TrainingArguments\n{ARGUMENTS}"
    without_hooks.run_code(code, cwd=tmp_path)


THREADS = """
import contextlib, importlib, sys, threading, time
class Slow:  # lets the other threads look at a module that is not patched yet
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "hf_muon.integrations":
            for _ in range(5000):
                time.sleep(0)  # gives the interpreter to another thread
def in_threads(function, arguments):
    threads = [threading.Thread(target=function, args=(argument,), daemon=True) for argument in arguments]
    for thread in threads: thread.start()
    for thread in threads: thread.join(100)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
"""
KNOWN = f"""{THREADS}
sys.meta_path.insert(0, Slow)
unknown = []
def use(_):
    from transformers.training_args import OptimizerNames
    try:
        OptimizerNames("muon")
    except ValueError as error:
        unknown.append(str(error))
in_threads(use, range(8))
assert not unknown, unknown
import transformers.training_args
assert type(transformers.training_args) is type(sys), "the awaiting class stayed"
"""
IMPORTS = f"""{THREADS}
names = ["transformers.training_args", "transformers.trainer", "transformers.trainer_optimizer", "torch", "hf_muon",
         "accelerate.accelerator", "hf_muon.integrations.transformers.hooks", "hf_muon.build"]
def use(name):  # transformers and accelerate import each other in a cycle and may fail on their own
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module(name)
in_threads(use, names)
import os
os._exit(0)
"""


@pytest.mark.extended
@pytest.mark.second_tier("code[12]")
@pytest.mark.slow
@pytest.mark.parametrize("code", [f"import torch{KNOWN}", f"import transformers{KNOWN}", IMPORTS])
def test_the_first_threads_know_the_name_and_do_not_wait_for_one_another(code, tmp_path):
    fresh(code, tmp_path)


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
@pytest.mark.slow
def test_other_optimizers_are_what_they_are_without_us(tmp_path):
    """Compare class, arguments and groups, or the error, of each of transformers' own names with and without hooks."""
    on, off = (
        json.loads(without_hooks.run_code(code, cwd=tmp_path).strip().splitlines()[-1])
        for code in (f"import hf_muon\n{OPTIMIZERS}", OPTIMIZERS)
    )
    assert on.keys() == off.keys()
    assert [name for name in on if on[name] != off[name]] == []
    assert sum(len(result) == 4 for result in on.values()) >= 10  # those that can be built on this machine
