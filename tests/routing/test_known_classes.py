"""Only classes whose forward was read are cut; all others stay one matrix.

A name does not tell a layout: timm has some forty kinds of attention with a `qkv`, in thirds, head by head, with keys
and values alone, or with larger values. Wherever a weight is cut, values of zero must silence queries and keys, as in
tests/routing/test_fused.py. The classes here read their `qkv` as timm's do, and stand in for them under their names.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import softmax
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from hf_muon.routing.fused import RULES
from tests.routing.cuts import sources
from tests.routing.models import linear, muon_views
from tests.routing.test_fused import fused
from tests.support.snapshots import is_older

pytestmark = pytest.mark.newest


def attend(q, k, v):
    """Attend with queries, keys and values of (batch, heads, tokens, size); return (batch, tokens, heads x size)."""
    return (softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2)


class Thirds(nn.Module):
    heads, rows = 4, 48

    def __init__(self):
        super().__init__()
        self.num_heads = self.heads
        self.qkv = nn.Linear(16, self.rows)

    def forward(self, x):
        return attend(*self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4))


class HeadByHead(Thirds):
    head_first = True

    def forward(self, x):
        return attend(*self.qkv(x).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4))


class ThirdsOfMaxViT(Thirds):
    head_first = False
    forward = Thirds.forward


class LargerValues(Thirds):
    key, rows = 2, 4 * (2 + 2 + 8)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return attend(*heads.split([self.key, self.key, 4 * self.key], -1))


class InsideAnother(LargerValues):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Sequential()
        self.qkv.linear = nn.Linear(16, self.rows)

    def forward(self, x):
        heads = self.qkv.linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return attend(*heads.split([self.key, self.key, 4 * self.key], -1))


class KeysAndValues(Thirds):
    rows = 24

    def forward(self, x):
        k, v = self.qkv(x).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return attend(x[..., :12].unflatten(-1, (self.heads, -1)).transpose(1, 2), k, v)


class Convolution(HeadByHead):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Conv2d(16, self.rows, 1)

    def forward(self, x):
        heads = self.qkv(x.transpose(1, 2)[..., None]).flatten(2).unflatten(1, (self.heads, 3, -1))
        return attend(*heads.permute(2, 0, 1, 4, 3))


# A class of timm, what stands in for it, and the view of its `qkv`.
STAND_INS = [
    ("layers.attention.Attention", Thirds, "rows 16+16+16"),
    ("models.swin_transformer.WindowAttention", Thirds, "rows 16+16+16"),
    ("models.maxxvit.AttentionCl", HeadByHead, "rows 4*(4+4+4)"),
    ("models.maxxvit.AttentionCl", ThirdsOfMaxViT, "rows 16+16+16"),
    ("models.maxxvit.Attention2d", Convolution, "flat, rows 4*(4+4+4)"),
    ("models.gcvit.WindowAttentionGlobal", KeysAndValues, ""),
    ("models.gcvit.WindowAttentionGlobal", Thirds, ""),
    ("models.efficientformer.Attention", LargerValues, ""),
    ("models.tiny_vit.Attention", LargerValues, ""),
    ("models.levit.Attention", InsideAnother, ""),
    ("models.efficientvit_mit.LiteMLA", Convolution, "flat"),
    ("models.of_tomorrow.Attention", Thirds, ""),
    ("models.of_tomorrow.Attention", HeadByHead, ""),
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "stand_in", "view"), STAND_INS, ids=lambda value: getattr(value, "__name__", value))
def test_timm(name, stand_in, view):
    torch.manual_seed(0)
    module, _, own = f"timm.{name}".rpartition(".")
    forward = {"__module__": module, "forward": stand_in.forward}
    model = nn.ModuleDict({"attn": type(own, (stand_in,), forward)()})
    ((found, _),) = muon_views(model).values()
    assert found == view
    x = torch.randn(2, 5, 16)
    for _, names, parts in fused(model):
        parts["v"].zero_()
        model.attn.qkv.bias.zero_()
        before = model.attn(x)
        for part in set(names.split(", ")) - {"v"}:
            parts[part].normal_()
        assert torch.allclose(before, model.attn(x), atol=1e-6)


@pytest.mark.promise("nemo-automodel")
@pytest.mark.parametrize(
    ("activation", "view"),
    [("swiglu", "transposed, columns 12+12"), ("quick_geglu", "transposed, columns 12*(1+1)"), ("relu2", "transposed")],
)
def test_experts_of_nemo_automodel(activation, view):
    """Stand in for its GroupedExperts, whose weights are (experts, in, out)."""
    name = {"__module__": "nemo_automodel.components.moe.experts", "forward": lambda self, x: x}
    experts = type("GroupedExperts", (nn.Module,), name)()
    experts.config, experts.is_gated = SimpleNamespace(expert_activation=activation), activation != "relu2"
    experts.gate_and_up_projs = nn.Parameter(torch.ones(3, 16, 24))
    experts.down_projs = nn.Parameter(torch.ones(3, 12, 16))
    model = nn.ModuleDict({"gate": nn.Linear(16, 3), "experts": experts})
    views = {"experts.gate_and_up_projs": view, "experts.down_projs": "transposed"}
    assert {own: found for own, (found, _) in muon_views(model).items()} == views


def block(base, *names):
    """Return a module of one's own with projections of these names."""

    class Block(base):
        def __init__(self):
            super().__init__()
            for name in names:
                setattr(self, name, linear(24))

        def forward(self, x):
            return x

    return Block()


