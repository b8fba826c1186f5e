"""Programs that no environment of `make` has, where one is installed: timm, sentence-transformers, Lightning, Ray.

`conftest.py` leaves this file out where none is. Stand-ins for how they call hf_muon are in `tests/integrations`.
"""

from __future__ import annotations

import copy
import random
import re

import pytest
import torch
from torch import nn

from hf_muon import Muon, build_optimizer
from tests.e2e.harness import (
    ALL_MATRICES,
    ALL_OTHERS,
    PLAIN_LOOP,
    ROOT,
    TINY,
    TRAIN,
    TRAINER,
    YAML,
    assert_close,
    assert_routed,
    needs,
    options,
    plain_loop_options,
    python,
    server,
    weights,
)
from tests.support import fixtures_text

pytestmark = [pytest.mark.extended, pytest.mark.slow]

PROGRAMS = ROOT / "examples" / "programs"
LR, DECAY, STEPS = 0.01, 0.1, 4
WORDS = ["red", "green", "blue", "cat", "dog", "fish", "runs", "sleeps", "here", "there"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Return a folder with a small Bert and its tokenizer."""
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    folder = tmp_path_factory.mktemp("bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertForMaskedLM(BertConfig(vocab_size=len(vocabulary), hidden_dropout_prob=0.0, **sizes)).save_pretrained(folder)
    return str(folder)


def bi_encoder(folder, path, optimizer_of=None, **options):
    """Return a trainer; `optimizer_of` makes its optimizer from the loss, in place of `optim: muon`."""
    import sentence_transformers
    from datasets import Dataset

    class Trainer(sentence_transformers.SentenceTransformerTrainer):
        def create_optimizer(self, model=None):
            self.optimizer = optimizer_of(self.loss) if optimizer_of else super().create_optimizer(model)
            return self.optimizer

    torch.manual_seed(1)
    model = sentence_transformers.SentenceTransformer(folder, device="cpu")
    losses = sentence_transformers.sentence_transformer.losses
    loss = losses.SoftmaxLoss(model, embedding_dimension=32, num_labels=3)
    draws = random.Random(3)
    sentences = [" ".join(draws.choices(WORDS, k=4)) for _ in range(32)]
    rows = {"anchor": sentences, "positive": sentences[::-1], "label": [i % 3 for i in range(32)]}
    usual = {"optim": "muon", "learning_rate": LR, "weight_decay": DECAY, "optim_args": "ns_dtype=fp32"}
    usual |= {"max_steps": STEPS, "per_device_train_batch_size": 4, "save_strategy": "no"}
    usual |= {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    args = sentence_transformers.SentenceTransformerTrainingArguments(str(path), **usual | options)
    return Trainer(model, args, train_dataset=Dataset.from_dict(rows), loss=loss)


def by_hand(rates):
    def optimizer_of(loss):
        groups = []
        for group in build_optimizer(loss, lr=LR, weight_decay=DECAY).param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                lr = next((lr for word, lr in rates.items() if word in name), LR)
                keys = {key: group[key] for key in ("use_muon", "weight_decay")}
                groups.append({"params": [(name, param)], "lr": lr, **keys})
        return Muon(groups, ns_dtype="fp32")

    return optimizer_of


@needs("sentence_transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rates", [{}, {"layer.1.": LR / 10}], ids=["one rate", "learning_rate_mapping"])
def test_sentence_transformers_trains_as_groups_written_by_hand(bert, tmp_path, rates):
    ours = bi_encoder(bert, tmp_path, learning_rate_mapping=rates)
    start = copy.deepcopy(list(ours.loss.parameters()))
    ours.train()
    theirs = bi_encoder(bert, tmp_path, by_hand(rates))
    theirs.train()
    for before, a, b in zip(start, ours.loss.parameters(), theirs.loss.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert a.grad is None or not a.grad.any() or not torch.equal(before, a)


@needs("sentence_transformers")
@pytest.mark.filterwarnings("ignore")
def test_weights_of_a_loss_are_trained_and_resume(bert, tmp_path):
    from transformers import TrainerCallback

    options = {"save_strategy": "steps", "save_steps": 2}
    whole = bi_encoder(bert, tmp_path, **options)
    start, saved = copy.deepcopy(whole.loss.classifier.weight), []
    save = type("Save", (TrainerCallback,), {"on_save": lambda *_, **__: saved.append(copy.deepcopy(whole.loss))})
    whole.add_callback(save())
    whole.train()
    assert not torch.equal(start, whole.loss.classifier.weight)
    halved = bi_encoder(bert, tmp_path, **options)
    halved.loss.classifier.load_state_dict(saved[0].classifier.state_dict())  # Trainer saves the model alone
    halved.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(whole.loss.parameters(), halved.loss.parameters(), strict=True))


VIT = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def registered_in_timm():
    """Run the block of docs/programs.md."""
    section = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8").partition("\n## timm\n")[2]
    exec(section.partition("```python\n")[2].partition("```")[0], {})


@needs("timm")
@pytest.mark.usefixtures("registered_in_timm")
@pytest.mark.parametrize(("name", "sizes"), [("vit_tiny_patch16_224", VIT), ("resnet10t", {}), ("convnext_atto", {})])
def test_a_run_of_timm_equals_build_optimizer(name, sizes):
    import timm
    from timm.optim import create_optimizer_v2

    trained = []
    for create in (lambda model, **words: create_optimizer_v2(model, "hfmuon", **words), build_optimizer):
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=3, **sizes)
        optimizer = create(model, lr=LR, momentum=0.95, ns_dtype="fp32")
        for seed in range(2):
            images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
            nn.functional.cross_entropy(model(images), torch.tensor([0, 1])).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


@needs("timm")
@pytest.mark.usefixtures("registered_in_timm")
def test_layer_decay_with_timms_scheduler_and_lookahead():
    import timm
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2

    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **VIT)
    optimizer = create_optimizer_v2(model, "lookahead_hfmuon", lr=LR, weight_decay=DECAY, layer_decay=0.5)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=4, warmup_epochs=0)
    scheduler.step(0)
    assert {g["lr"] / g["lr_scale"] for g in optimizer.param_groups} == {LR}
    assert {g["lr_scale"] for g in optimizer.param_groups if g["use_muon"]} == {0.25, 0.5}


def of_lightning(path):
    """Return the weights in a checkpoint of Lightning or Fabric, with the names of the model."""
    content = torch.load(path, weights_only=False)
    state = content["state_dict"] if "state_dict" in content else content["model"]
    wrappers = re.compile(r"^(_forward_module\.)?(module\.)?(model\.(?=model\.|lm_head))?")
    return {wrappers.sub("", name): value for name, value in state.items()}


@needs("lightning")
@pytest.mark.parametrize("name", ["lightning_fit", "fabric_loop"])
def test_lightning_equals_a_plain_loop_and_resumes(name, tiny_model, rounding, tmp_path):
    common = plain_loop_options(tiny_model, tmp_path)
    words = [PLAIN_LOOP, *common, "--steps", 3, "--output", tmp_path / "plain"]
    server.run(words, cwd=tmp_path, ACCELERATE_USE_CPU="true")

    def run_of(folder, *more):
        words = [*common, "--accelerator", "cpu", "--output", tmp_path / folder, *more]
        printed = python(PROGRAMS / f"{name}.py", *words, cwd=tmp_path)
        assert printed.count("which parameter goes where") == 1
        (checkpoint,) = (tmp_path / folder).glob("*.ckpt")
        return of_lightning(checkpoint), checkpoint

    ddp = ("--batch", 2, "--devices", 2, "--strategy", "ddp")
    for folder, more in (("straight", ()), *([("ddp", ddp)] if name == "fabric_loop" else [])):
        result, _ = run_of(folder, "--steps", 3, *more)
        assert_close(result, weights(tmp_path / "plain"), weights(tiny_model), rounding)
    # Lightning begins an epoch anew, so here each step is an epoch.
    batch = () if name == "fabric_loop" else ("--batch", 1000)
    straight, _ = run_of("longer", *batch, "--steps", 4)
    _, checkpoint = run_of("half", *batch, "--steps", 2)
    resumed, _ = run_of("resumed", *batch, "--steps", 4, "--resume", checkpoint)
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


@needs("sentence_transformers")
def test_the_example_of_sentence_transformers(tiny_model, tmp_path):
    pairs = [{"anchor": name, "positive": text[:80]} for name, text in fixtures_text.documents()]
    fixtures_text.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    words = (tiny_model, tmp_path / "pairs.jsonl", "--cpu", "--steps", 2, "--output", tmp_path / "out")
    python(PROGRAMS / "sentence_transformers_pairs.py", *words, cwd=tmp_path)
    muon, adamw = ({f"model.0.model.{n.removeprefix('model.')}" for n in part} for part in (ALL_MATRICES, ALL_OTHERS))
    adamw -= {"model.0.model.lm_head.weight"}
    assert_routed(tmp_path / "out" / "checkpoint-2", muon=muon, adamw=adamw, steps=2)


@needs("ray")
def test_ray_equals_the_script_alone(tiny_model, tmp_path):
    fixtures_text.write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in fixtures_text.texts(20)])
    changes = TINY | {"model_name_or_path": tiny_model, "data_path": tmp_path / "data.jsonl", "from_scratch": False}
    on_ray = (PROGRAMS / "ray_train.py", "--cpu", "--storage", tmp_path / "storage")
    for name, words in (("alone", (TRAIN,)), ("ray", on_ray)):
        more = options(changes | {"output_dir": tmp_path / name})
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_AUTH_MODE": "disabled"}
        python(*words, YAML / TRAINER, *more, cwd=tmp_path, **settings)
    torch.testing.assert_close(weights(tmp_path / "ray"), weights(tmp_path / "alone"), rtol=0, atol=0)
