"""Compute which options fit a model on a GPU, and write the tables of docs/what-fits.md.

    python benchmarks/what_fits.py             # print the tables
    python benchmarks/what_fits.py --write     # write them into the page

All numbers are those of `hf-muon plan`; nothing is measured here.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_muon import MuonConfig
from hf_muon.cli.model_source import model_from
from hf_muon.plan.memory import Memory, Training
from hf_muon.plan.step_plan import plan_step

PAGE = Path(__file__).parent.parent / "docs" / "what-fits.md"
MODELS = {
    "qwen3-0.6b": "0.6B",
    "qwen3-1.7b": "1.7B",
    "qwen3-4b": "4B",
    "qwen3-8b": "8B",
    "qwen3-14b": "14B",
    "qwen3-32b": "32B",
    "qwen3-30b-a3b": "30B-A3B",
}
GPUS = (16, 24, 40, 80)
LAYOUTS = {"single": 1, "fsdp": 8}
TOKENS = 2048
# Bytes per second in each direction of PCIe 4.0 x16 with pinned memory: 31.5e9 less what its protocol takes.
BUS = 25e9
LORA_RANK = 16
# bitsandbytes: 8 bits for each moment and an fp32 number for every 256; Trainer keeps embeddings in fp32.
BLOCK, SMALLEST = 256, 4096


@dataclass(frozen=True)
class Setting:
    """Options of a run, from those that change nothing to those that save most.

    Attributes:
        options: of Muon.
        dtype: of the weights.
        checkpointing: whether layers are recomputed.
        offload: as of `Training`.
    """

    options: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    checkpointing: bool = True
    offload: str = "none"


_HALF = {"momentum_dtype": "bf16", "adamw_state_dtype": "bf16"}
_INT8 = {"momentum_dtype": "int8", "adamw_state_dtype": "int8"}
_OFFLOAD = {"momentum_offload": "cpu"}
SETTINGS = {
    "A": Setting({}, torch.float32, checkpointing=False),
    "B": Setting({}, torch.float32),
    "C": Setting(_OFFLOAD, torch.float32),
    "D": Setting({}),
    "E": Setting(_HALF),
    "F": Setting(_INT8),
    "G": Setting(_OFFLOAD),
    "H": Setting({}, torch.float32, offload="params"),
}


@functools.lru_cache(maxsize=1)
def model_of(name: str) -> nn.Module:
    """Return a model on the meta device."""
    return model_from(name)


@functools.cache
def memory_of(name: str, key: str, layout: str) -> tuple[Memory, Memory]:
    """Return the memory of a run with Muon in one of the settings, and with torch's AdamW."""
    setting = SETTINGS[key]
    training = Training(1, TOKENS, setting.checkpointing, offload=setting.offload)
    config = MuonConfig.from_mapping(setting.options)
    plan = plan_step(model_of(name), config, layout, LAYOUTS[layout], dtype=setting.dtype, training=training)
    return _complete(plan.memory), _complete(plan.adamw_memory)


def _complete(memory: Memory) -> Memory:
    """Return a memory that has an estimate of activations."""
    assert not memory.unknown, memory.unknown
    return memory


def settings_of(layout: str) -> list[str]:
    """Return the settings that a layout has: parameters are offloaded under FSDP2 alone."""
    return [key for key, own in SETTINGS.items() if own.offload == "none" or layout == "fsdp"]


