"""sentence-transformers itself: bi-, cross- and sparse encoders, losses with weights of their own, rates by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_muon import Muon, build_optimizer

sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = [pytest.mark.extended, pytest.mark.filterwarnings("ignore")]

LR, DECAY, STEPS = 0.01, 0.1, 4
WORDS = ["red", "green", "blue", "cat", "dog", "fish", "runs", "sleeps", "here", "there"]


def sentences(count=32):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, len(WORDS), (count, 4), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in row) for row in rows]


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


def bi_encoder(folder):
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, sentence_transformer

    torch.manual_seed(1)
    model = SentenceTransformer(folder, device="cpu")
    loss = sentence_transformer.losses.SoftmaxLoss(model, embedding_dimension=32, num_labels=3)
    return SentenceTransformerTrainer, model, loss, [i % 3 for i in range(32)]


def cross_encoder(folder):
    from sentence_transformers import CrossEncoder, CrossEncoderTrainer
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    torch.manual_seed(1)
    model = CrossEncoder(folder, num_labels=1, device="cpu")
    return CrossEncoderTrainer, model, BinaryCrossEntropyLoss(model), [float(i % 2) for i in range(32)]


def sparse_encoder(folder):
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer
    from sentence_transformers.sparse_encoder import losses

    model = SparseEncoder(folder, device="cpu")
    loss = losses.SpladeLoss(model, losses.SparseMultipleNegativesRankingLoss(model), document_regularizer_weight=1e-3)
    return SparseEncoderTrainer, model, loss, None


def trainer(kind, folder, path, optimizer_of=None, **options):
    """Return a trainer; `optimizer_of` makes its optimizer from the loss, in place of `optim: muon`."""
    from datasets import Dataset

    cls, model, loss, labels = kind(folder)
    rows = {"anchor": sentences(), "positive": sentences()[::-1], **({} if labels is None else {"label": labels})}

    class ByHand(cls):
        def create_optimizer(self, model=None):
            self.optimizer = optimizer_of(self.loss) if optimizer_of else super().create_optimizer(model)
            return self.optimizer

    args = getattr(sentence_transformers, cls.__name__.replace("Trainer", "TrainingArguments"))(
        str(path),
        optim="muon",
        learning_rate=LR,
        weight_decay=DECAY,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        optim_args="ns_dtype=fp32",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    return ByHand(model, args, train_dataset=Dataset.from_dict(rows), loss=loss)


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


KINDS = [bi_encoder, cross_encoder, sparse_encoder]


@pytest.mark.parametrize("rates", [{}, {"layer.1.": LR / 10}], ids=["one rate", "learning_rate_mapping"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_trains_as_groups_written_by_hand(bert, tmp_path, kind, rates):
    ours = trainer(kind, bert, tmp_path, learning_rate_mapping=rates)
    start = copy.deepcopy(list(ours.loss.parameters()))
    ours.train()
    theirs = trainer(kind, bert, tmp_path, by_hand(rates))
    theirs.train()
    for before, a, b in zip(start, ours.loss.parameters(), theirs.loss.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert a.grad is None or not a.grad.any() or not torch.equal(before, a)


def test_weights_of_a_loss_are_trained_and_resume(bert, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    whole = trainer(bi_encoder, bert, tmp_path, **options)
    assert isinstance(whole.loss.classifier, nn.Linear)
    start = whole.loss.classifier.weight.detach().clone()
    saved = {}
    whole.add_callback(_at_step_2(saved, whole.loss))
    whole.train()
    assert not torch.equal(start, whole.loss.classifier.weight)
    halved = trainer(bi_encoder, bert, tmp_path, **options)
    halved.loss.classifier.load_state_dict(saved)  # Trainer saves the model alone
    halved.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(whole.loss.parameters(), halved.loss.parameters(), strict=True))


def _at_step_2(saved, loss):
    from transformers import TrainerCallback

    class Save(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                saved.update(copy.deepcopy(loss.classifier.state_dict()))

    return Save()
