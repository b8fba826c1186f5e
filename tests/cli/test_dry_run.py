"""Dry runs never train, whatever of them is taken away, and give all reasons at once.

`tests/e2e/test_dry_run.py` compares their tables with those of real runs.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.cli.calls import call
from tests.e2e.harness import ROOT, STARTUP, run, server
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


def test_a_loop_is_ended_by_its_first_step(tmp_path):
    printed = server.run_code(script(text=LOOP), cwd=tmp_path, fails=True, HF_MUON_DRY_RUN="1")
    assert "AdamW would step" in printed
    assert "TRAINED" not in printed


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


@pytest.mark.parametrize(
    ("python", "options", "says"),
    [
        (os.path.realpath(sys.executable), "", "hf_muon is not loaded in"),  # that of which the environment was made
        (sys.executable, ", env={}", "without HF_MUON_DRY_RUN"),
    ],
    ids=["other", "without variables"],
)
def test_a_child_that_would_train_is_not_started(python, options, says, tmp_path):
    start = f"import subprocess; subprocess.run([{python!r}, '-c', 'print(\"TRAINED\")']{options})"
    assert "TRAINED" in server.run_code(start, cwd=tmp_path)
    begin = f"from hf_muon.dry_run import hooks; hooks.begin(); {start}"
    printed = server.run_code(begin, cwd=tmp_path, fails=True, HF_MUON_DRY_RUN="1")
    assert says in printed
    assert "TRAINED" not in printed


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
