"""Outputs and projections, recognized by the matrices around them instead of by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_muon import route_parameters
from tests.routing.models import linear, mlp, module

MUON, OUTPUT, HEAD, EMBED = "muon", "output", "head", "name contains 'embed'"


def optimizers(model, *prefixes):
    """Return "muon" or the reason against it for every weight whose name begins with one of the prefixes."""
    found = {r.name.removesuffix(".weight"): MUON if r.use_muon else r.reason for r in route_parameters(model)}
    chosen = {name: to for name, to in found.items() if name.startswith(prefixes) and not name.endswith("bias")}
    assert chosen
    return chosen


def block(width, inner):
    return nn.ModuleDict({"up": linear(inner, width), "down": linear(width, inner)})


def backbone(width=64, inner=96, tokens=500, config=None, **modules):
    """Return embedded tokens, two layers of an MLP, and the modules that a test adds."""
    blocks = nn.ModuleList([block(width, inner) for _ in range(2)])
    return module(
        tokens=nn.Embedding(tokens, width), layers=blocks, config=SimpleNamespace(**(config or {})), **modules
    )


class Late(nn.Module):
    """An MLP that defines its last matrix before the middle one, as SAM does."""

    def __init__(self):
        super().__init__()
        self.proj_in, self.proj_out, self.layers = linear(64, 64), linear(4, 64), nn.ModuleList([linear(64, 64)])


# What is beside a backbone of hidden size 64, its config, and the optimizers of all of it or by name.
BESIDE_A_BACKBONE = {
    "the sides of a box": (lambda: {"sides": mlp(64, 64, 64, 4)}, {}, OUTPUT),
    "the sides of boxes": (lambda: {"sides": nn.ModuleList([mlp(64, 64, 4), mlp(64, 64, 4)])}, {}, OUTPUT),
    "more rows than an output has": (lambda: {"sides": mlp(64, 64, 64, 48)}, {}, MUON),
    "the last matrix is the one that nobody reads": (lambda: {"scores": Late()}, {}, OUTPUT),
    "states that are read and predicted": (
        lambda: {"read_state": linear(64, 17), "predict_state": linear(17, 64)},
        {"state_dim": 17},
        {"read_state": MUON, "predict_state": OUTPUT},
    ),
    "a bottleneck, which a later module reads": (lambda: {"down": linear(4, 64), "up": linear(64, 4)}, {}, MUON),
    "what an earlier module reads is something else": (
        lambda: {"places": linear(64, 4), "sides": linear(4, 64)},
        {},
        {"places": MUON, "sides": OUTPUT},
    ),
    "few rows in a layer": (
        lambda: {"more": nn.ModuleList([nn.ModuleDict({"gates": linear(4, 64), "mlp": mlp(64, 32, 64)})])},
        {},
        MUON,
    ),
    "convolutions": (
        lambda: {
            "decoder": nn.Sequential(nn.Conv2d(64, 64, 3, bias=False), nn.Conv2d(64, 3, 3, bias=False)),
            "ctc": nn.Conv1d(64, 500, 1, bias=False),
        },
        {"vocab_size": 500},
        {"decoder.0": MUON, "decoder.1": OUTPUT, "ctc": HEAD},
    ),
    # Linear layers between hidden states go to Muon; layers that read coordinates, pixels or tokens do not.
    "projections that are called embeddings": (
        lambda: {
            "embed_projection": linear(64, 48),
            "embed_patches": linear(64, 300),
            "mask_embed": mlp(64, 64, 64),
            "conv_embed": nn.Conv1d(64, 64, 3, groups=2, bias=False),
        },
        {"vocab_size": 500, "num_labels": 20},
        MUON,
    ),
    "embeddings": (
        lambda: {
            "embed_coordinates": linear(64, 2),
            "embed_pixels": nn.Conv2d(3, 64, 3, bias=False),
            "embed_one_hot": linear(64, 500),
            "class_embed": linear(21, 64),
            "bbox_embed": nn.ModuleList([mlp(64, 64, 4), mlp(64, 64, 4)]),
            "distance_embed": nn.ModuleList([mlp(64, 64, 33), mlp(64, 64, 33)]),
            "embed_out": linear(50, 64),
            "pos_embed": nn.Embedding(9, 64),
        },
        {"vocab_size": 500, "num_labels": 20},
        EMBED,
    ),
    # As MobileBERT has them: one column for each token, and few rows.
    "a table that is stored transposed": (
        lambda: {"more": linear(64, 900)},
        {"vocab_size": 900},
        "table: a column for each token",
    ),
    "listed bottlenecks": (
        lambda: {
            "downs": nn.ModuleList([linear(4, 64) for _ in range(3)]),
            "ups": nn.ModuleList([linear(64, 4) for _ in range(3)]),
        },
        {},
        MUON,
    ),
    "a list of one bottleneck": (
        lambda: {"downs": nn.ModuleList([linear(4, 64)]), "ups": nn.ModuleList([linear(64, 4)])},
        {},
        MUON,
    ),
    "listed heads, although something embeds what they put out": (
        lambda: {"sides": nn.ModuleList([linear(4, 64) for _ in range(3)]), "positions": mlp(4, 64, 64)},
        {},
        {**{f"sides.{i}": OUTPUT for i in range(3)}, "positions.0": MUON, "positions.1": MUON},
    ),
    # A row for each number that the config says is predicted.
    "a class that is none": (lambda: {"predicted": linear(21, 64)}, {"num_labels": 20}, OUTPUT),
    "a row for each label": (lambda: {"predicted": linear(20, 64)}, {"num_labels": 20}, HEAD),
    "two rows more than labels": (lambda: {"predicted": linear(22, 64)}, {"num_labels": 20}, MUON),
    "a row for each part of a state": (lambda: {"predicted": linear(17, 64)}, {"state_dim": 17}, OUTPUT),
    "mel bins": (lambda: {"predicted": linear(40, 64)}, {"num_mel_bins": 40}, OUTPUT),
    "mel bins of two frames": (
        lambda: {"predicted": linear(40, 64)},
        {"num_mel_bins": 20, "reduction_factor": 2},
        OUTPUT,
    ),
    "as many mel bins as layers read": (lambda: {"predicted": linear(96, 64)}, {"num_mel_bins": 96}, MUON),
    "a number that the config does not have": (lambda: {"predicted": linear(20, 64)}, {}, MUON),
}


@pytest.mark.parametrize("case", BESIDE_A_BACKBONE)
def test_beside_a_backbone(case):
    make, config, expected = BESIDE_A_BACKBONE[case]
    with torch.device("meta"):
        modules = make()
        model = backbone(config=config, **modules)
    assert set(optimizers(model, "layers").values()) == {MUON}
    found = optimizers(model, *modules)
    assert found == (expected if isinstance(expected, dict) else dict.fromkeys(found, expected))


@pytest.mark.parametrize("config", [{}, {"vocab_size": 256}])
@pytest.mark.parametrize("name", ["unembed", "embed_out"])
@pytest.mark.parametrize(
    ("width", "after"),
    [(64, (64, 64)), (64, (128, 64)), (64, (256, 64)), (256, (256, 1)), (256, (256, 256)), (256, (256, 64, 1))],
)
def test_a_head_with_as_many_tokens_as_a_hidden_size(config, name, width, after):
    """Surround the head with MLPs, heads and predictors that read as many numbers, and none of its logits."""
    with torch.device("meta"):
        later = mlp(*after) if len(after) > 2 else linear(*after[::-1])
        model = backbone(width, 4 * width, 256, config, **{name: linear(256, width), "mtp": later})
    assert optimizers(model, name)[name] != MUON


def agent(*, listed):
    encoder, heads = mlp(64, 256, 256), {"actor": mlp(256, 256, 6), "critic": mlp(256, 256, 1)}
    return nn.ModuleDict({"encoder": nn.ModuleList(encoder) if listed else encoder, **heads})


def trunk(*, wrapped):
    """Return a long MLP; `wrapped` in a model with many more layers."""
    model = nn.ModuleDict({"stem": linear(512, 64), "trunk": mlp(*[512] * 13, 8)})
    model.register_parameter("token", nn.Parameter(torch.zeros(1, 512)))
    return backbone(policy=model, encoder=nn.ModuleList([backbone(512, 2048) for _ in range(3)])) if wrapped else model


def after_an_encoder(**heads):
    return nn.ModuleDict({"encoder": mlp(64, 1024, 1024), "heads": nn.ModuleDict(heads)})


def one_hot_table():
    """Return a one-hot table and a projection; before the table no module has as many outputs as it reads."""
    tables = {"embed": linear(64, 256), "layers": backbone(64, 256).layers}
    return module(
        config=SimpleNamespace(vocab_size=256), **tables, embed_projection=linear(128, 256), last=linear(64, 128)
    )


# Whole models, and the weights of theirs that Muon and AdamW get, of those that begin with these words.
MODELS = {
    "an MLP": (lambda: mlp(40, 64, 64, 3), "0 1", "2"),
    "an MLP behind an embedding": (
        lambda: nn.ModuleDict({"emb": nn.Embedding(1000, 256), "net": mlp(256, 1024, 1024, 4)}),
        "net.0 net.1",
        "net.2",
    ),
    # An earlier MLP reads as many numbers, but only a later module could read the head's output.
    "a head called embedding, no vocabulary": (
        lambda: backbone(64, 256, tokens=100, unembed=linear(256, 64)),
        "layers.0.down",
        "unembed",
    ),
    "a one-hot table, no vocabulary": (
        lambda: nn.ModuleDict({"embed": linear(128, 5000), "block": mlp(128, 256, 128), "head": linear(5000, 128)}),
        "",
        "embed",
    ),
    "a one-hot table of as many tokens as a hidden size": (one_hot_table, "embed_projection", "embed"),
    "a long trunk": (lambda: trunk(wrapped=False), " ".join(f"trunk.{i}" for i in range(12)), "trunk.12"),
    "a long trunk in a model": (
        lambda: trunk(wrapped=True),
        " ".join(f"policy.trunk.{i}" for i in range(12)),
        "policy.trunk.12",
    ),
    "actor and critic": (lambda: agent(listed=False), "actor.0 critic.0", "actor.1 critic.1"),
    "actor and critic after a list": (lambda: agent(listed=True), "actor.0 critic.0", "actor.1 critic.1"),
    # Keys come before the way back to the hidden size, not after it.
    "a head after matrices that lead out and back": (
        lambda: after_an_encoder(up=linear(4096, 1024), down=linear(1024, 4096), sides=linear(4, 1024)),
        "heads.up",
        "heads.sides",
    ),
    "a head before a square matrix": (
        lambda: after_an_encoder(sides=linear(4, 1024), square=linear(1024, 1024)),
        "heads.square",
        "heads.sides",
    ),
    # A module named "value" is a projection only beside a key.
    "values and advantages of an agent": (
        lambda: after_an_encoder(value=linear(51, 1024), q=linear(18, 1024)),
        "",
        "heads.value heads.q",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(case):
    make, muon, adamw = MODELS[case]
    with torch.device("meta"):
        found = optimizers(make(), "")
    assert {name: found[name] == MUON for name in (*muon.split(), *adamw.split())} == {
        **dict.fromkeys(muon.split(), True),
        **dict.fromkeys(adamw.split(), False),
    }


@pytest.mark.parametrize("names", [("wq", "wk", "wv", "wo"), tuple(f"{x}_proj" for x in "qkvo"), tuple("abcd")])
@pytest.mark.parametrize("layers", [("layer1", "layer2"), ("block_1", "block_2"), ("block",), ("body",)])
@pytest.mark.parametrize("inner", [1024, 512])
def test_keys_and_values_of_few_heads_are_no_output(names, layers, inner):
    """Try layers of any name, and one that a model might call in a loop; `inner` is all heads of queries."""

    def attention():
        sizes = ((inner, 1024), (64, 1024), (64, 1024), (1024, inner))
        return nn.ModuleDict({name: linear(*size) for name, size in zip(names, sizes, strict=True)})

    with torch.device("meta"):
        own = {layer: nn.ModuleDict({"attn": attention(), "mlp": mlp(1024, 2048, 1024)}) for layer in layers}
        heads = {"head": linear(5000, 1024), "sides": linear(4, 1024)}
        model = nn.ModuleDict({"embed": nn.Embedding(5000, 1024), **own, "looped": attention(), **heads})
    assert set(optimizers(model, *layers, "looped").values()) == {MUON}
    assert MUON not in optimizers(model, "sides", "head").values()
