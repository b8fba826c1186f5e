"""`optim_args` and the fields of TrainingArguments: their values, their precedence, and errors."""

from __future__ import annotations

import importlib.metadata

import pytest
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_muon.versions import OLDEST
from tests.integrations.plain_script import InOrder, dataset, model
from tests.integrations.trainer_runs import arguments, train


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("transformers", "4.57.6"),
        ("transformers", "5.1.0.dev0"),
        ("transformers", "5.5.3"),
        ("accelerate", "1.10.1"),
        ("peft", "0.17.0"),
    ],
)
def test_packages_that_are_too_old_are_named_at_once(tmp_path, monkeypatch, package, version):
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else installed(name))
    words = f"Muon needs {package} {OLDEST[package]} or newer, and {version} is installed. Run: pip"
    with pytest.raises(RuntimeError, match=words):
        arguments(tmp_path)
    line = ["--output_dir", str(tmp_path), "--optim", "muon", "--use_cpu", "true"]
    with pytest.raises(RuntimeError, match=words):
        HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)
    assert arguments(tmp_path, optim="adamw_torch")


def test_optim_args_as_a_mapping(tmp_path):
    """Accept the mapping that a YAML file may hold, which transformers itself cannot split."""
    args = arguments(tmp_path, optim_args={"momentum": 0.8, "nesterov": False, "adamw_betas": [0.5, 0.6]})
    config = Trainer.get_optimizer_cls_and_kwargs(args)[1]["config"]
    assert (config.momentum, config.nesterov, config.adamw_betas) == (0.8, False, (0.5, 0.6))
    with pytest.raises(ValueError, match=r"'momentun' is not an option of muon"):
        arguments(tmp_path, optim_args={"momentun": 0.8})


def test_modules_that_another_optimizer_was_restricted_to_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"optim_target_modules=\['mlp'\] is for optimizers such as GaLore"):
        arguments(tmp_path, optim_target_modules=["mlp"])


class TestOptions:
    @pytest.mark.parametrize(
        ("optim_args", "message"),
        [
            ("moment=0.9", r"'moment' is not an option of muon. Did you mean 'momentum'\? Valid: lr, weight_decay"),
            ("momentum", "not of the form name=value"),
            ("ns_steps=many", "ns_steps=many cannot be read. Valid: auto, or an integer from 1 to 99"),
            ("momentum=1", "momentum=1.0 is not valid. Valid: a number from 0 to below 1"),
        ],
    )
    def test_mistakes_are_found_with_the_arguments_before_any_model(self, tmp_path, optim_args, message):
        with pytest.raises(ValueError, match=message):
            arguments(tmp_path, optim_args=optim_args)

    def test_pattern_that_matches_nothing(self, tmp_path):
        with pytest.raises(ValueError, match="adamw_patterns: 'router' matches no parameter"):
            train(model(), tmp_path, optim_args="adamw_patterns=router")

    def test_model_without_matrices(self, tmp_path):
        class Bag(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(48, 8)

            def forward(self, input_ids, labels):
                return {"loss": self.table(input_ids).square().mean()}

        with pytest.raises(ValueError, match="No parameter of Bag reaches Muon: 1 x embedding"):
            train(Bag(), tmp_path)

    def test_optim_args_win_over_the_general_fields(self, tmp_path):
        trainer, _ = train(model(), tmp_path, optim_args="weight_decay=0.3,adamw_betas=0.5|0.6", max_steps=1)
        assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.3
        assert trainer.optimizer.param_groups[0]["adamw_betas"] == (0.5, 0.6)

    def test_schedulers_move_both_halves(self, tmp_path):
        options = {"optim_args": "muon_lr=0.04,adamw_lr=0.001", "lr_scheduler_type": "linear", "warmup_steps": 0}
        trainer, _ = train(model(), tmp_path, max_steps=4, **options)
        rates = [group["lr"] / group["initial_lr"] for group in trainer.optimizer.param_groups]
        assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [0.04, 0.001, 0.001]
        assert rates == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("name", ["cosine_with_min_lr", "reduce_lr_on_plateau", "constant_with_warmup"])
    def test_other_schedulers(self, tmp_path, name):
        kwargs = {"cosine_with_min_lr": {"min_lr": 1e-4}}.get(name, {})
        options = {"lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs, "max_steps": 2}
        if name == "reduce_lr_on_plateau":
            options |= {"warmup_steps": 0, "eval_strategy": "steps", "eval_steps": 1}
            trainer = InOrder(model(), arguments(tmp_path, **options), train_dataset=dataset(), eval_dataset=dataset(8))
            trainer.train()
        else:
            trainer, _ = train(model(), tmp_path, **options)
        groups = trainer.optimizer.param_groups
        assert len({group["lr"] for group in groups}) == 1, "both halves follow the schedule"
        assert {group["step"] for group in groups} == {2}

    def test_from_a_yaml_file(self, tmp_path):
        (tmp_path / "x.yaml").write_text(
            f"output_dir: {tmp_path}\noptim: muon\noptim_args: momentum=0.9\nlearning_rate: 0.01\nuse_cpu: true\n"
        )
        (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(tmp_path / "x.yaml"))
        assert args.optim == "muon"
        assert args.to_dict()["optim"] == "muon"

    def test_rates_that_yaml_reads_as_text(self, tmp_path):
        network = model()
        args = arguments(tmp_path, learning_rate="1e-2")
        assert Trainer(network, args).create_optimizer().param_groups[0]["lr"] == 0.01

    def test_set_optimizer(self, tmp_path):
        args = TrainingArguments(str(tmp_path), use_cpu=True).set_optimizer("muon", args="momentum=0.9")
        assert Trainer(model(), args).create_optimizer().param_groups[0]["momentum"] == 0.9
