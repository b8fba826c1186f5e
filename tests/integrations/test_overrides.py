"""Words of a command line: overrides, and words that only look similar."""

from __future__ import annotations

import pytest

from hf_muon.integrations.transformers.overrides import read_overrides


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ("--use_cpu bf16=false", [("use_cpu", None), ("bf16", "false")]),
        ("--use_cpu dist_config.name=fsdp2 --a", [("use_cpu", None), ("dist_config.name", "fsdp2"), ("a", None)]),
        # words that look like overrides and are values
        ("--output_dir out/lr=1", [("output_dir", "out/lr=1")]),
        ("--a 1=2", [("a", "1=2")]),
        ("--a=b c=d", [("a", "b"), ("c", "d")]),
        (
            "--optim_args momentum=0.9,adamw_lr=1e-5 bf16=false",
            [("optim_args", "momentum=0.9,adamw_lr=1e-5"), ("bf16", "false")],
        ),
        ("--lr_scheduler_kwargs min_lr=0", [("lr_scheduler_kwargs", "min_lr=0")]),
        ("--optim_args --use_cpu", [("optim_args", None), ("use_cpu", None)]),
    ],
)
def test_the_word_after_a_flag(words, overrides):
    assert read_overrides(words.split()) == overrides
