"""A trial trains as its spec says: the same text in the same order for every side, and the same result each time."""

from __future__ import annotations

import pytest
import torch

import evidence.trial
from evidence.corpus import Corpus, write_corpus
from evidence.models import build_model
from evidence.rivals import build_rival
from evidence.study import STUDIES, read_study
from evidence.trial import Blocks, arguments, build_trainer, mean_loss, new_model, train, weights_file
from hf_muon.config import MuonConfig
from tests.rules import others

SPEC = {
    "text": "docs",
    "other_text": None,
    "part": "validation",
    "context": 16,
    "points": 2,
    "model": {"hidden": 32, "layers": 1},
    "batch": 2,
    "steps": 4,
    "settings": {"warmup": 0.25, "learning_rate": 0.01, "optim": "muon", "weight_decay": 0.1},
    "values": {},
    "seed": 1,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    words = [f"{a}{b}" for a in "abcdefgh" for b in "xyzuvw"]
    texts = {part: [" ".join(words[i::step]) for i in range(step)] for part, step in (("train", 3), ("validation", 5))}
    folder = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(folder, {"docs": texts, "code": texts}, {}, vocab_size=280)
    return Corpus(folder)


@pytest.fixture(autouse=True)
def build(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence.trial, "BUILD", tmp_path)


def with_settings(**settings):
    return {**SPEC, "settings": {**SPEC["settings"], **settings}}


def result(spec, corpus):
    return {key: value for key, value in train(spec, corpus).items() if key != "cpu_seconds"}


def test_a_repeated_trial_is_equal_and_a_seed_changes_it(corpus):
    first = result(SPEC, corpus)
    assert list(first["losses"]) == [2, 4]
    assert result(SPEC, corpus) == first
    assert result({**SPEC, "seed": 2}, corpus)["loss"] != first["loss"]


def test_all_sides_see_the_same_batches(corpus, monkeypatch):
    inputs_of = {}
    for optim in ("muon", "adamw_torch"):
        inputs_of[optim] = []

        def step(trainer, model, inputs, *args, to=inputs_of[optim], **kwargs):
            to.append(inputs["input_ids"].clone())
            return evidence.trial.Trainer.training_step(trainer, model, inputs, *args, **kwargs)

        monkeypatch.setattr(evidence.trial.InOrder, "training_step", step, raising=False)
        train(with_settings(optim=optim), corpus)
    expected = Blocks(corpus.blocks("docs", "train", 16), 8, seed=1)
    rows = torch.stack([expected[i]["input_ids"] for i in range(8)]).split(2)
    for batches in inputs_of.values():
        assert len(batches) == 4
        assert all(map(torch.equal, batches, rows))


def test_the_first_factors_of_lora_follow_the_seed_on_a_pretrained_model(corpus, monkeypatch, tmp_path):
    build_model(SPEC["model"], corpus.vocab_size, 16, 1).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(evidence.trial, "INPUT", tmp_path)
    pretrained = {**with_settings(lora_rank=2, lora="muon"), "model": {"pretrained": True}}

    def factors(seed, optim):
        spec = {**pretrained, "seed": seed, "settings": {**pretrained["settings"], "optim": optim}}
        torch.seed()  # each trial is a process, which torch seeds at random
        trained = build_trainer(spec, corpus, new_model(spec, corpus)).model
        return [param.detach() for name, param in trained.named_parameters() if "lora_A" in name]

    first = factors(1, "muon")
    assert len(first) == 7
    assert all(map(torch.equal, first, factors(1, "adamw_torch")))
    assert not any(map(torch.equal, first, factors(2, "muon")))


def test_blocks_come_once_an_epoch():
    blocks = torch.arange(12).view(6, 2)
    order = [int(block["labels"][0]) // 2 for block in Blocks(blocks, 15, seed=3)]
    assert sorted(order[:6]) == sorted(order[6:12]) == list(range(6))
    assert order[:6] != order[6:12]
    assert len(order) == 15


def test_the_loss_is_that_of_a_loop_by_hand(corpus):
    """Compare AdamW's trial with a plain loop: schedule, clipping, decay and batches."""
    from torch.optim.lr_scheduler import LambdaLR

    loss = train(with_settings(optim="adamw_torch"), corpus)["loss"]
    model = build_model(SPEC["model"], corpus.vocab_size, 16, 1)
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}], 0.01
    )
    schedule = LambdaLR(optimizer, lambda step: step if step < 1 else (4 - step) / 3)
    for block in torch.stack([b["labels"] for b in Blocks(corpus.blocks("docs", "train", 16), 8, 1)]).split(2):
        model(input_ids=block, labels=block).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    held_out = corpus.blocks("docs", "validation", 16)
    assert loss == pytest.approx(mean_loss(model, held_out, autocast=False), abs=1e-5)


