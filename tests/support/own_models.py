"""Models of people's own, as in loops, Lightning and LitGPT: without a configuration that says which matrix is a head.

Each is built on the meta device, and says which of its weights are heads and tables, besides `nn.Embedding`s and what
is no matrix; all others are hidden. Widths are those of small real models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers
from torch import nn

TOKENS, WIDTH = 50257, 768


class Own(NamedTuple):
    """A model, the names of the modules and parameters that go to AdamW as heads or tables, and whether it guesses."""

    build: Callable[[], nn.Module]
    heads: tuple[str, ...] = ()
    guesses: int = 0


class Model(nn.Module):
    """A module with these submodules, parameters and numbers, in this order."""

    def __init__(self, **content: object) -> None:
        super().__init__()
        for name, value in content.items():
            setattr(self, name, value)


class Dense(nn.Module):
    """A linear layer of one's own."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


def blocks(width: int = WIDTH, count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(
        nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(count)
    )


def linear(columns: int, rows: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


def language_model(*, tokens: int = TOKENS, width: int = WIDTH, before: bool = False, **heads: object) -> nn.Module:
    """Return a language model with these heads, made after its blocks or before."""
    content = {"blocks": blocks(width), "norm": nn.LayerNorm(width)}
    content = {**heads, **content} if before else {**content, **heads}
    return Model(tok=nn.Embedding(tokens, width), pos=nn.Embedding(1024, width), **content)


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(num_hidden_layers=1))


def factored() -> nn.Module:
    return Model(
        tok=nn.Embedding(TOKENS, 128),
        up=linear(128, WIDTH),
        blocks=blocks(),
        down=linear(WIDTH, 128),
        out=linear(128, TOKENS),
    )


def recurrent() -> nn.Module:
    return Model(tok=nn.Embedding(10000, 300), rnn=nn.LSTM(300, 512, 2), out=nn.Linear(512, 10000))


def translator() -> nn.Module:
    transformer = nn.Transformer(512, 8, 2, 2, 2048, batch_first=True)
    return Model(
        source=nn.Embedding(32000, 512),
        target=nn.Embedding(24000, 512),
        transformer=transformer,
        generator=nn.Linear(512, 24000),
    )


def codebooks() -> nn.Module:
    tables = nn.ModuleList(nn.Embedding(2049, WIDTH) for _ in range(4))
    return Model(emb=tables, blocks=blocks(), linears=nn.ModuleList(linear(WIDTH, 2048) for _ in range(4)))


def later_tokens() -> nn.Module:
    """Return a model whose modules for later tokens have a layer and a head each, as DeepSeek's."""

    def module() -> nn.Module:
        return Model(join=linear(2 * WIDTH, WIDTH), block=blocks(count=1)[0], out=linear(WIDTH, TOKENS))

    return language_model(out=linear(WIDTH, TOKENS), mtp=nn.ModuleList(module() for _ in range(2)))


def bare() -> nn.Module:
    """Return a model whose table and head are parameters without a module."""
    content = {"E": nn.Parameter(torch.empty(TOKENS, WIDTH)), "U": nn.Parameter(torch.empty(WIDTH, TOKENS))}
    return Model(**content, blocks=blocks(), mix=nn.Parameter(torch.empty(WIDTH, WIDTH)))


def own_linear() -> nn.Module:
    layers = nn.ModuleList(Model(up=Dense(WIDTH, 2048), down=Dense(2048, WIDTH)) for _ in range(2))
    return Model(tok=nn.Embedding(TOKENS, WIDTH), layers=layers, mix=Dense(WIDTH, WIDTH), out=Dense(WIDTH, TOKENS))


def resnet(**content: object) -> nn.Module:
    """Return a ResNet with torchvision's names."""

    def block(columns: int, rows: int) -> nn.Module:
        convs = {"conv1": nn.Conv2d(columns, rows, 3, bias=False), "conv2": nn.Conv2d(rows, rows, 3, bias=False)}
        norms = {"bn1": nn.BatchNorm2d(rows), "bn2": nn.BatchNorm2d(rows)}
        return Model(**convs, **norms, downsample=nn.Sequential(nn.Conv2d(columns, rows, 1, bias=False)))

    widths = (64, 64, 128, 256, 512)
    stages = {
        f"layer{i}": nn.Sequential(block(widths[i - 1], widths[i]), block(widths[i], widths[i])) for i in (1, 2, 3, 4)
    }
    return Model(
        conv1=nn.Conv2d(3, 64, 7, bias=False), bn1=nn.BatchNorm2d(64), **stages, fc=nn.Linear(512, 1000), **content
    )


def timm_resnet() -> nn.Module:
    model = resnet()
    model.get_classifier = lambda: model.fc
    return model


def convolutional() -> nn.Module:
    """Return a network of 1998: its last feature maps are flattened."""
    features = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU())
    return Model(features=features, fc1=nn.Linear(3136, 128), fc2=nn.Linear(128, 100))


