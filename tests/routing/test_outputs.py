"""Outputs and projections, recognized by the matrices around them instead of by name."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_muon import route_parameters


def linear(rows, columns):
    return nn.Linear(columns, rows, bias=False)


def mlp(*widths):
    return nn.Sequential(*(linear(after, before) for before, after in itertools.pairwise(widths)))


class Detector(nn.Module):
    """A backbone of hidden size 64, with the modules that a test adds."""

    def __init__(self, config=None, **modules):
        super().__init__()
        self.tokens = nn.Embedding(500, 64)
        self.layers = nn.ModuleList([nn.ModuleDict({"up": linear(96, 64), "down": linear(64, 96)}) for _ in range(2)])
        self.config = SimpleNamespace(**(config or {}))
        for name, module in modules.items():
            setattr(self, name, module)


def routes(**modules):
    """Return "muon" or the reason against it for each weight that a test adds to the backbone."""
    with torch.device("meta"):
        model = Detector(**modules)
    reasons = {route.name: "muon" if route.use_muon else route.reason for route in route_parameters(model)}
    assert {reasons.pop(f"layers.{i}.{name}.weight") for i in range(2) for name in ("up", "down")} == {"muon"}
    del reasons["tokens.weight"]
    return {name.removesuffix(".weight"): reason for name, reason in reasons.items()}


def test_few_rows_at_the_end_of_an_mlp_are_an_output():
    """Route an MLP that predicts the four sides of a box as a head."""
    assert set(routes(sides=mlp(64, 64, 64, 4)).values()) == {"output"}
    assert set(routes(sides=nn.ModuleList([mlp(64, 64, 4), mlp(64, 64, 4)])).values()) == {"output"}
    assert set(routes(sides=mlp(64, 64, 64, 48)).values()) == {"muon"}


def test_the_last_matrix_is_the_one_that_nobody_beside_it_reads():
    """Define the last matrix of an MLP before the middle ones, as SAM does."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj_in, self.proj_out, self.layers = linear(64, 64), linear(4, 64), nn.ModuleList([linear(64, 64)])

    assert set(routes(scores=Late()).values()) == {"output"}


def test_a_model_that_is_an_mlp_keeps_its_hidden_matrices():
    use_muon = {route.name: route.use_muon for route in route_parameters(mlp(40, 64, 64, 3))}
    assert use_muon == {"0.weight": True, "1.weight": True, "2.weight": False}


@pytest.mark.parametrize(
    ("config", "rows", "reason"),
    [
        ({"num_labels": 20}, 21, "output"),
        ({"num_labels": 20}, 20, "head"),
        ({"num_labels": 20}, 22, "muon"),
        ({"state_dim": 17}, 17, "output"),
        ({"num_mel_bins": 40}, 40, "output"),
        ({"num_mel_bins": 20, "reduction_factor": 2}, 40, "output"),
        ({"num_mel_bins": 96}, 96, "muon"),  # layers read as many: a hidden size
        ({}, 20, "muon"),
    ],
)
def test_a_row_for_each_number_that_the_config_says_is_predicted(config, rows, reason):
    assert routes(config=config, predicted=linear(rows, 64)) == {"predicted": reason}


def test_what_reads_the_same_numbers_does_not_make_them_a_hidden_size():
    """Route an agent that reads states and predicts them."""
    reasons = routes(config={"state_dim": 17}, read_state=linear(64, 17), predict_state=linear(17, 64))
    assert reasons == {"read_state": "muon", "predict_state": "output"}


def test_a_bottleneck_is_none():
    """Accept few rows if a later neighbour reads them; an earlier neighbour reads something else."""
    assert set(routes(down=linear(4, 64), up=linear(64, 4)).values()) == {"muon"}
    assert routes(places=linear(64, 4), sides=linear(4, 64)) == {"places": "muon", "sides": "output"}


def test_few_rows_in_a_layer_are_none():
    reasons = routes(more=nn.ModuleList([nn.ModuleDict({"gates": linear(4, 64), "mlp": mlp(64, 32, 64)})]))
    assert set(reasons.values()) == {"muon"}


def test_outputs_of_convolutions():
    reasons = routes(
        decoder=nn.Sequential(nn.Conv2d(64, 64, 3, bias=False), nn.Conv2d(64, 3, 3, bias=False)),
        ctc=nn.Conv1d(64, 500, 1, bias=False),
        config={"vocab_size": 500},
    )
    assert reasons == {"decoder.0": "muon", "decoder.1": "output", "ctc": "head"}


