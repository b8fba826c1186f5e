"""Orthogonalize real updates in the dtypes and forms that CUDA could use, and compare the directions with float64's.

OMP_NUM_THREADS=1 python benchmarks/forms_on_cuda.py --out benchmarks/forms_on_cuda.csv

*Updates* are what Muon orthogonalizes in short training runs of several architectures: early and late in training from
random weights, in fine-tuning on other text, and of LoRA factors. Products are rounded as tensor cores round them:
factors in fp16 or bf16, sums in fp32, each result rounded once. Models whose figures the CSV file has are skipped, so
that an interrupted benchmark continues.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from bf16_training import demo_text, new_text, packed
from meters import machine
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_muon import build_optimizer
from hf_muon.math import newton_schulz as room
from hf_muon.math.coefficients import PRESETS, resolve
from hf_muon.math.cost import BlockRows, segments

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "demo"))
from prepare import INPUT, prepare

PRESET, STEPS = "polar_express", 5
SMALLEST_INPUT = 1e-3  # singular values below this fraction of the norm are outside of the documented band
SLACK = 0.002  # of the band, whose ends are rounded
EARLY, LATE, TUNED = "early", "late", "fine-tuning"
SCHEDULE = {EARLY: 2, LATE: 60, TUNED: 12}  # the step whose updates are taken
LENGTH, BATCH = 128, 4
# By name: dtype, form, and the number of parts in which a sum is computed, each rounded to the dtype. cuBLAS may split
# sums (`allow_fp16_reduced_precision_reduction`, on by default in torch).
FORMS: dict[str, tuple[torch.dtype, str, int]] = {
    "bf16, standard": (torch.bfloat16, "standard", 1),
    "fp16, standard": (torch.float16, "standard", 1),
    "fp16, Gram": (torch.float16, "gram", 1),
    "fp16, Gram, sums in 4 parts": (torch.float16, "gram", 4),
    "bf16, Gram": (torch.bfloat16, "gram", 1),
    "fp32, Gram": (torch.float32, "gram", 1),
}
Figures = dict[str, Any]
TEXTS = ("model", "stage", "parameter", "form")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/forms_on_cuda.csv"), help="the CSV file")
    parser.add_argument("--only", nargs="*", choices=sorted(MODELS), default=sorted(MODELS), help="some models")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    prepare()
    figures = read(arguments.out)
    for name in arguments.only:
        if any(row["model"] == name for row in figures):
            continue
        began = time.monotonic()
        for stage, matrices in updates_of(name):
            for parameter, matrix in matrices.items():
                rows = [{"model": name, "stage": stage, "parameter": parameter} | row for row in measured(matrix)]
                figures += rows
        print(f"{name}: {len(figures)} figures, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        write(arguments.out, figures)
    print(machine(transformers=transformers.__version__))
    for row in figures:
        row["short side"] = min(map(int, row["parameter"].split()[0].split("x")))
    print(*(table(figures, key) for key in ("short side", "stage", "model")), sep="\n\n")


def read(file: Path) -> list[Figures]:
    """Return the figures of a CSV file; none where there is no file."""
    if not file.is_file():
        return []
    with file.open(newline="") as lines:
        return [
            {key: value if key in TEXTS else float(value) for key, value in row.items()}
            for row in csv.DictReader(lines)
        ]


def write(file: Path, figures: Sequence[Figures]) -> None:
    """Write figures into a CSV file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(figures[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(figures)


# --- updates of real training


def _llama(width: int, layers: int, **keys: Any) -> Callable[[int], nn.Module]:
    def model(vocabulary: int) -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
            num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), **keys,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    return model


def _qwen3(vocabulary: int) -> nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=vocabulary, hidden_size=512, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def _gpt2(vocabulary: int) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=vocabulary, n_embd=384, n_layer=4, n_head=6))


def _mixtral(vocabulary: int) -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def _bert(vocabulary: int) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=384, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=6,
        is_decoder=True,
    )  # fmt: skip
    return transformers.BertLMHeadModel(config)


