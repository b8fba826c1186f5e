"""`hf-muon convert` on the state of another Muon; tests/convert has the conversion itself."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from hf_muon import build_optimizer
from hf_muon.optimizer.checkpoint_format import unpacked
from tests.cli.calls import call
from tests.convert.sources import names_of
from tests.support.other_muons import deepspeed_like, gradients, halves, moonlight_like, run
from tests.support.reference import relative_difference

DEEPSPEED = Path(__file__).parents[1] / "convert" / "deepspeed_state"


@pytest.fixture(scope="module")
def source_run(tmp_path_factory):
    """Return a small Qwen3 with an optimizer like LLaMA-Factory's `use_muon: true`, and the folder of both."""
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    optimizer = moonlight_like(model)
    run(model, gradients(model, 3), optimizer)
    folder = tmp_path_factory.mktemp("made")
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return model, optimizer, folder


def convert(source_run, target, source="optimizer.pt", model=None, **options):
    folder = source_run[2]
    options = {"from": "llamafactory-v0", "model": model or folder, **options}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    return call("convert", folder / source, target, *words)


def loaded(model, path):
    optimizer = build_optimizer(model)
    optimizer.load_state_dict(torch.load(path, weights_only=True))
    return optimizer


@pytest.mark.promise("convert")
def test_it_loads(source_run, tmp_path, golden):
    model, optimizer, folder = source_run
    result = convert(source_run, tmp_path / "out.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["out.pt"]
    target = loaded(model, tmp_path / "out.pt")
    for p in halves(model)[0]:
        assert torch.equal(target.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"] * (1 - 0.95))
    for p in halves(model)[1]:
        assert torch.equal(target.state[p]["exp_avg_sq"], optimizer.state[p]["moment2"])
    other = convert(source_run, tmp_path / "other.pt", optim_args="lr=0.5,momentum=0.9")
    groups = list(map(unpacked, torch.load(tmp_path / "other.pt", weights_only=True)["param_groups"]))
    assert all((group["lr"], group["momentum"], group["step"]) == (0.5, 0.9, 3) for group in groups)
    golden("cli/convert", f"{result.output}\nwith options:\n{other.output}", FOLDER=tmp_path, MODEL=folder)


@pytest.mark.slow
def test_a_trainer_goes_on(source_run, tmp_path):
    """Compare four steps there and four here with eight there; a falling learning rate shows a wrong schedule."""

    def train(name, model, optimizer=None, resume=None, **more):
        settings = {"max_steps": 8, "save_steps": 4, "learning_rate": 5e-3, "lr_scheduler_type": "linear", **more}
        arguments = TrainingArguments(str(tmp_path / name), use_cpu=True, report_to=[], **settings)
        Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None)).train(resume)

    tokens = torch.randint(0, 60, (64, 12), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    theirs, ours = copy.deepcopy(source_run[0]), copy.deepcopy(source_run[0])
    train("theirs", theirs, moonlight_like(theirs, lr=5e-3))
    middle = tmp_path / "theirs" / "checkpoint-4"
    start = type(theirs).from_pretrained(middle)
    rule = "ns_coefficients=original,ns_dtype=fp32"
    options = {"optim_args": f"lr=2.5e-3,adamw_betas=0.9|0.95,{rule}", "source": middle / "optimizer.pt"}
    result = convert(source_run, middle / "optimizer.pt.new", model=middle, **options)
    assert "in 3 param groups" in result.stdout
    (middle / "optimizer.pt.new").replace(middle / "optimizer.pt")
    schedule = torch.load(middle / "scheduler.pt", weights_only=True)
    per_group = ("base_lrs", "_last_lr", "lr_lambdas")
    torch.save({**schedule, **{key: schedule[key] * 3 for key in per_group}}, middle / "scheduler.pt")
    train("ours", ours, resume=str(middle), optim="muon", adam_beta2=0.95, optim_args=rule)
    assert relative_difference(*(list(model.parameters()) for model in (start, theirs, ours))) < 1e-5


def test_options_that_the_run_would_refuse_are_refused(source_run, tmp_path):
    """Expect the answer of a run for qk_clip, whose heads no converted moment shows."""
    assert "[normalized-attention]" in convert(source_run, tmp_path / "out.pt", optim_args="qk_clip=100").stderr
    assert not list(tmp_path.iterdir())


def test_names_in_a_file(source_run, tmp_path):
    other = copy.deepcopy(source_run[0])
    optimizer = deepspeed_like(other)
    run(other, gradients(other, 1), optimizer)
    torch.save(optimizer.state_dict(), source_run[2] / "deepspeed.pt")
    (tmp_path / "names.txt").write_text("\n".join(names_of(other, optimizer)) + "\n")
    deepspeed = {"source": "deepspeed.pt", "from": "deepspeed"}
    assert "[names-needed]" in convert(source_run, tmp_path / "out.pt", **deepspeed).stderr
    result = convert(source_run, tmp_path / "out.pt", names=tmp_path / "names.txt", **deepspeed)
    assert result.exit_code == 0, result.output
    target = loaded(other, tmp_path / "out.pt")
    for p in halves(other)[0]:
        assert torch.equal(target.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])


@pytest.mark.parametrize("within", [(), ("optimizer_state_dict",)], ids=["fp32", "bf16"])
def test_the_file_that_deepspeed_writes(tmp_path, within):
    """Convert a whole checkpoint of stage 0, whose optimizer may keep fp32 copies of the weights."""
    content = torch.load(DEEPSPEED / "mp_rank_00_model_states.pt", weights_only=True)
    for entry in within:
        content["optimizer"] = {entry: content["optimizer"], "fp32_groups": []}
    torch.save(content, tmp_path / "file.pt")
    options = {"from": "deepspeed", "source": tmp_path / "file.pt", "model": DEEPSPEED}
    result = convert((None, None, tmp_path), tmp_path / "out.pt", **options)
    assert "14 parameters with Muon and 11 with AdamW, after 3 steps" in result.stdout, result.output
    assert "use_muon=False" in result.stdout


def test_what_cannot_be_read_or_written_leaves_nothing(source_run, tmp_path, monkeypatch):
    missing = tmp_path / "missing"
    for target, options in ((tmp_path / "out.pt", {"names": missing}), (missing / "out.pt", {})):
        result = convert(source_run, target, **options)
        assert (result.exit_code, type(result.exception)) == (1, SystemExit)
        assert str(missing) in result.stderr

    def full(state, path):
        Path(path).write_text("half of it")
        raise RuntimeError("[enforce fail at inline_container.cc] . file write failed")

    monkeypatch.setattr(torch, "save", full)
    result = convert(source_run, tmp_path / "out.pt")
    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert "file write failed" in result.stderr
