"""What `hf-muon plan --device cpu` says a step takes, beside what it takes here: ``predicted_seconds.json``.

python benchmarks/predicted_seconds.py --out benchmarks/predicted_seconds.json

In each round every model is predicted, which measures the machine anew for its shapes, and takes three steps at once
afterwards. A ratio is the median of the ratios within rounds. Times are processor time of the one thread, to which
other programs do not add; they share caches, memory and clocks with it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from meters import machine, spread
from timing import Clock
from torch import nn

from hf_muon import MuonConfig, build_optimizer
from hf_muon.plan.seconds import auto_dtype, plan_seconds
from hf_muon.plan.step_plan import plan_step

BAND = 0.25  # of the measured time
_STEPS = 3  # in each round


@dataclass(frozen=True)
class Case:
    """A model to step.

    Attributes:
        config: of transformers.
        kind: what makes a model of it.
        options: of `build_optimizer`.
        rank: of LoRA; 0 without.
        dtype: of the weights.
    """

    config: transformers.PretrainedConfig
    kind: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    dtype: torch.dtype = torch.float32

    def model(self) -> nn.Module:
        """Return the model, with gradients."""
        model: nn.Module = self.kind.from_config(self.config).to(self.dtype)
        if self.rank:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=self.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.randn_like(param)
        return model


def _llama(divisor: int) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        hidden_size=512 // divisor,
        intermediate_size=1408 // divisor,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=16000 // divisor,
    )


def cases(quick: bool) -> dict[str, Case]:
    """Return the models by name; `quick` makes them tiny."""
    d = 8 if quick else 1
    gpt2 = transformers.GPT2Config(
        n_embd=512 // d,
        n_head=8,
        n_layer=6,
        n_positions=512,
        vocab_size=16000 // d,
        bos_token_id=None,
        eos_token_id=None,
    )
    experts = transformers.Qwen3MoeConfig(
        hidden_size=512 // d,
        intermediate_size=1024 // d,
        moe_intermediate_size=256 // d,
        num_hidden_layers=2,
        num_experts=16,
        num_experts_per_tok=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64 // d,
        vocab_size=8000 // d,
    )
    vit = transformers.ViTConfig(
        hidden_size=384 // d, intermediate_size=1536 // d, num_hidden_layers=8, num_attention_heads=6
    )
    return {
        "GPT-2": Case(gpt2),
        "Llama": Case(_llama(d)),
        "Llama, bf16 weights": Case(_llama(d), dtype=torch.bfloat16),
        "Qwen3, 16 experts": Case(experts),
        "ViT": Case(vit, transformers.AutoModelForImageClassification),
        "Llama, LoRA 16": Case(_llama(d), options={"lora": "muon"}, rank=16),
    }


def predicted(model: nn.Module, config: MuonConfig, dtype: torch.dtype) -> dict[str, float]:
    """Return the seconds that a plan says, by part."""
    plan = plan_step(model, config, "single", 1, dtype=dtype, ns_dtype=auto_dtype(None))
    seconds, _ = plan_seconds(model, config, plan, None, dtype=dtype)
    names = ("products", "elementwise", "launching", "total")
    return {name: getattr(seconds, name) for name in names}


def rows(quick: bool, rounds: int) -> list[dict[str, Any]]:
    """Measure and predict all models, once in each round."""
    clock = Clock(torch.device("cpu"))
    sides: dict[tuple[str, str], tuple[Callable[[], dict[str, float]], Callable[[], Any], int]] = {}
    for name, case in cases(quick).items():
        for ns_dtype in ("fp32", "auto"):
            model, config = case.model(), MuonConfig.from_mapping({**case.options, "ns_dtype": ns_dtype})
            optimizer = build_optimizer(model, config)
            optimizer.step()
            trained = sum(param.numel() for param in model.parameters() if param.requires_grad)

            def predict(model: nn.Module = model, config: MuonConfig = config, case: Case = case) -> dict[str, float]:
                return predicted(model, config, case.dtype)

            sides[name, ns_dtype] = predict, optimizer.step, trained
    predictions: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in sides}
    took: dict[tuple[str, str], list[float]] = {key: [] for key in sides}
    for _ in range(rounds):
        for key, (predict, step, _) in sides.items():
            predictions[key].append(predict())
            step()
            took[key].append(spread([clock.seconds(step) for _ in range(_STEPS)])["median"])
    return [_row(key, sides[key][2], predictions[key], took[key]) for key in sides]


def _row(
    key: tuple[str, str], trained: int, predictions: Sequence[dict[str, float]], took: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of a model and a dtype of products, over all rounds."""
    name, ns_dtype = key
    auto = str(auto_dtype(None)).removeprefix("torch.")
    return {
        "model": name,
        "ns_dtype": ns_dtype if ns_dtype != "auto" else f"auto ({auto})",
        "trained weights": trained,
        "predicted": {part: spread([own[part] for own in predictions]) for part in predictions[0]},
        "measured": spread(list(took)),
        "predicted / measured": spread(
            [own["total"] / seconds for own, seconds in zip(predictions, took, strict=True)]
        ),
    }


def table(report: dict[str, Any]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [
        "| model | products in | trained | measured, ms | predicted, ms | predicted / measured |",
        "| --- " * 6 + "|",
    ]
    for row in report["rows"]:
        ratio, total = row["predicted / measured"], row["predicted"]["total"]
        cells = [
            row["model"],
            row["ns_dtype"],
            f"{row['trained weights'] / 1e6:.1f} M",
            f"{1e3 * row['measured']['median']:,.0f}",
            f"{1e3 * total['median']:,.0f}",
            f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny models: the numbers mean nothing")
    parser.add_argument("--out", help="where to write the figures as JSON")
    args = parser.parse_args()
    logging.getLogger("hf_muon").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    report = {
        "machine": machine(transformers=transformers.__version__),
        "rounds": args.rounds,
        "rows": rows(args.quick, args.rounds),
    }
    print(table(report))
    outside = [row["model"] for row in report["rows"] if abs(row["predicted / measured"]["median"] - 1) > BAND]
    print(f"within {BAND:.0%}: all" if not outside else f"not within {BAND:.0%}: {', '.join(outside)}")
    if args.out:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
