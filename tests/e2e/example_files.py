"""Names of the example files and of what runs them, and the parameters that their runs give to Muon and to AdamW."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests import fixtures_text
from tests.e2e.harness import ROOT

TRAIN = ROOT / "examples" / "train.py"
SEVERAL = ROOT / "tests" / "e2e" / "several.py"  # runs scripts in the same processes
CPU_FSDP = ROOT / "tests" / "e2e" / "cpu_fsdp.py"  # runs a script with FSDP2 on a CPU

LLAMAFACTORY_SFT = {  # with the settings that make each of them small
    "llamafactory_qwen3_full_sft.yaml": {},
    "llamafactory_qwen3_freeze_sft.yaml": {"freeze_trainable_layers": 1},
    "llamafactory_qwen3_lora_sft.yaml": {},
}
LLAMAFACTORY_PRETRAIN = "llamafactory_qwen3_pretrain.yaml"
LLAMAFACTORY_FSDP2 = "llamafactory_qwen3_fsdp2.yaml"
LLAMAFACTORY_V1, LLAMAFACTORY_V1_FSDP2 = "llamafactory_v1_qwen3_sft.yaml", "llamafactory_v1_qwen3_fsdp2.yaml"
LLAMAFACTORY_V1_ULYSSES = ("llamafactory_v1_qwen3_ulysses.yaml", "llamafactory_v1_qwen3_ulysses_top_level.yaml")
TRL = {stage: f"trl_qwen3_{stage}.yaml" for stage in ("sft", "dpo", "grpo")}
TRAINER = "trainer_qwen3_pretrain.yaml"
TRAINER_FSDP2 = "trainer_qwen3_fsdp2.yaml"
ACCELERATE = ("accelerate_qwen3_fsdp2.yaml", "accelerate_qwen3_hsdp.yaml")
DEEPSPEED = {  # test_deepspeed.py runs these
    f"{framework}_qwen3_{layout}.yaml"
    for framework in ("llamafactory", "trainer")
    for layout in ("zero2", "zero3", "zero3_offload", "zero3_nvme")
}
ULYSSES = "trainer_qwen3_ulysses.yaml"  # tests/deepspeed/test_run_ulysses.py runs this

ALL_MATRICES = {f"{name}.weight" for name in fixtures_text.qwen3_matrices()}
ALL_OTHERS = {
    *(f"{name}.weight" for name in fixtures_text.qwen3_norms()),
    *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
}


def several(runs: Sequence[Sequence[object]], folder: Path) -> list[object]:
    """Return the words that run scripts one after the other in the same processes, for python or a launcher."""
    path = folder / f"runs_{len(list(folder.glob('runs_*.json')))}.json"
    path.write_text(json.dumps([[str(word) for word in run] for run in runs]), encoding="utf-8")
    return [SEVERAL, path]