def test_projections_that_are_called_embeddings():
    """Send linear layers between hidden states to Muon, and layers that read coordinates, pixels or tokens to AdamW."""
    embed = "name contains 'embed'"
    reasons = routes(
        config={"vocab_size": 500, "num_labels": 20},
        embed_projection=linear(64, 48),
        embed_patches=linear(64, 300),
        mask_embed=mlp(64, 64, 64),
        conv_embed=nn.Conv1d(64, 64, 3, groups=2, bias=False),
        embed_coordinates=linear(64, 2),
        embed_pixels=nn.Conv2d(3, 64, 3, bias=False),
        embed_one_hot=linear(64, 500),
        class_embed=linear(21, 64),
        bbox_embed=nn.ModuleList([mlp(64, 64, 4), mlp(64, 64, 4)]),
        distance_embed=nn.ModuleList([mlp(64, 64, 33), mlp(64, 64, 33)]),
        embed_out=linear(50, 64),
        pos_embed=nn.Embedding(9, 64),
    )
    muon = {name for name, reason in reasons.items() if reason == "muon"}
    assert muon == {"embed_projection", "embed_patches", "mask_embed.0", "mask_embed.1", "conv_embed"}
    assert {reason for name, reason in reasons.items() if name not in muon} == {embed}


def test_a_users_patterns_win():
    modules = {"sides": mlp(64, 64, 4), "embed_projection": linear(64, 48)}
    with torch.device("meta"):
        model = Detector(**modules)
    reasons = {r.name: r.reason for r in route_parameters(model, muon_patterns="sides", adamw_patterns="embed_proj")}
    assert reasons["sides.1.weight"] == "muon_patterns 'sides'"
    assert reasons["embed_projection.weight"] == "adamw_patterns 'embed_proj'"


def test_tables_that_are_stored_transposed():
    """Recognize MobileBERT's extra columns of its token table: one column for each token, and few rows."""
    assert routes(config={"vocab_size": 900}, more=linear(64, 900)) == {"more": "table: a column for each token"}


class Blocks(nn.Module):
    """Tokens and blocks of hidden size `width` with MLPs four times as wide, and the modules that a test adds."""

    def __init__(self, width, tokens=256, **modules):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        block = {"fc": linear(4 * width, width), "proj": linear(width, 4 * width)}
        self.blocks = nn.ModuleList([nn.ModuleDict(block) for _ in range(2)])
        for name, module in modules.items():
            setattr(self, name, module)


def optimizers(model, *names):
    """Return the optimizer of every weight whose name begins with one of `names`."""
    by_name = {r.name.removesuffix(".weight"): "muon" if r.use_muon else "adamw" for r in route_parameters(model)}
    chosen = {name: to for name, to in by_name.items() if "bias" not in name and name.startswith(names)}
    assert chosen
    return chosen


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
        model = Blocks(width, **{name: linear(256, width), "mtp": later})
    model.config = SimpleNamespace(**config)
    assert optimizers(model, name) == {name: "adamw"}


def test_a_head_called_embedding_in_a_model_without_a_known_vocabulary():
    """Expect AdamW although an earlier MLP reads as many numbers: only a later module could read the head's output."""
    with torch.device("meta"):
        model = Blocks(64, tokens=100, unembed=linear(256, 64))
    assert optimizers(model, "unembed", "blocks.0.proj") == {"unembed": "adamw", "blocks.0.proj": "muon"}


def test_a_one_hot_table_in_a_model_without_a_known_vocabulary():
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": linear(128, 5000), "block": mlp(128, 256, 128), "head": linear(5000, 128)})
    assert optimizers(model, "embed") == {"embed": "adamw"}


def test_a_one_hot_table_of_as_many_tokens_as_a_hidden_size():
    """Tell a one-hot table from a projection: no module before the table has as many outputs as it reads."""
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": linear(64, 256), "blocks": Blocks(64, tokens=9).blocks})
        model["embed_projection"], model["last"] = linear(128, 256), linear(64, 128)
    model.config = SimpleNamespace(vocab_size=256)
    assert optimizers(model, "embed") == {"embed": "adamw", "embed_projection": "muon"}


def test_an_mlp_that_is_the_model_keeps_its_hidden_matrices_behind_an_embedding():
    with torch.device("meta"):
        model = nn.ModuleDict({"emb": nn.Embedding(1000, 256), "net": mlp(256, 1024, 1024, 4)})
    assert optimizers(model, "net") == {"net.0": "muon", "net.1": "muon", "net.2": "adamw"}


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_long_trunk_keeps_its_hidden_matrices(wrapped):
    with torch.device("meta"):
        model = nn.ModuleDict({"stem": linear(512, 64), "trunk": mlp(*[512] * 13, 8)})
        model.register_parameter("token", nn.Parameter(torch.zeros(1, 512)))
        if wrapped:  # in a model with many more layers
            model = Detector(policy=model, encoder=nn.ModuleList([Blocks(512) for _ in range(3)]))
    by_name = optimizers(model, "policy.trunk" if wrapped else "trunk")
    assert list(by_name.values()) == ["muon"] * 12 + ["adamw"]


@pytest.mark.parametrize("listed", [False, True])
def test_heads_of_actors_and_critics_keep_their_hidden_matrices(listed):
    with torch.device("meta"):
        encoder = mlp(64, 256, 256)
        heads = {"actor": mlp(256, 256, 6), "critic": mlp(256, 256, 1)}
        model = nn.ModuleDict({"encoder": nn.ModuleList(encoder) if listed else encoder, **heads})
    assert optimizers(model, "actor", "critic") == {
        "actor.0": "muon",
        "actor.1": "adamw",
        "critic.0": "muon",
        "critic.1": "adamw",
    }


