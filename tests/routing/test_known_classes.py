"""Only classes whose forward was read are cut; all others stay one matrix.

A name does not tell a layout: timm has some forty kinds of attention with a `qkv`, in thirds, head by head, with keys
and values alone, or with larger values. Modules with the names of its classes stand in for them;
tests/routing/test_fused.py shows that the parts of such views are queries, keys and values.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from hf_muon.routing.fused import CUTS
from tests.routing.models import linear, muon_views
from tests.support.snapshots import is_older

# A class of timm, the rows of its `qkv`, and the view.
STAND_INS = [
    ("layers.attention.Attention", 48, "rows 16+16+16"),
    ("models.eva.EvaAttention", 48, "rows 16+16+16"),
    ("models.maxxvit.AttentionCl", 48, ""),  # head by head
    ("models.gcvit.WindowAttentionGlobal", 24, ""),  # keys and values
    ("models.efficientformer.Attention", 48, ""),  # with larger values
    ("models.of_tomorrow.Attention", 48, ""),
]


@pytest.mark.parametrize(("name", "rows", "view"), STAND_INS)
def test_timm(name, rows, view):
    package, _, own = f"timm.{name}".rpartition(".")
    attention = type(own, (nn.Module,), {"__module__": package, "forward": lambda self, x: x})()
    attention.qkv = linear(rows, 16)
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


# Classes that one of the supported versions of transformers does not have any more.
OLDER = {"AriaExperts", "GraniteMoeMoE", "GraniteMoeHybridMoE", "GraniteMoeSharedMoE"}
NAMED = {own for _, classes, _ in CUTS for own in classes}


@pytest.mark.skipif(is_older(), reason="the table names classes of the newest transformers, and a few older ones")
def test_every_row_names_classes_that_exist():
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    theirs = {name for file in files for name in re.findall(r"^class (\w+)", file.read_text(), re.M)} | set(dir(nn))
    assert {name for name in NAMED if "." not in name} - theirs == OLDER - theirs


def test_a_class_is_in_one_row_for_each_projection():
    seen = [(name, own) for name, classes, _ in CUTS for own in classes]
    assert len(seen) == len(set(seen))