def unet() -> nn.Module:
    """Return a U-Net, which joins what it has made on its way down to what it makes on its way up."""
    return Model(
        inc=nn.Conv2d(3, 64, 3),
        down1=nn.Conv2d(64, 128, 3),
        down2=nn.Conv2d(128, 256, 3),
        up1=nn.ConvTranspose2d(256, 128, 2),
        merge1=nn.Conv2d(256, 128, 3),
        up2=nn.ConvTranspose2d(128, 96, 2),
        merge2=nn.Conv2d(160, 64, 3),
        outc=nn.Conv2d(64, 21, 1),
    )


def actor_critic() -> nn.Module:
    def mlp(rows: int) -> nn.Module:
        return nn.Sequential(linear(376, 256), nn.Tanh(), linear(256, 256), nn.Tanh(), linear(256, rows))

    return Model(actor=mlp(17), critics=nn.ModuleList(mlp(51) for _ in range(2)))


def experts() -> nn.Module:
    """Return a mixture of experts whose layers have as many experts as a table has rows."""

    def layer() -> nn.Module:
        mlps = nn.ModuleList(Model(up=linear(WIDTH, 1024), down=linear(1024, WIDTH)) for _ in range(64))
        return Model(kv=linear(WIDTH, 2 * WIDTH), gate=linear(WIDTH, 64), experts=mlps)

    return Model(
        tok=nn.Embedding(TOKENS, WIDTH),
        kind=nn.Embedding(64, WIDTH),
        layers=nn.ModuleList(layer() for _ in range(2)),
        out=linear(WIDTH, TOKENS),
    )


