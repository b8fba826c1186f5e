"""Runs of Trainer in one output directory: the report shows one of them, its losses at the steps of its measures."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hf_muon import Muon
from hf_muon.cli.report import read
from hf_muon.integrations.transformers.callback import MuonCallback
from tests.integrations.plain_script import InOrder, dataset, model
from tests.integrations.trainer_runs import arguments

TWICE = {"eval_dataset": {"a": dataset(4), "b": dataset(8)}}


def trainer_of(folder, trainer_class=InOrder, given=None, **options):
    options = {"optim_args": "diagnostics_every=1", "max_steps": 4, **options}
    given = given or {"model": model()}
    return trainer_class(args=arguments(folder, **options), train_dataset=dataset(), **TWICE, **given)


def steps_of(folder):
    """Return the steps of the last run, which all have a loss, and the number of runs in its file."""
    run = read(folder)
    assert list(run.steps) == [step for step, own in run.logs.items() if "loss" in own]
    return list(run.steps), (folder / "muon_diagnostics.jsonl").read_text().count('"after":0}')


def test_a_second_training_goes_on_and_one_from_scratch_is_another_run(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    trainer.train()
    assert steps_of(tmp_path) == ([1, 2, 3, 4, 5, 6, 7, 8], 1)
    trainer_of(tmp_path, eval_on_start=True).train()
    assert steps_of(tmp_path) == ([1, 2, 3, 4], 2)
    assert [step for step, own in read(tmp_path).logs.items() if "eval_b_loss" in own] == [0]


def test_each_training_of_a_model_init_is_a_run(tmp_path):
    """Train as each trial of hyperparameter_search does; the later one ends before the earlier one."""
    trainer = trainer_of(tmp_path, given={"model_init": lambda: model()})
    trainer.train()
    trainer.args.max_steps = 2
    trainer.train()
    assert steps_of(tmp_path) == ([1, 2], 2)


def test_a_resumed_training_is_one_run(tmp_path):
    """Resume from step 2 of a run that had come to step 4, with and without an evaluation before the first step."""
    trainer_of(tmp_path, save_strategy="steps", save_steps=2).train()
    for last, eval_on_start in (5, False), (3, True):
        trainer = trainer_of(tmp_path, max_steps=last, eval_on_start=eval_on_start)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert steps_of(tmp_path) == ([*range(1, last + 1)], 1)
    assert [step for step, own in read(tmp_path).logs.items() if "eval_b_loss" in own] == [2]


def test_steps_before_a_smaller_batch_count_as_the_optimizers_do(tmp_path):
    class NoMemory(InOrder):
        def training_step(self, *args, **kwargs):
            if self._train_batch_size > 1 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    trainer_of(tmp_path, NoMemory, auto_find_batch_size=True, per_device_train_batch_size=2).train()
    assert steps_of(tmp_path) == ([1, 2, 3, 4, 5, 6], 1)


def test_a_run_whose_first_step_is_skipped_does_not_continue_the_one_before(tmp_path):
    """As fp16's scaler skips steps: Trainer counts them and logs, and the optimizer has not stepped."""
    file = tmp_path / "muon_diagnostics.jsonl"
    for _ in range(2):
        weight = torch.nn.Parameter(torch.ones(4, 4))
        optimizer = Muon([weight], diagnostics_every=1, diagnostics_file=file)
        run = {"model": torch.nn.ParameterList([weight]), "optimizer": optimizer}
        for step in (1, 2):
            if step > 1:
                weight.grad = torch.ones(4, 4)
                optimizer.step()
            state = SimpleNamespace(global_step=step, log_history=[])
            MuonCallback().on_log(SimpleNamespace(optim="muon"), state, None, {"loss": 1.0}, **run)
    assert list(read(tmp_path).steps) == [1]
    assert file.read_text().count('"after":0}') == 2
