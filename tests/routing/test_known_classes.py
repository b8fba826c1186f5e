"""Only classes whose forward was read are cut; all others stay one matrix.

A name does not tell a layout: timm has some forty kinds of attention with a `qkv`, in thirds, head by head, with keys
and values alone, or with larger values. Modules with the names of its classes stand in for them;
tests/routing/test_fused.py shows that the parts of such views are queries, keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from hf_muon.routing.fused import RULES
from scripts.cuts import sources
from tests.routing.models import linear, muon_views
from tests.support.snapshots import is_older


def qkv(rows=48):
    return nn.Linear(16, rows, bias=False)


# A class of timm, what it holds, and the view of its `qkv`.
STAND_INS = [
    ("layers.attention.Attention", {"qkv": qkv()}, "rows 16+16+16"),
    ("models.swin_transformer.WindowAttention", {"qkv": qkv()}, "rows 16+16+16"),
    ("models.maxxvit.AttentionCl", {"qkv": qkv(), "head_first": True}, "rows 4*(4+4+4)"),
    ("models.maxxvit.AttentionCl", {"qkv": qkv(), "head_first": False}, "rows 16+16+16"),
    ("models.maxxvit.Attention2d", {"qkv": nn.Conv2d(16, 48, 1), "head_first": True}, "flat, rows 4*(4+4+4)"),
    ("models.gcvit.WindowAttentionGlobal", {"qkv": qkv(24)}, ""),  # keys and values
    ("models.gcvit.WindowAttentionGlobal", {"qkv": qkv()}, ""),
    ("models.efficientformer.Attention", {"qkv": qkv()}, ""),  # with larger values
    ("models.levit.Attention", {"qkv": nn.Sequential(OrderedDict(linear=qkv()))}, ""),
    ("models.efficientvit_mit.LiteMLA", {"qkv": nn.Conv2d(16, 48, 1)}, "flat"),
    ("models.of_tomorrow.Attention", {"qkv": qkv()}, ""),
]


@pytest.mark.parametrize(("name", "content", "view"), STAND_INS)
def test_timm(name, content, view):
    package, _, own = f"timm.{name}".rpartition(".")
    kind = type(own, (nn.Module,), {"__module__": package, "forward": lambda self, x: x})
    attention = kind()
    for attribute, value in {"num_heads": 4, **content}.items():
        setattr(attention, attribute, value)
    ((found, _),) = muon_views(nn.ModuleDict({"attn": attention})).values()
    assert found == view


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