@pytest.mark.parametrize("rival", ["torch", "torch_original"])
def test_rivals_follow_the_schedule_and_take_our_steps(corpus, rival):
    scale = {"torch": {}, "torch_original": {"adjust_lr_fn": "original", "muon_lr": 0.02}}[rival]
    same = {"ns_coefficients": "original", "ns_dtype": "bf16", "adam_beta2": 0.95, "adam_beta1": 0.9, "warmup": 0.5}
    ours = train(with_settings(**same, **scale), corpus)["losses"]
    theirs = train(with_settings(rival=rival, optim="adamw_torch", **same, **scale), corpus)["losses"]
    unscheduled = train(with_settings(lr_scheduler_type="constant", **same, **scale), corpus)["losses"]
    assert theirs == pytest.approx(ours, abs=2e-3)
    assert max(abs(ours[step] - unscheduled[step]) for step in ours) > 2e-2


def test_adamw_with_two_rates(corpus):
    same = {"adam_beta1": 0.9, "adam_beta2": 0.95, "optim": "adamw_torch"}
    one_rate = train(with_settings(**same), corpus)["losses"]
    assert train(with_settings(rival="adamw", hidden_lr=0.01, **same), corpus)["losses"] == one_rate
    model = build_model(SPEC["model"], corpus.vocab_size, 16, 1)
    settings = {**SPEC["settings"], **same, "hidden_lr": 0.001}
    optimizer = build_rival("adamw", model, settings)
    rates = {param: group["lr"] for group in optimizer.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        hidden = param.ndim == 2 and "embed" not in name
        assert rates[param] == (0.001 if hidden else 0.01), name


def test_a_start_is_where_fine_tuning_begins(corpus):
    start = {**SPEC, "part": "test", "text": "docs"}
    train({**start, "save": True, "part": "validation"}, corpus)
    saved = {key: value for key, value in start.items() if key != "part"} | {"part": "validation"}
    assert weights_file(saved, corpus).is_file()
    spec = {**SPEC, "text": "code", "other_text": "docs", "start": saved}
    tuned = train(spec, corpus)
    assert tuned["other_loss_before"] == pytest.approx(train(saved, corpus)["loss"], abs=1e-6)
    assert 0 < tuned["movement"] < 1
    for settings in ({"optim": "adamw_torch"}, {"optim": "muon", "lora": "muon"}):
        lora = train({**with_settings(lora_rank=4, **settings), "other_text": "docs", "start": saved}, corpus)
        assert lora["other_loss_before"] == tuned["other_loss_before"]
        assert 0 < lora["movement"] < 1


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="setting moment is neither of TrainingArguments nor of muon"):
        arguments({"warmup": 0.1, "moment": 0.9}, 1, 1, 1)


ARCHIVED = {
    *("lora product", "decay follows the rate", "momentum warms up and cools down"),
    *("layer_decay 0.9", "wd_scales embed 0", "split_fused false", "Aurora"),
}
"""Sides of the studies whose option was deleted: their results stay, and they cannot run again."""


@pytest.mark.parametrize("name", sorted(path.stem for path in STUDIES.glob("*.yaml")))
def test_every_setting_of_the_studies_is_read(name):
    """Build the arguments of each side, and read muon's options from them."""
    study = read_study(STUDIES / f"{name}.yaml")
    with others.registered():
        _read_settings(study)


def _read_settings(study):
    for cell in study.cells:
        for side in set(study.sides_of(cell)) - ARCHIVED:
            spec = study.tuning(cell, side, (0,) * len(study.ladders(cell, side))).spec
            args = arguments(spec["settings"], 1, spec["steps"], 1)
            assert args.learning_rate > 0
            if args.optim_args:
                MuonConfig.from_mapping(dict(pair.split("=") for pair in args.optim_args.split(",")))