def adamw_8bit(name: str, layout: str) -> Memory:
    """Return the memory of bitsandbytes' AdamW in 8 bits on bf16 weights, checkpointed."""
    model = model_of(name)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    nbytes = 0
    for param in model.parameters():
        small = param.numel() < SMALLEST or id(param) in embeddings
        nbytes += param.numel() * 8 if small else 2 * (param.numel() + 4 * math.ceil(param.numel() / BLOCK))
    ranks = LAYOUTS[layout]
    plain = memory_of(name, "D", layout)[1]
    return replace(plain, state=[nbytes // ranks] * ranks)


@functools.cache
def lora(name: str, layout: str) -> Memory:
    """Return the memory of AdamW on LoRA factors in fp32, of all linear layers, frozen weights in bf16.

    Experts, which are no linear layers, have none.
    """
    from peft import LoraConfig, get_peft_model

    base = model_from(name)
    inside = {name for name, m in base.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    targets = sorted({name.rpartition(".")[2] for name in inside})
    with torch.device("meta"):
        model = get_peft_model(base, LoraConfig(r=LORA_RANK, target_modules=targets))
    training = Training(1, TOKENS, gradient_checkpointing=True)
    plan = plan_step(model, MuonConfig(lora="muon"), layout, LAYOUTS[layout], training=training)
    return _complete(plan.adamw_memory)


# --- tables


def answers(names: Sequence[str], layout: str) -> list[str]:
    """Return a table of the first setting that fits, for each model and GPU."""
    lines = _head(["model", *(f"{memory} GB" for memory in GPUS)])
    for name in names:
        peaks = {key: memory_of(name, key, layout)[0] for key in settings_of(layout)}
        cells = []
        for memory in GPUS:
            fitting = (f"**{key}** {_gb(own.peak)}" for key, own in peaks.items() if own.fits(memory * 1e9))
            small = f"LoRA {_gb(of_lora.peak)}" if (of_lora := lora(name, layout)).fits(memory * 1e9) else "no"
            cells.append(next(fitting, small))
        lines.append(_row([MODELS[name], *cells]))
    return lines


def peaks(names: Sequence[str], layout: str) -> list[str]:
    """Return a table of the peak of each setting, beside AdamW and LoRA."""
    others: dict[str, Callable[[str], Memory]] = {
        "AdamW, fp32 weights": lambda name: memory_of(name, "B", layout)[1],
        "AdamW, bf16 weights": lambda name: memory_of(name, "D", layout)[1],
        "AdamW, bf16 weights, 8 bits": lambda name: adamw_8bit(name, layout),
        f"LoRA, rank {LORA_RANK}": lambda name: lora(name, layout),
    }
    keys = settings_of(layout)
    lines = _head(["GB", *keys, *others])
    for name in names:
        muon = [memory_of(name, key, layout)[0].peak for key in keys]
        lines.append(_row([MODELS[name], *map(_gb, [*muon, *(of(name).peak for of in others.values())])]))
    return lines


def parts(names: Sequence[str], layout: str) -> list[str]:
    """Return a table of what a peak consists of."""
    lines = _head(
        ["GB", "weights, fp32 / bf16", "state, fp32 / bf16 / int8", "activations, A / B / D", "step, D"]
        + ["gathered"] * (layout == "fsdp")
    )
    for name in names:
        runs = {key: memory_of(name, key, layout)[0] for key in "ABDEF"}
        cells = [
            _several([max(runs[key].weights) for key in "BD"]),
            _several([max(runs[key].state) for key in "DEF"]),
            _several([runs[key].activations for key in "ABD"]),
            _gb(runs["D"].step),
        ] + [_gb(runs["D"].copies)] * (layout == "fsdp")
        lines.append(_row([MODELS[name], *cells]))
    return lines


def bus(names: Sequence[str]) -> list[str]:
    """Return a table of what offloading moves in a step, and the seconds of the slower direction on a bus."""
    runs = {"G, one GPU": ("G", "single"), "G, each of eight": ("G", "fsdp"), "H, each of eight": ("H", "fsdp")}
    lines = _head(["", *(f"{run}: host, bus, seconds" for run in runs)])
    for name in names:
        cells = []
        for key, layout in runs.values():
            memory, _ = memory_of(name, key, layout)
            there, back = max(memory.to_device), max(memory.to_host)
            cells.append(f"{_gb(max(memory.host))}, {_gb(there)} + {_gb(back)}, {max(there, back) / BUS:.2f}")
        lines.append(_row([MODELS[name], *cells]))
    return lines


def tables(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the tables of the page, by the names of their places in it."""
    return {
        "one GPU": answers(names, "single"),
        "eight GPUs": answers(names, "fsdp"),
        "peaks on one GPU": peaks(names, "single"),
        "peaks on eight GPUs": peaks(names, "fsdp"),
        "parts on one GPU": parts(names, "single"),
        "parts on eight GPUs": parts(names, "fsdp"),
        "bus": bus(names),
    }


def _head(cells: Sequence[str]) -> list[str]:
    return [_row(cells), _row(["---"] * len(cells))]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f}"


def _several(values: Sequence[float]) -> str:
    return " / ".join(map(_gb, values))


def written(page: str, name: str) -> list[str]:
    """Return the lines of a table in the page."""
    match = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    if match is None:
        raise ValueError(f"{PAGE.name} has no place for the table {name!r}")
    return match[1].splitlines()


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write them into docs/what-fits.md")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    if arguments.write and arguments.models != list(MODELS):
        parser.error("--write needs all models")
    for name, lines in tables(arguments.models).items():
        if not arguments.write:
            print(f"{name}\n\n" + "\n".join(lines) + "\n")
            continue
        page = PAGE.read_text(encoding="utf-8")
        old = "\n".join([*written(page, name), ""])
        place = f"<!-- {name} -->\n"
        page = page.replace(place + old, place + "\n".join([*lines, ""]))
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
