"""Dry runs never train, whatever of them is taken away, and give all reasons at once.

`tests/e2e/test_dry_run.py` compares their tables with those of real runs.
"""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.cli.calls import call
from tests.e2e.harness import BIN, ROOT, STARTUP, run, server
from tests.refusals import codes_in
from tests.test_autoload import installation

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, torch
{begin}
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments
class Trained(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        print("TRAINED")
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8))
args = dict(optim="{optim}", max_steps=1, report_to="none", use_cpu=True, **{more})
data = [dict(input_ids=torch.arange(8), labels=torch.arange(8))] * 8
Trainer(model, TrainingArguments("out", **args), train_dataset=data, callbacks=[Trained]).train()
"""
LOOP = """
import torch
{begin}
weight = torch.nn.Parameter(torch.ones(2, 2))
weight.grad = torch.ones(2, 2)
torch.optim.AdamW([weight]).step()
print("TRAINED")
"""
TAKE_AWAY = {
    "nothing": "",
    "the end in Trainer": "hooks.patch_trainer = lambda module: ()",
    "the ends in Trainer and accelerate": "hooks.patch_trainer = hooks.patch_prepare = lambda module: ()",
    "a patch": "hooks._PATCHES['transformers.trainer'] = 'nothing_like_it'",
    "what a patch changes": "import transformers; del transformers.PreTrainedModel._finalize_model_loading",
    "the hook of steps": "import torch.optim.optimizer as o; del o.register_optimizer_step_pre_hook",
}


def script(change="", optim="adamw_torch", text=SCRIPT, **more):
    begin = f"from hf_muon.dry_run import hooks\n{change}\nhooks.begin()"
    return text.format(begin=begin, optim=optim, more=more)


@pytest.mark.promise("inspect")
@pytest.mark.parametrize("optim", ["muon", "adamw_torch"])
@pytest.mark.parametrize("away", TAKE_AWAY)
def test_nothing_trains_whatever_is_taken_away(away, optim, tmp_path):
    # accelerate ends what a Trainer does not, and `build_optimizer` what accelerate does not.
    has_table = away in ("nothing", "the end in Trainer") or (optim == "muon" and "ends" in away)
    printed = server.run_code(script(TAKE_AWAY[away], optim), cwd=tmp_path, fails=not has_table, HF_MUON_DRY_RUN="1")
    assert "TRAINED" not in printed
    assert ("model.layers.*.mlp.up_proj.weight" in printed) is has_table
    assert away != "nothing" or not (tmp_path / "out").exists()


BY_HAND = """
import torch
{begin}
weight = torch.ones(2, 2, requires_grad=True)
weight.sum().backward()
weight.data -= weight.grad
print("TRAINED")
"""


@pytest.mark.parametrize(
    ("text", "says"), [(LOOP, "AdamW would step"), (BY_HAND, "would train")], ids=["torch", "by hand"]
)
def test_a_loop_is_ended_by_its_first_step(text, says, tmp_path):
    printed = server.run_code(script(text=text), cwd=tmp_path, fails=True, HF_MUON_DRY_RUN="1")
    assert says in printed
    assert "TRAINED" not in printed


# torchao is not installed here: this is what accelerate and LLaMA-Factory read its option from.
RECIPE = """
from types import SimpleNamespace
config = SimpleNamespace(enable_fsdp_float8_all_gather={gather})
trainer.accelerator.ao_recipe_handler = SimpleNamespace(config=config)
trainer.train()
"""


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("optim", ["muon", "adamw_torch"])
def test_weights_that_torchao_will_replace_are_refused(gather, optim, tmp_path):
    """Expect what the run would say when it meets them; its test is in tests/refusals, of a class of tensors."""
    *begin, train = script("", optim).strip().splitlines()
    text = "\n".join([*begin, f"trainer = {train.removesuffix('.train()')}", RECIPE.format(gather=gather)])
    is_refused = gather and optim == "muon"
    printed = server.run_code(text, cwd=tmp_path, fails=is_refused, HF_MUON_DRY_RUN="1")
    assert ("enable_fsdp_float8_all_gather=False" in printed) == is_refused
    assert "model.layers.*.mlp.up_proj.weight" in printed
    assert "TRAINED" not in printed


# What a program does around the end of its training, and a thread that trains in its place.
ENDINGS = {
    "finally": "try:\n    {train}\nfinally:\n    print('SAVED'); model.save_pretrained('old')",
    "all exceptions": "try:\n    {train}\nexcept BaseException:\n    print('SAVED'); torch.save(model, 'old/x')",
    "a thread": "import threading\nt = threading.Thread(target=lambda: {train})\nt.start(); t.join()\nprint('SAVED')",
}


@pytest.mark.parametrize("optim_args", ["", "adamw_patterns=proj"], ids=["routed", "refused"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_after_the_end_is_run(ending, optim_args, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model-00001-of-00002.safetensors").write_text("of an older run")
    *begin, train = script("", "muon", **({"optim_args": optim_args} if optim_args else {})).strip().splitlines()
    text = "\n".join([*begin, ENDINGS[ending].format(train=train)])
    printed = server.run_code(text, cwd=tmp_path, fails=bool(optim_args), HF_MUON_DRY_RUN="1")
    assert "SAVED" not in printed
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["model-00001-of-00002.safetensors"]


def test_the_scripts_train_without_a_dry_run(tmp_path):
    for text in (SCRIPT, LOOP):
        printed = server.run_code(text.format(begin="", optim="muon", more={}), cwd=tmp_path)
        assert "TRAINED" in printed


@pytest.mark.parametrize("state", ["switched off", "broken"])
def test_a_process_without_hf_muon_ends_as_torch_is_imported(state, tmp_path):
    (tmp_path / "loop.py").write_text(LOOP.format(begin=""))
    code = f"import runpy; runpy.run_path({str(tmp_path / 'loop.py')!r})"
    variables = {"HF_MUON_AUTOLOAD": "0"}
    if state == "broken":
        autoload = (ROOT / "hf_muon_autoload.py").read_text(encoding="utf-8")
        installation(tmp_path, "hf_muon_autoload", **{"hf_muon_autoload.py": autoload, "hf_muon/__init__.py": "def"})
        code = f"import sys; sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if p != {str(ROOT)!r})]\n{code}"
        variables = {}
    words = [sys.executable, "-c", code]
    printed = run(words, cwd=tmp_path, path=STARTUP, fails=True, HF_MUON_DRY_RUN="1", **variables)
    assert "[dry-run-without-hooks]" in printed
    assert "TRAINED" not in printed


def test_a_python_that_does_not_load_hf_muon_is_not_started(tmp_path):
    (tmp_path / "loop.py").write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    for variable in ("HF_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        result = call("inspect", "--", sys.executable, tmp_path / "loop.py", **{variable: "0"})
        assert result.exit_code == 1
        assert "[dry-run-not-installed]" in result.stderr
    assert not (tmp_path / "started").exists()


WITHOUT_US = "dict(os.environ, HF_MUON_AUTOLOAD='0')"
CHILDREN = {
    "without our variable": ("subprocess.run([{python!r}, {code!r}], env={{}})", "without HF_MUON_DRY_RUN"),
    "switched off": (f"subprocess.run([{{python!r}}, {{code!r}}], env={WITHOUT_US})", "hf_muon is not loaded in"),
    "of a shell": ("os.system('HF_MUON_AUTOLOAD=0 {python} {code}')", "hf_muon is not loaded in"),
    "in our place": (f"os.execve({{python!r}}, [{{python!r}}, {{code!r}}], {WITHOUT_US})", "hf_muon is not loaded in"),
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_child_that_would_train_is_not_started(kind, tmp_path):
    start, says = CHILDREN[kind]
    (tmp_path / "child.py").write_text("print('TRAINED')")
    start = "import os, subprocess; " + start.format(python=sys.executable, code=str(tmp_path / "child.py"))
    assert "TRAINED" in server.run_code(start, cwd=tmp_path)
    begin = f"from hf_muon.dry_run import hooks; hooks.begin(); {start}"
    printed = server.run_code(begin, cwd=tmp_path, fails=True, HF_MUON_DRY_RUN="1")
    assert says in printed
    assert "TRAINED" not in printed


def test_a_dtype_that_only_the_files_have_is_read(tmp_path):
    """Of the weights themselves nothing is read."""
    make = SCRIPT.partition("args =")[0].format(begin="")
    server.run_code(f"{make}\nmodel.to(torch.bfloat16).save_pretrained('stored')", cwd=tmp_path)
    config = tmp_path / "stored" / "config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if "dtype" not in k}))
    load = "from transformers import Qwen3ForCausalLM\nmodel = Qwen3ForCausalLM.from_pretrained('stored')\n"
    show = "print(model.dtype, model.device)"
    begin = "from hf_muon.dry_run import hooks; hooks.begin()\n"
    assert "torch.bfloat16 cpu" in server.run_code(load + show, cwd=tmp_path)
    assert "torch.bfloat16 meta" in server.run_code(begin + load + show, cwd=tmp_path, HF_MUON_DRY_RUN="1")


@pytest.mark.extended
def test_the_refusal_of_one_of_two_runs_is_the_answer(tmp_path):
    """A driver starts two trainings, of which the first is refused, and looks at neither."""
    for name, more in (("refused", {"optim_args": "adamw_patterns=proj"}), ("fine", {})):
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(begin="", optim="muon", more=more))
    driver = (
        "import subprocess, sys, torch\nfor name in ('refused.py', 'fine.py'): subprocess.run([sys.executable, name])"
    )
    (tmp_path / "both.py").write_text(driver)
    printed = run([BIN / "hf-muon", "inspect", "--", sys.executable, "both.py"], cwd=tmp_path, fails=True)
    assert "[nothing-for-muon]" in printed
    assert "would not refuse" not in printed


def test_all_reasons_come_at_once_below_the_table(tmp_path):
    """Lose a hook, and clip attentions that are normalized."""
    change = "from hf_muon import _autoload; import transformers.trainer"
    change += "; _autoload._states['callback of Trainer'] = 'failed: of mine'"
    printed = server.run_code(
        script(change, "muon", optim_args="qk_clip=100"), cwd=tmp_path, fails=True, HF_MUON_DRY_RUN="1"
    )
    table, _, reasons = printed.partition("This run would be refused:")
    assert "model.layers.*.mlp.up_proj.weight" in table
    assert codes_in(reasons) == {"hook-not-in-place", "normalized-attention"}


@pytest.mark.extended
def test_a_refusal_and_an_error_through_torchrun(tmp_path):
    (tmp_path / "refused.py").write_text(SCRIPT.format(begin="", optim="muon", more={"optim_args": "lora=no"}))
    (tmp_path / "fails.py").write_text("import torch\nraise KeyError('of mine')")
    torchrun = [os.path.join(os.path.dirname(sys.executable), "torchrun"), "--standalone", "--nproc-per-node", "2"]
    result = call("inspect", "--", *torchrun, tmp_path / "refused.py", GLOO_SOCKET_IFNAME="lo")
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    result = call("inspect", "--", *torchrun, tmp_path / "fails.py")
    assert "before it made an optimizer: KeyError: 'of mine'" in result.stderr