OWN = {
    # Language models.
    "plain": Own(lambda: language_model(out=linear(WIDTH, TOKENS)), ("out",)),
    "value_after": Own(lambda: language_model(out=linear(WIDTH, TOKENS), value=nn.Linear(WIDTH, 1)), ("out", "value")),
    "many_values_after": Own(lambda: language_model(out=linear(WIDTH, TOKENS), v=linear(WIDTH, 101)), ("out",)),
    "made_before": Own(lambda: language_model(out=linear(WIDTH, TOKENS), before=True), ("out",)),
    "one_row_more": Own(lambda: language_model(tokens=TOKENS + 1, out=linear(WIDTH, TOKENS)), ("out",)),
    "padded": Own(lambda: language_model(out=linear(WIDTH, 50304)), ("out",)),
    "of_a_sequence": Own(
        lambda: language_model(out=nn.Sequential(linear(WIDTH, WIDTH), nn.GELU(), linear(WIDTH, TOKENS))), ("out.2",)
    ),
    "convolution": Own(lambda: language_model(out=nn.Conv1d(WIDTH, TOKENS, 1)), ("out",)),
    "recurrent": Own(recurrent, ("out",)),
    "factored": Own(factored, ("out",)),
    "translator": Own(translator, ("generator",)),
    "codebooks": Own(codebooks, tuple(f"linears.{i}" for i in range(4))),
    "later_tokens": Own(later_tokens, ("out", "mtp.0.out", "mtp.1.out")),
    "later_tokens_linear": Own(
        lambda: language_model(outs=nn.ModuleList(linear(WIDTH, TOKENS) for _ in range(3))),
        ("outs.0", "outs.1", "outs.2"),
    ),
    "bare": Own(bare, ("E", "U"), guesses=2),
    "own_linear": Own(own_linear, ("out",)),
    "adaptive_softmax": Own(
        lambda: language_model(loss=nn.AdaptiveLogSoftmaxWithLoss(WIDTH, TOKENS, [2000, 10000])),
        ("loss.head", *(f"loss.tail.{i}.{j}" for i in (0, 1) for j in (0, 1))),
    ),
    "several": Own(
        lambda: Model(models=nn.ModuleList(language_model(out=linear(WIDTH, TOKENS)) for _ in range(2))),
        ("models.0.out", "models.1.out"),
    ),
    "characters": Own(lambda: language_model(tokens=256, width=64, out=linear(64, 256)), ("out",)),
    # Keys and values of few heads, with as many rows as there are tokens.
    "keys_as_wide_as_tokens": Own(
        lambda: language_model(
            tokens=256,
            width=1024,
            layers=nn.ModuleList(Model(wk=linear(1024, 256), wo=linear(1024, 1024)) for _ in range(2)),
        ),
        (),
        guesses=2,
    ),
    "joined_results": Own(
        lambda: Model(num_classes=101, image=linear(300, 320), text=linear(200, 512), lin=linear(832, 101)), ("lin",)
    ),
    "graph_convolutions": Own(
        lambda: Model(conv1=Dense(128, 256), conv2=Dense(256, 512), conv3=Dense(512, 256), lin=linear(256, 40)),
        ("lin",),
        guesses=1,
    ),
    "square": Own(lambda: language_model(tokens=256, width=256, out=linear(256, 256)), (), guesses=1),
    # Hidden matrices with as many rows as a table.
    "as_wide_as_a_table": Own(
        lambda: language_model(tokens=2000, width=512, wide=linear(512, 2000), narrow=linear(2000, 512)), ()
    ),
    "as_wide_in_layers": Own(lambda: language_model(tokens=2048, width=512, out=linear(512, 2048)), ("out",)),
    "square_projection": Own(lambda: language_model(out=linear(WIDTH, TOKENS), mix=linear(WIDTH, WIDTH)), ("out",)),
    "experts": Own(experts, ("out", "layers.0.gate", "layers.1.gate")),
    # Classifiers.
    "torchvision_resnet": Own(resnet, ("fc",), guesses=1),
    "counted_resnet": Own(lambda: resnet(num_classes=1000), ("fc",)),
    "timm_resnet": Own(timm_resnet, ("fc",)),
    "classifier_of_a_backbone": Own(lambda: Model(backbone=bert(), lin=linear(WIDTH, 100)), ("lin",), guesses=1),
    "counted_classifier": Own(lambda: Model(backbone=bert(), num_labels=100, lin=linear(WIDTH, 100)), ("lin",)),
    "fastai": Own(
        lambda: nn.Sequential(bert(), nn.Sequential(linear(WIDTH, 512), nn.ReLU(), linear(512, 120))),
        ("1.2",),
        guesses=1,
    ),
    "tasks": Own(
        lambda: Model(
            backbone=bert(),
            tasks=nn.ModuleList(nn.Sequential(linear(WIDTH, 256), nn.ReLU(), linear(256, 90 + i)) for i in range(2)),
        ),
        ("tasks.0.2", "tasks.1.2"),
        guesses=2,
    ),
    "convolutional": Own(convolutional, ("fc2",), guesses=1),
    "unet": Own(unet, ("outc",), guesses=1),
    "actor_critic": Own(actor_critic, ("actor.4", "critics.0.4", "critics.1.4"), guesses=3),
}


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return OWN[name].build()