def attention(*names, width=1024, keys=64):
    return nn.ModuleDict(
        {name: linear(rows, width) for name, rows in zip(names, (width, keys, keys, width), strict=True)}
    )


@pytest.mark.parametrize(
    "names", [("wq", "wk", "wv", "wo"), ("q_proj", "k_proj", "v_proj", "o_proj"), ("a", "b", "c", "d")]
)
@pytest.mark.parametrize("layers", [("layer1", "layer2"), ("block_1", "block_2"), ("block",), ("body",)])
def test_keys_and_values_of_few_heads_are_no_output(names, layers):
    """Try layers of any name, and one that a model might call in a loop."""
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": nn.Embedding(5000, 1024)})
        for layer in layers:
            model[layer] = nn.ModuleDict({"attn": attention(*names), "mlp": mlp(1024, 2048, 1024)})
        model["looped"] = attention(*names)
        model["head"] = linear(5000, 1024)
        model["sides"] = linear(4, 1024)
    assert set(optimizers(model, *layers, "looped").values()) == {"muon"}
    assert optimizers(model, "sides", "head") == {"head": "adamw", "sides": "adamw"}


def test_heads_after_matrices_that_lead_out_and_back_are_outputs():
    """Expect an output after up and down projections: keys come before the way back, not after it."""
    with torch.device("meta"):
        heads = nn.ModuleDict({"up": linear(4096, 1024), "down": linear(1024, 4096), "sides": linear(4, 1024)})
        model = nn.ModuleDict({"encoder": mlp(64, 1024, 1024), "heads": heads})
    assert optimizers(model, "heads.sides", "heads.up") == {"heads.up": "muon", "heads.sides": "adamw"}


def test_values_and_advantages_of_an_agent_are_outputs():
    """Expect outputs: a module named "value" is a projection only beside a key."""
    with torch.device("meta"):
        heads = nn.ModuleDict({"value": linear(51, 1024), "q": linear(18, 1024)})
        model = nn.ModuleDict({"encoder": mlp(64, 1024, 1024), "heads": heads})
    assert set(optimizers(model, "heads").values()) == {"adamw"}


@pytest.mark.parametrize("count", [1, 3])
def test_listed_bottlenecks_are_no_output(count):
    reasons = routes(
        downs=nn.ModuleList([linear(4, 64) for _ in range(count)]),
        ups=nn.ModuleList([linear(64, 4) for _ in range(count)]),
    )
    assert set(reasons.values()) == {"muon"}


def test_listed_heads_are_outputs_although_something_embeds_what_they_put_out():
    heads = nn.ModuleList([linear(4, 64) for _ in range(3)])
    reasons = routes(sides=heads, positions=mlp(4, 64, 64))
    assert {to for name, to in reasons.items() if name.startswith("sides")} == {"output"}


class TestWeightNorm:
    """Muon sees the directions like the plain weight, and AdamW gets the magnitudes."""

    @pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
    @pytest.mark.parametrize(
        "module",
        [
            lambda: nn.Conv1d(6, 10, 3),
            lambda: nn.Conv2d(6, 8, 3, groups=2),
            lambda: nn.ConvTranspose1d(6, 9, 3, groups=3),
            lambda: nn.Linear(6, 8),
            lambda: nn.Conv1d(6, 6, 3, groups=6),
        ],
    )
    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_the_direction_is_seen_as_the_weight(self, norm, module):
        (plain,) = (route for route in route_parameters(nn.ModuleDict({"m": module()})) if len(route.shape) > 1)
        by_name = {route.name: route for route in route_parameters(nn.ModuleDict({"m": norm(module())}))}
        magnitude, direction = sorted((route for route in by_name.values() if "bias" not in route.name), key=_size)
        assert (direction.use_muon, direction.view, direction.reason) == (plain.use_muon, plain.view, plain.reason)
        assert direction.shape == plain.shape
        assert not magnitude.use_muon

    def test_the_magnitudes_say_what_they_are(self):
        model = nn.ModuleDict({"m": nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 10, 3))})
        reasons = {route.name: route.reason for route in route_parameters(model)}
        assert reasons["m.parametrizations.weight.original0"] == "magnitudes of a weight norm"

    def test_a_users_own_parametrization_is_left_alone(self):
        class Sum(nn.Module):
            def forward(self, a, b):
                return a + b

            def right_inverse(self, weight):
                return weight / 2, weight / 2

        model = nn.ModuleDict({"m": nn.Conv1d(6, 10, 3)})
        nn.utils.parametrize.register_parametrization(model["m"], "weight", Sum())
        reasons = {route.name: route.reason for route in route_parameters(model) if len(route.shape) > 1}
        assert set(reasons.values()) == {"three dims, not known as a stack of matrices (muon_patterns opts in)"}


def _size(route):
    return route.parameter.numel()