def _lora(vocabulary: int) -> nn.Module:
    return get_peft_model(
        _qwen3(vocabulary),
        LoraConfig(r=64, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "Llama, 1024 wide": _llama(1024, 2),
    "Llama, 512 wide": _llama(512, 4),
    "Qwen3, 512 wide": _qwen3,
    "GPT-2, 384 wide": _gpt2,
    "Mixtral, 256 wide": _mixtral,
    "BERT as a decoder, 384 wide": _bert,
    "Qwen3 with LoRA of rank 64": _lora,
}


def updates_of(name: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Train a model, and yield the updates of its matrices at each stage."""
    torch.manual_seed(0)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(INPUT / "model")
    model = MODELS[name](len(tokenizer))
    texts = {EARLY: demo_text()[0], TUNED: new_text()[0]}
    blocks = {key: packed(text, tokenizer).view(-1)[: 2**19] for key, text in texts.items()}
    blocks = {key: ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH) for key, ids in blocks.items()}
    options = {"lora": "muon"} if "LoRA" in name else {}
    optimizer = build_optimizer(model, lr=5e-3, weight_decay=0.1, ns_dtype="fp32", **options)
    generator = torch.Generator().manual_seed(0)
    for stage in (EARLY, LATE, TUNED):
        if stage == TUNED:
            for group in optimizer.param_groups:
                group["lr"] = 2e-5
        ids = blocks[TUNED if stage == TUNED else EARLY]
        for _ in range(SCHEDULE[stage] - (SCHEDULE[EARLY] if stage == LATE else 0)):
            batch = ids[torch.randint(len(ids), (BATCH,), generator=generator)]
            model(input_ids=batch, labels=batch).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with Recorded() as recorded:
                optimizer.step()
            optimizer.zero_grad()
        yield stage, recorded.matrices


class Recorded:
    """Keeps the matrices that a step orthogonalizes, one of each stack of experts."""

    def __enter__(self) -> Recorded:
        self.matrices: dict[str, Tensor] = {}
        self._call = room.Orthogonalizer.__call__

        def recording(orthogonalizer: room.Orthogonalizer, matrices: Tensor, **way: Any) -> Tensor:
            for matrix in matrices:
                self.matrices[f"{'x'.join(map(str, matrix.shape))} number {len(self.matrices)}"] = matrix.clone()
            return self._call(orthogonalizer, matrices, **way)

        room.Orthogonalizer.__call__ = recording
        return self

    def __exit__(self, *_: object) -> None:
        room.Orthogonalizer.__call__ = self._call


# --- directions


class TensorCores(TorchDispatchMode):
    """Computes products of half precision as tensor cores do: exact products, sums in fp32, one rounding.

    Args:
        parts: in how many parts a sum is computed; each is rounded, and so is the sum of two.
    """

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if name not in ("aten::bmm", "aten::baddbmm") or args[0].dtype.itemsize > 2:
            return func(*args, **kwargs)
        dtype, out = args[0].dtype, kwargs.pop("out", None)
        size = -(-args[-1].shape[1] // self.parts)
        pieces = zip(args[-2].split(size, dim=2), args[-1].split(size, dim=1), strict=True)
        products = [torch.bmm(a.float(), b.float()) for a, b in pieces]
        total = products[0]
        for product in products[1:]:
            total = (total.to(dtype).float() + product.to(dtype).float()).to(dtype).float()
        if name == "aten::baddbmm":
            total = kwargs.get("beta", 1) * args[0].float() + kwargs.get("alpha", 1) * total
        return total.to(dtype) if out is None else out.copy_(total)


def measured(matrix: Tensor) -> Iterator[Figures]:
    """Yield, for each form, how the direction of an update ``(m, n)`` compares with float64's and with ``U V^T``."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s)
    inside = s >= SMALLEST_INPUT
    coefficients = resolve(PRESET, STEPS)
    values = s.clone()
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    exact, polar = (u * values) @ vh, u @ vh
    for form, (dtype, kind, parts) in FORMS.items():
        lengths = (1,) * STEPS if kind == "standard" else segments(matrix.shape, STEPS, torch.float32)
        if kind == "gram" and max(lengths) == 1:
            continue  # square, or small: the code takes the standard form
        size = min(matrix.shape)
        with TensorCores(parts):
            direction = room.newton_schulz(
                matrix[None], coefficients, dtype, lengths=lengths, rows=BlockRows(size, size)
            )[0]
        direction = direction.double()
        gains = (u.mT @ direction @ vh.mT).diagonal()
        yield {
            "form": form,
            "least": round(float(gains[inside].min()), 4),
            "largest": round(float(_largest(direction)), 4),
            "error": float(f"{_distance(direction, exact):.3g}"),
            "from polar": float(f"{_distance(direction, polar):.3g}"),
            "inside": round(float(inside.double().mean()), 3),
        }


def _largest(direction: Tensor) -> Tensor:
    """Return the largest singular value."""
    wide = direction if direction.shape[0] <= direction.shape[1] else direction.mT
    return torch.linalg.eigvalsh(wide @ wide.mT)[-1].sqrt()


def _distance(direction: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(direction - other) / torch.linalg.vector_norm(other))


# --- tables


def table(figures: Sequence[Figures], key: str) -> str:
    """Return a Markdown table: for each form the error, and how many matrices leave the band of the preset."""
    low, high = PRESETS[PRESET].singular_range
    lines = [f"| {key} | {' | '.join(FORMS)} |", "| --- " * (len(FORMS) + 1) + "|"]
    values = dict.fromkeys(row[key] for row in figures)
    for value in [*(sorted(values) if key == "short side" else values), "all"]:
        cells = []
        for form in FORMS:
            rows = [row for row in figures if row["form"] == form and value in (row[key], "all")]
            errors = [row["error"] for row in rows]
            beyond = [row for row in rows if not low - SLACK <= row["least"] <= row["largest"] <= high + SLACK]
            farthest = max((row["largest"] for row in beyond), default=0.0)
            out = f", up to {farthest:.3g}" if farthest > high else ""
            cells.append(f"{median(errors):.2g} ({max(errors):.2g}); {len(beyond)} of {len(rows)}{out}" if rows else "")
        lines.append(f"| {value} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