class Own(GPT2Attention):
    def forward(self, hidden_states):
        return self.c_attn(hidden_states).unflatten(-1, (-1, 3, 8))


class TestOwnModules:
    """Modules of one's own stay whole, whatever they derive from and however they are called."""

    @pytest.mark.parametrize("base", [nn.Module, nn.Sequential, nn.ModuleDict, GradientCheckpointingLayer])
    @pytest.mark.parametrize("name", ["qkv", "gate_up_proj", "Wqkv", "kv_b_proj", "c_attn"])
    def test_derived(self, base, name):
        model = nn.ModuleDict({"attn": block(base, name, "proj")})
        assert set(muon_views(model).values()) == {("", "hidden matrix")}

    @pytest.mark.parametrize("first", ["fc1", "pointwise_conv1"])
    def test_containers(self, first):
        second = first.replace("1", "2")
        for names in ((first, second), ("qkv", "proj")):
            model = nn.Sequential(linear(8), nn.ModuleDict({names[0]: linear(24), names[1]: linear(8)}), linear(6, 8))
            assert {view for view, _ in muon_views(model).values()} == {""}

    def test_of_the_same_name_as_a_known_class(self):
        model = type("Qwen2_5_VLVisionAttention", (type(block(nn.Module, "qkv")),), {})()
        experts = type("DbrxExpertGLU", (nn.Module,), {"moe_num_experts": 4, "forward": lambda self, x: x})()
        experts.w2 = nn.Parameter(torch.zeros(15, 12))
        model.convolution = type("Conv1D", (nn.Linear,), {"forward": lambda self, x: x})(12, 15)
        model.experts = experts
        assert {view for view, _ in muon_views(model).values()} == {""}

    def test_a_subclass_counts_as_its_base_until_it_has_a_forward(self):
        config = transformers.GPT2Config(n_embd=24, n_head=3)
        for kind, parts in ((type("Same", (GPT2Attention,), {}), "transposed, columns 24+24+24"), (Own, "transposed")):
            with torch.device("meta"):
                model = nn.ModuleDict({"attn": kind(config)})
            assert muon_views(model)["attn.c_attn.weight"][0] == parts


@torch.no_grad()
@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="not in this version of transformers")
def test_a_grouped_projection_is_a_matrix_for_each_group():
    """Check that a group's rows read that group's inputs and nothing else."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

    torch.manual_seed(0)
    model = nn.ModuleDict({"o_a_proj": DeepseekV4GroupedLinear(6, 4 * 5, 4)})
    assert muon_views(model) == {"o_a_proj.weight": ("rows 4x5", "hidden matrices, one below the other")}
    x = torch.randn(3, 4, 6)
    weights = model.o_a_proj.weight.view(4, 5, 6)
    expected = torch.stack([x[:, group] @ weights[group].T for group in range(4)], 1)
    assert torch.allclose(model.o_a_proj(x), expected, atol=1e-6)


# Classes of rules that one of the supported versions of transformers does not have any more.
OLDER = {
    *("AriaExperts", "Dinov2SwiGLUFFN", "Dinov2WithRegistersSwiGLUFFN"),
    *("GraniteMoeMoE", "GraniteMoeHybridMoE", "GraniteMoeSharedMoE"),
}
NAMED = {name for _, classes, _ in RULES for name in classes.split()} - {"*"}
FULL = ("timm.", "diffusers.", "nemo_automodel.")


@pytest.mark.skipif(is_older(), reason="rules name classes of the newest transformers, and a few older ones")
def test_every_rule_names_classes_that_exist():
    theirs = {source.name for source in sources()} | set(dir(nn))
    assert {name for name in NAMED if not name.startswith(FULL)} - theirs == OLDER - theirs


def test_names_of_classes_are_in_one_rule_for_each_projection():
    seen = [(words, name) for words, classes, _ in RULES for name in classes.split()]
    assert len(seen) == len(set(seen))
