"""Every class of transformers that cuts the result of a matrix was read.

If this fails for a new version: read the class's forward. Parts that are used as separate projections belong into
hf_muon/routing/fused.py; all else into `READ`, with what the parts are.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

import pytest

from hf_muon.routing.fused import RULES
from tests.routing.cuts import cuts, sources

# Names of matrices, classes, and what the cut result is.
READ = [
    ("qa_outputs|classifier|lm_head", "*", "logits"),
    ("output", "GitForCausalLM", "logits"),
    ("weight", "InklingTopkRouter", "logits"),
    ("linear", "NeuCodecISTFTHead Xcodec2ISTFTHead", "a head"),
    ("mlp|conv2", "ZoeDepthConditionalLogBinomialSoftmax ZoeDepthSeedBinRegressor", "a head"),
    ("fn", "DeepseekV4HyperConnection Glm5NextTextHyperConnection HYV4HyperConnection", "scalars"),
    ("gru_rel_pos_linear", "WavLMAttention", "scalars"),
    ("seg_embed", "FunnelRelMultiheadAttention", "scalars"),
    ("conv_proj", "VitsConvFlow", "coordinates"),
    ("(post_)?flows", "VitsStochasticDurationPredictor", "coordinates"),
    ("attentions|stages", "FlaubertModel HieraEncoder XLMModel", "several results of a layer"),
    ("linear_(q|kv)_points", "EsmFoldInvariantPointAttention", "coordinates"),
    ("convtr", "VibeVoiceAcousticTokenizerCausalConvTranspose1d", "time steps"),
    ("decoder_embed", "ViTMAEDecoder", "tokens"),
    ("key", "LukeSelfAttention", "tokens"),
    ("(key|query|value)_proj", "ProphetNetNgramSelfAttention", "tokens"),
    ("query_scale", "DabDetrDecoder", "scales of positions"),
    ("conv", "UnivNetLvcResidualBlock", "what a predicted convolution mixes"),
]
# The rotary part of a head and the rest of it are one query or key.
ROTARY = re.compile("rope|rotary|_rot|_pe\\b")


@pytest.fixture(scope="module")
def found():
    return cuts(sources())


def unread(found, table: Sequence[tuple[str, str, object]]):
    """Return the cuts, by class and matrix, that no entry of a table names."""

    def named(own: str, matrix: str) -> bool:
        return any((names == "*" or own in names.split()) and re.fullmatch(words, matrix) for words, names, _ in table)

    whole = {case for case, texts in found.items() if all(ROTARY.search(text) for text in texts)}
    return {case: texts for case, texts in found.items() if case not in whole and not named(*case)}


def test_every_class_that_cuts_a_result_was_read(found):
    assert unread(found, [*RULES, *READ]) == {}


def test_a_class_that_nobody_read_is_found(found):
    """Take each class out of the table: the cuts of nearly all are found, in the versions that have these classes."""
    ours = {source.name for source in sources()} & {own for _, names, _ in RULES for own in names.split()}
    missed = ours - {own for own, _ in unread(found, READ)}
    assert len(ours) > 150
    assert len(missed) < len(ours) / 10, sorted(missed)


CUT = {
    "chunk": "a, b = self.proj(x).chunk(2, dim=-1)",
    "of torch": "a, b = torch.split(self.proj(x), [3, 4], -1)",
    "unflatten": "x = self.proj(x).unflatten(-1, (2, 3)).permute(2, 0, 1, 3)",
    "halves": "y = self.proj(x)\nz = y[..., :4] * self.act(y[..., 4:])",
    "channels": "y = self.proj(x)\nz = y[:, :4, :] + y[:, 4:, :]",
    "indices": "y = self.proj(x).view(2, 3, 3, 4).permute(2, 0, 1, 3)\nreturn attend(y[0], y[1], y[2])",
    "helper": "q, k, v = self._split_heads(self.proj(x))",
    "GLU": "return nn.functional.glu(self.norm(self.proj(x)), dim=1)",
    "module of a GLU": "return self.glu(self.proj(x))",
    "product": "a, b = (x @ self.stack[0]).chunk(2, -1)",
    "list": "for layer in self.layers:\n    a, b = layer(x).chunk(2, -1)",
    "branch": "y = self.proj(x)\nif self.clip:\n    y = y.clamp(0, 1)\na, b = torch.chunk(y, 2, dim=-1)",
}
WHOLE = {
    "batch": "a, b = self.proj(x).chunk(2)",
    "batch by sizes": "parts = torch.split(self.proj(x), sizes, dim=0)",
    "one slice": "y = self.proj(x)[..., :5]",
    "input": "a, b = x.chunk(2, -1)\nreturn self.proj(a) + b",
    "shape": "b, t, d = self.proj(x).size()",
}


@pytest.mark.parametrize("case", [*CUT, *WHOLE])
def test_what_counts_as_a_cut(case, tmp_path):
    init = "self.proj = nn.Linear(4, 8)\nself.layers = nn.ModuleList([nn.Linear(4, 8)])\nself.glu = nn.GLU(dim=-1)"
    init += "\nself.stack = nn.Parameter(torch.empty(2, 4, 8))"
    forward = textwrap.indent({**CUT, **WHOLE}[case], " " * 8)
    init = textwrap.indent(init, " " * 8)
    file = tmp_path / "modeling_own.py"
    file.write_text(
        f"\n\nclass Own(nn.Module):\n    def __init__(self):\n{init}\n\n    def forward(self, x):\n{forward}\n"
    )
    assert bool(cuts(sources(file))) == (case in CUT)
