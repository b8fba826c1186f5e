"""Runs of Trainer in one output directory: the report shows one of them, its losses at the steps of its measures."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from hf_muon import Muon
from hf_muon.diagnostics.run_file import read_run
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
    run = read_run(folder)
    assert list(run.rows) == [step for step, _ in run.losses]
    return list(run.rows), len(run.in_file)


def test_a_second_training_goes_on_and_one_from_scratch_is_another_run(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    trainer.train()
    assert steps_of(tmp_path) == ([1, 2, 3, 4, 5, 6, 7, 8], 1)
    trainer_of(tmp_path, eval_on_start=True).train()
    assert steps_of(tmp_path) == ([1, 2, 3, 4], 2)
    assert list(read_run(tmp_path).traces["eval_b_loss"]) == [0]


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
    assert list(read_run(tmp_path).traces["eval_b_loss"]) == [2]


def test_steps_before_a_smaller_batch_count_as_the_optimizers_do(tmp_path):
    class NoMemory(InOrder):
        def training_step(self, *args, **kwargs):
            if self._train_batch_size > 1 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    trainer_of(tmp_path, NoMemory, auto_find_batch_size=True, per_device_train_batch_size=2).train()
    assert steps_of(tmp_path) == ([1, 2, 3, 4, 5, 6], 1)


def test_in_a_file_without_ids_each_start_begins_a_run(tmp_path):
    start = {"event": "start", "parameters": [{"name": "a.0.w", "layer": 0, "kind": "w"}]}
    steps = [
        [{"event": "step", "step": k, "muon_lr": rate, "relative_update": [rate]} for k in (1, 2)] for rate in (1, 2)
    ]
    lines = [line for each in steps for line in (start, *each)]
    (tmp_path / "muon_diagnostics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert run.traces["muon_lr"] == {1: 2.0, 2: 2.0}
    assert len(run.in_file) == 2


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
    assert len(read_run(tmp_path).in_file) == 2
