"""`hf-muon convert` on the state of another Muon."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments
from typer.testing import CliRunner

from hf_muon import build_optimizer
from hf_muon.cli.app import app
from tests.convert.sources import names_of
from tests.other_muons import deepspeed_like, gradients, halves, moonlight_like, run
from tests.reference import relative_difference


@pytest.fixture(scope="module")
def source_run(tmp_path_factory):
    """Return a small Qwen3 with an optimizer like LLaMA-Factory's `use_muon: true`, and the folder of both."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

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


class TestConvert:
    @staticmethod
    def convert(source_run, target, *arguments, source="optimizer.pt", model=None, **options):
        _, _, folder = source_run
        options = {"from": "llamafactory-v0", "model": model or folder, **options}
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return CliRunner().invoke(app, ["convert", str(folder / source), str(target), *words, *arguments])

    def test_it_loads(self, source_run, tmp_path, caplog):
        model, optimizer, _ = source_run
        result = self.convert(source_run, tmp_path / "out.pt")
        assert result.exit_code == 0, result.output
        assert "which parameter goes where" in caplog.text
        assert [path.name for path in tmp_path.iterdir()] == ["out.pt"]
        target = build_optimizer(model)
        target.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
        for p in halves(model)[0]:
            expected = optimizer.state[p]["momentum_buffer"] * (1 - 0.95)
            assert torch.equal(target.state[p]["momentum_buffer"], expected)
        for p in halves(model)[1]:
            assert torch.equal(target.state[p]["exp_avg_sq"], optimizer.state[p]["moment2"])
        text = re.sub(r"\s+", " ", result.stdout)
        assert "with AdamW, after 3 steps, in 3 param groups." in text
        assert "not SOURCE's but of --optim-args: muon 0.001 and 0, adamw 0.001 and 0" in text

    def test_options_are_those_of_the_command_and_not_those_of_the_source(self, source_run, tmp_path):
        result = self.convert(source_run, tmp_path / "out.pt", optim_args="lr=0.5,momentum=0.9")
        assert "SOURCE has lr=" in result.stdout
        assert "momentum=0.95" in result.stdout
        groups = torch.load(tmp_path / "out.pt", weights_only=True)["param_groups"]
        assert all((group["lr"], group["momentum"], group["step"]) == (0.5, 0.9, 3) for group in groups)

    def test_a_trainer_goes_on(self, source_run, tmp_path):
        """Compare four steps there and four here with eight there; a falling learning rate shows a wrong schedule."""
        from transformers import Trainer

        def train(name, model, optimizer=None, resume=None, **more):
            settings = {"max_steps": 8, "save_steps": 4, "learning_rate": 5e-3, "lr_scheduler_type": "linear", **more}
            arguments = TrainingArguments(str(tmp_path / name), use_cpu=True, report_to=[], **settings)
            Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None)).train(resume)

        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 60, (64, 12), generator=generator)
        data = [{"input_ids": row, "labels": row} for row in tokens]
        theirs, ours = copy.deepcopy(source_run[0]), copy.deepcopy(source_run[0])
        train("theirs", theirs, moonlight_like(theirs, lr=5e-3))
        middle = tmp_path / "theirs" / "checkpoint-4"
        start = type(theirs).from_pretrained(middle)
        rule = "ns_coefficients=original,ns_dtype=fp32"
        options = {"optim_args": f"lr=2.5e-3,adamw_betas=0.9|0.95,{rule}", "source": middle / "optimizer.pt"}
        result = self.convert(source_run, middle / "optimizer.pt.new", model=middle, **options)
        assert "in 3 param groups" in result.stdout
        (middle / "optimizer.pt.new").replace(middle / "optimizer.pt")
        schedule = torch.load(middle / "scheduler.pt", weights_only=True)
        per_group = ("base_lrs", "_last_lr", "lr_lambdas")
        torch.save({**schedule, **{key: schedule[key] * 3 for key in per_group}}, middle / "scheduler.pt")
        train("ours", ours, resume=str(middle), optim="muon", adam_beta2=0.95, optim_args=rule)
        weights = [list(model.parameters()) for model in (start, theirs, ours)]
        assert relative_difference(*weights) < 1e-5

    def test_a_model_that_cannot_be_made_without_weights(self, source_run, tmp_path, monkeypatch):
        from transformers import Qwen3ForCausalLM

        init = Qwen3ForCausalLM.__init__

        def computing(self, config):
            init(self, config)
            if torch.empty(0).device.type == "meta":
                raise NotImplementedError

        monkeypatch.setattr(Qwen3ForCausalLM, "__init__", computing)
        result = self.convert(source_run, tmp_path / "out.pt")
        assert result.exit_code == 1
        assert "its constructor computes with weights" in result.stderr
        assert not (tmp_path / "out.pt").exists()

    def test_names_in_a_file(self, source_run, tmp_path):
        other = copy.deepcopy(source_run[0])
        optimizer = deepspeed_like(other)
        run(other, gradients(other, 1), optimizer)
        torch.save(optimizer.state_dict(), source_run[2] / "deepspeed.pt")
        (tmp_path / "names.txt").write_text("\n".join(names_of(other, optimizer)) + "\n")
        deepspeed = {"source": "deepspeed.pt", "from": "deepspeed"}
        assert "(names, --names)" in self.convert(source_run, tmp_path / "out.pt", **deepspeed).stderr
        result = self.convert(source_run, tmp_path / "out.pt", names=tmp_path / "names.txt", **deepspeed)
        assert result.exit_code == 0, result.output
        target = build_optimizer(other)
        target.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
        for p in halves(other)[0]:
            assert torch.equal(target.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"source": "lost.pt"}, r"lost.pt cannot be read as a file of torch.save: .*No such file"),
            ({"source": "config.json"}, "config.json cannot be read as a file of torch.save"),
            ({"source": "unsafe.pt"}, "unsafe.pt cannot be read as a file of torch.save: Weights only load failed"),
            ({"source": "half.pt"}, "half.pt cannot be read as a file of torch.save"),
            ({"source": "weights.pt"}, "it is no optimizer's state_dict"),
            ({"from": "moonlit"}, "'moonlit' is not a format. Valid: torch, llamafactory-v0"),
            ({"from": "torch"}, "which are not those of that optimizer"),
            ({"model": "/nowhere"}, "/nowhere does not exist. Name a model's directory"),
            ({"optim_args": "momentun=0.9"}, "'momentun' is not an option of muon. Did you mean 'momentum'"),
            ({"optim_args": "adamw_patterns=up_proj"}, r"up_proj.weight: Muon there, AdamW here"),
            ({"names": "/nowhere.txt"}, "No such file or directory: '/nowhere.txt'"),
        ],
    )
    def test_refused(self, source_run, tmp_path, options, message, caplog):
        folder = source_run[2]
        torch.save({"weight": torch.ones(2)}, folder / "weights.pt")
        torch.save(subprocess.Popen, folder / "unsafe.pt")
        (folder / "half.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:5000])
        target = tmp_path / "out.pt"
        result = self.convert(source_run, target, **options)
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit)
        assert re.search(message, result.stderr), result.stderr
        assert "which parameter goes where" not in caplog.text
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "text",
        ["{}", "{", '{"model_type": "qwen3", "hidden_size": "x"}', '{"model_type": "qwen3", "layer_types": [1]}'],
    )
    def test_a_model_that_is_none(self, source_run, tmp_path, text):
        (tmp_path / "config.json").write_text(text)
        result = self.convert(source_run, tmp_path / "out.pt", model=tmp_path)
        assert (result.exit_code, type(result.exception)) == (1, SystemExit)
        assert f"{tmp_path}: no model can be made of it" in result.stderr
        assert not (tmp_path / "out.pt").exists()

    def test_what_is_there_stays(self, source_run, tmp_path):
        target = tmp_path / "out.pt"
        target.write_text("mine")
        result = self.convert(source_run, target)
        assert result.exit_code == 1
        assert f"{target} exists. Name another TARGET" in result.stderr
        assert target.read_text() == "mine"
        assert self.convert(source_run, tmp_path / "no" / "out.pt").exit_code == 1

    def test_a_disk_that_is_full(self, source_run, tmp_path, monkeypatch):
        def full(state, path):
            Path(path).write_text("half of it")
            raise RuntimeError("[enforce fail at inline_container.cc] . file write failed")

        monkeypatch.setattr(torch, "save", full)
        result = self.convert(source_run, tmp_path / "out.pt")
        assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])
        assert "file write failed" in result.stderr

    def test_as_a_program(self, source_run, tmp_path):
        program = Path(sys.executable).with_name("hf-muon")
        folder = source_run[2]
        words = [program, "convert", folder / "optimizer.pt", tmp_path / "out.pt", "--model", folder / "config.json"]
        process = subprocess.run([*words, "--from", "llamafactory-v0"], capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        process = subprocess.run([*words, "--from", "llamafactory-v0"], capture_output=True, text=True, check=False)
        assert process.returncode == 1
        assert "exists" in process.stderr
        assert "Traceback" not in process.stderr
