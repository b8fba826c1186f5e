"""`hf-muon inspect` on checkpoints, training files, adapters and model cards."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from transformers import Qwen3ForCausalLM

from hf_muon import MuonConfig, route_parameters
from hf_muon.cli.model_source import known_configs, model_from, read_source
from hf_muon.routing.route import table
from tests import zoo
from tests.cli.calls import as_process, call, training_yaml

YAMLS = sorted((Path(__file__).parents[2] / "examples" / "yaml").glob("*.yaml"))


class TestInspect:
    def test_a_checkpoint_as_a_process(self, small):
        model, folder = small
        result = as_process("inspect", folder, "--json")
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        routes = route_parameters(model)
        assert [tuple(p[k] for k in ("name", "shape", "route", "reason", "view")) for p in report["parameters"]] == [
            (r.name, list(r.shape), "muon" if r.use_muon else "adamw", r.reason, r.view) for r in routes
        ]
        for side, use_muon in (("muon", True), ("adamw", False)):
            mine = [r.parameter.numel() for r in routes if r.use_muon is use_muon]
            assert report[side] == {"parameters": len(mine), "weights": sum(mine)}
        again = json.loads(call("inspect", folder / "config.json", "--json").stdout)
        assert {**again, "source": report["source"]} == report

    def test_weights_are_not_needed(self, small, tmp_path):
        (tmp_path / "config.json").write_text((small[1] / "config.json").read_text())
        assert all(p.is_meta for p in read_source(str(tmp_path)).model.parameters())

    @pytest.mark.parametrize("call_of", [lambda t: t.sum().item(), lambda t: bool(t.any()), lambda t: t.tolist()])
    def test_a_constructor_that_reads_weights_allocates_nothing(self, small, monkeypatch, call_of):
        built, plain = [], Qwen3ForCausalLM.__init__

        def reads(self, config):
            plain(self, config)
            built.extend(self.parameters())
            call_of(self.lm_head.weight)

        monkeypatch.setattr(Qwen3ForCausalLM, "__init__", reads)
        with pytest.raises(ValueError, match=r"its constructor computes with weights, .*hf_muon.route_parameters"):
            model_from(small[1])
        assert built
        assert all(param.is_meta for param in built)

    def test_a_table(self, small):
        result = call("inspect", small[1])
        assert result.exit_code == 0
        assert result.stdout.splitlines()[1:] == table(route_parameters(small[0])).splitlines()
        assert re.search(
            r"^model.layers.2.mlp.up_proj.weight +40x16 +1 ", call("inspect", small[1], "--all").stdout, re.M
        )

    def test_what_is_tied_and_frozen(self, tmp_path, small):
        sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "tie_word_embeddings": True}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **sizes}))
        report = json.loads(call("inspect", tmp_path, "--json").stdout)
        assert report["tied"] == {"model.embed_tokens.weight": ["lm_head.weight"]}
        assert "tied: lm_head.weight, the same as model.embed_tokens.weight" in call("inspect", tmp_path).stdout
        assert json.loads(call("inspect", small[1], "--json").stdout)["tied"] == {}
        run = training_yaml(tmp_path, small, finetuning_type="freeze", freeze_trainable_layers=2)
        frozen = sum(".4." not in name and ".5." not in name for name, _ in small[0].named_parameters())
        words = " ".join(call("inspect", run).stdout.split())
        assert f"frozen: {frozen} parameters" in words

    def test_how_weights_are_seen(self, tmp_path):
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 4}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "vocab_size": 60, **sizes}))
        views = {p["name"]: p["view"] for p in json.loads(call("inspect", tmp_path, "--json").stdout)["parameters"]}
        assert views["model.layers.1.mlp.experts.gate_up_proj"] == "transposed, columns 24*(1+1)"
        assert views["model.layers.1.mlp.experts.down_proj"] == "transposed"
        assert {view for name, view in views.items() if "experts" not in name} == {""}
        words = " ".join(call("inspect", tmp_path).stdout.split())
        assert (
            "mlp.experts.gate_up_proj 4x16x48 2 muon stack of hidden matrices: gate, up [transposed, columns" in words
        )

    @pytest.mark.parametrize(
        "path", [path for path in YAMLS if "accelerate" not in path.name], ids=lambda path: path.name
    )
    def test_training_yamls(self, path, small, tmp_path):
        run = yaml.safe_load(path.read_text())
        target = tmp_path / path.name
        key = "model_name_or_path" if "model_name_or_path" in run else "model"
        target.write_text(path.read_text().replace(str(run[key]), str(small[1])))
        result = call("inspect", target, "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        names = {p["name"] for p in report["parameters"] if p["route"] == "muon"}
        if "lora" in path.name:
            assert names
            assert all("lora_" in name for name in names)
            assert report["frozen"]["weights"] == sum(p.numel() for p in small[0].parameters())
        elif "freeze" in path.name:
            assert {re.search(r"\.(\d)\.", name)[1] for name in names} == {"2", "3", "4", "5"}
            assert report["frozen"]["parameters"] > 0
        else:
            assert len(names) == 42

    def test_options_of_the_run_and_of_the_command_line(self, small, tmp_path):
        path = training_yaml(tmp_path, small, optim_args="adamw_patterns=up_proj", learning_rate="2e-5")
        reasons = {p["name"]: p["reason"] for p in json.loads(call("inspect", path, "--json").stdout)["parameters"]}
        assert reasons["model.layers.0.mlp.up_proj.weight"] == "adamw_patterns 'up_proj'"
        assert read_source(str(path)).config == MuonConfig(lr=2e-5, adamw_patterns="up_proj")
        assert read_source(str(path), "adamw_patterns=down_proj").config.adamw_patterns == "down_proj"

    def test_llamafactory_v1(self, small, tmp_path):
        path = tmp_path / "v1.yaml"
        run = {"model": str(small[1]), "optim_config": {"name": "muon", "weight_decay": 0.1, "momentum": 0.9}}
        path.write_text(yaml.safe_dump(run))
        source = read_source(str(path))
        assert (source.config.weight_decay, source.config.momentum, source.notes) == (0.1, 0.9, [])

    def test_nothing_for_muon_is_told_and_an_error(self, small, tmp_path):
        result = call("inspect", training_yaml(tmp_path, small, finetuning_type="lora"))
        assert result.exit_code == 1
        assert "set lora=muon" in result.stderr
        assert "name contains 'lora' (lora=muon opts in)" in result.stdout

    def test_another_optimizer_is_said(self, small, tmp_path):
        result = call("inspect", training_yaml(tmp_path, small, optim="adamw_torch"))
        assert "says optim: adamw_torch: this is what optim: muon would do" in " ".join(result.stdout.split())

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("nowhere", None, "nowhere does not exist. Name a model's directory or config.json"),
            (
                "nobody/nothing",
                None,
                r"nobody/nothing does not exist here and cannot be fetched from the hub: .*one of qwen3-0.6b",
            ),
            ("empty/", "", "empty holds no config.json"),
            ("run.yaml", "a: [", "run.yaml cannot be read as YAML"),
            ("run.yaml", "- a", "run.yaml does not hold keys and values"),
            ("run.yaml", "optim: muon", "run.yaml names no model"),
            (
                "run.yaml",
                "model_name_or_path: SMALL\noptim_config: {name: muon}",
                "optim_config is for LLaMA-Factory v1",
            ),
            ("run.yaml", "model_name_or_path: ./lost", r"run.yaml, its model: ./lost does not exist"),
            ("run.yaml", "model_name_or_path: SMALL\noptim_args: ns_step=3", "'ns_step' is not an option of muon"),
            ("run.yaml", "model_name_or_path: SMALL\noptim: muon\nuse_muon: true", "would replace the optimizer"),
            ("run.yaml", "model_name_or_path: SMALL\noptim: hf_muon\nuse_muon: true", "would replace the optimizer"),
            ("run.yaml", "model_name_or_path: SMALL\nlora_target: nothing_like_it", "lora does not fit the model: "),
            ("config.json", "{", "config.json: no model can be made of it"),
            ("config.json", '{"model_type": "unheard"}', r"config.json: no model can be made of it: .*`unheard`.*\n$"),
        ],
    )
    def test_refused(self, small, tmp_path, monkeypatch, name, content, message):
        monkeypatch.chdir(tmp_path)
        if name.endswith("/"):
            Path(name).mkdir()
        elif content is not None:
            Path(name).write_text(content.replace("SMALL", str(small[1])))
        result = call("inspect", name)
        assert (result.exit_code, type(result.exception)) == (1, SystemExit)
        assert re.search(message, result.stderr), result.stderr

    @pytest.mark.extended
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["inspect", "nowhere", "--json"], "nowhere does not exist. Name a model's directory"),
            (["report", "nowhere"], "nowhere does not exist. Name a run's output directory"),
        ],
    )
    def test_refused_as_a_process(self, words, message):
        result = as_process(*words)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.startswith(message)
        assert "Traceback" not in result.stderr

    @pytest.mark.extended
    def test_a_mixture_of_experts_as_a_process(self):
        """Expect the numbers of the golden table for Qwen3-30B-A3B."""
        result = as_process("inspect", "qwen3-30b-a3b", "--json")
        report = json.loads(result.stdout)
        share = report["muon"]["weights"] / (report["muon"]["weights"] + report["adamw"]["weights"])
        assert f"muon: {report['muon']['weights']:,} weights, {share:.1%}" in zoo.table("qwen3_moe")
        assert share > 0.95

    @pytest.mark.parametrize(
        ("kind", "model_class"),
        [("t5", "T5ForConditionalGeneration"), ("whisper", "WhisperForConditionalGeneration"), ("vit", "ViTModel")],
    )
    def test_a_configuration_that_names_no_class(self, tmp_path, kind, model_class):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert type(model_from(tmp_path)).__name__ == model_class


@pytest.mark.parametrize(
    ("card", "weights"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_cards_have_as_many_weights_as_the_published_models(card, weights):
    assert sum(p.numel() for p in model_from(card).parameters()) == weights


def test_every_card_makes_a_model():
    for card in known_configs():
        assert all(p.is_meta for p in model_from(card).parameters())
