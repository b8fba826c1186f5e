"""Compare embeddings of rare tokens after training with AdamW's moments in int8 and in fp32, row by row.

OMP_NUM_THREADS=1 python benchmarks/rare_tokens.py --out benchmarks/rare_tokens.json

The training is that of `bf16_training.py` from random weights; *untied* is the same model with a head of its own, where
a row of the embedding has a gradient only in steps that have its token. Two comparisons:

*Same gradients*: the fp32 run steps a second embedding with moments in int8, with its own gradients. What differs is
rounding alone. Beside it a third one with moments in fp32, whose gradients are rounded to bf16.

*Own run*: whole runs from the same seed, whose weights diverge. Beside it an fp32 run that starts from weights rounded
to bf16, and an int8 run with other draws.

Finished runs are kept in build/rare_tokens/, so that an interrupted benchmark continues.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from bf16_training import FP32, INT8_MOMENTS, SCRATCH, SEEDS, Bench, train
from meters import machine
from prepare import ROOT
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from hf_muon import Muon
from hf_muon.math.moments import BLOCK

RUNS = ROOT / "build" / "rare_tokens"
MODELS = {"tied": True, "untied": False}
START, DRAWS = "fp32, from weights rounded to bf16", "int8, other draws"
SIDES = {"fp32": FP32, "int8": INT8_MOMENTS, START: FP32, DRAWS: INT8_MOMENTS}
GRADS = "fp32, gradients rounded to bf16"
TWINS: dict[str, dict[str, Any]] = {"int8": {"adamw_state_dtype": "int8"}, GRADS: {}}
GROUPS = {"never": (0, 0), "1": (1, 1), "2-3": (2, 3), "4-10": (4, 10), "11-100": (11, 100), "more": (101, 2**31)}
FRACTIONS = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
WORST = 12
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "rare_tokens.json", help="the JSON file")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS[:2])
    out, seeds = parser.parse_args().out, parser.parse_args().seeds
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    bench = Bench(ROOT / "build" / "bf16_training.json")
    results = [
        {"model": model, "seed": seed, **compared(bench, model, seed)} for seed in seeds for model in reversed(MODELS)
    ]
    report = {"machine": machine(transformers=transformers.__version__), "results": results}
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(*(tables(results, model) for model in MODELS), sep="\n\n")


class Twins:
    """Embeddings that are stepped with the gradients of a run, and do not take part in it."""

    def __init__(self, embedding: nn.Parameter) -> None:
        self.embedding = embedding
        self.params = {name: nn.Parameter(embedding.detach().clone()) for name in TWINS}
        self.optimizers: dict[str, Muon] = {}
        self.steps = torch.zeros(len(embedding), dtype=torch.long)
        self.least = torch.ones_like(embedding.data)

    def __call__(self, optimizer: Muon) -> None:
        """Step them, before the run steps its own embedding."""
        (group,) = (g for g in optimizer.param_groups if any(p is self.embedding for p in g["params"]))
        grad = self.embedding.grad
        assert grad is not None
        self.steps += grad.any(dim=1)
        blocks = grad.abs().view(len(grad), -1, BLOCK)
        fractions = (blocks / blocks.amax(dim=-1, keepdim=True)).view_as(grad)
        self.least = self.least.minimum(fractions.where(grad != 0, 1.0))
        for name, param in self.params.items():
            if name not in self.optimizers:
                options = {key: group[key] for key in ("adamw_betas", "adamw_eps", "weight_decay")}
                self.optimizers[name] = Muon([{"params": [param], "use_muon": False, **options, **TWINS[name]}])
            self.optimizers[name].param_groups[0]["lr"] = group["lr"]
            param.grad = grad.bfloat16().float() if name == GRADS else grad.clone()
            self.optimizers[name].step()

    def result(self) -> dict[str, Any]:
        """Return the twins, the steps with a gradient of each row, and each element's least fraction of its block."""
        twins = {name: param.detach() for name, param in self.params.items()}
        return {"twins": twins, "steps": self.steps, "least": self.least}


def other_draws(optimizer: Muon) -> None:
    """Count a thousand steps more than the run has taken: they seed the rounding."""
    for group in optimizer.param_groups:
        group["step"] += 1000 if group["step"] == 1 else 0


def run(bench: Bench, model_name: str, side: str, seed: int) -> dict[str, Any]:
    """Return the embedding before and after a run, and the loss of each held-out position; train if necessary."""
    path = RUNS / f"{model_name}, {side}, {seed}.pt"
    if path.is_file():
        return dict(torch.load(path))
    model = bench.start(SCRATCH, seed, tied=MODELS[model_name])
    if side == START:
        for param in model.parameters():
            param.data = param.data.bfloat16().float()
    start = model.model.embed_tokens.weight.detach().clone()
    twins = Twins(model.model.embed_tokens.weight)

    def before_step(optimizer: Muon) -> None:
        if side == "fp32":
            twins(optimizer)
        elif side == DRAWS:
            other_draws(optimizer)

    train(model, SIDES[side], bench.demo, bench.batches(SCRATCH, seed, bench.demo), before_step)
    result = {"start": start, "end": model.model.embed_tokens.weight.detach(), "losses": losses(bench, model)}
    result |= twins.result() if side == "fp32" else {}
    RUNS.mkdir(parents=True, exist_ok=True)
    torch.save(result, path)
    return result


@torch.no_grad()
def losses(bench: Bench, model: nn.Module) -> Tensor:
    """Return the loss of each held-out position that has a token before it, ``(blocks, context - 1)``."""
    return torch.cat(
        [
            F.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
            for ids in bench.blocks[SCRATCH][1].split(8)
        ]
    )


def compared(bench: Bench, model_name: str, seed: int) -> Figures:
    """Compare the rows of a seed, by group of tokens, and list the worst ones."""
    runs = {side: run(bench, model_name, side, seed) for side in SIDES}
    exact = runs["fp32"]
    ids = torch.cat(bench.batches(SCRATCH, seed, bench.demo)).flatten()
    counts = torch.bincount(ids, minlength=len(exact["start"]))
    held_out = bench.blocks[SCRATCH][1]
    movements = {f"same gradients: {name}": twin - exact["start"] for name, twin in exact["twins"].items()}
    movements |= {f"own run: {side}": run["end"] - run["start"] for side, run in runs.items() if side != "fp32"}
    rows = {name: row_figures(exact["end"] - exact["start"], other) for name, other in movements.items()}
    groups: dict[str, Figures] = {}
    for group, (low, high) in GROUPS.items():
        members = (counts >= low) & (counts <= high)
        groups[group] = {"tokens": int(members.sum()), "moved": float(norms(exact)[members].median())}
        for name, figures in rows.items():
            off, cosine, along = (figures[key][members] for key in ("off", "cosine", "along"))
            weights = norms(exact)[members].square()
            groups[group][name] = {
                "off": float(off.median()),
                "99 %": float(off.quantile(0.99)),
                "worst": float(off.max()),
                "cosine": float(cosine.median()),
                "least cosine": float(cosine.min()),
                "along": float((along * weights).sum() / weights.sum()),
            }
        for where, tokens in (("input", held_out[:, :-1]), ("target", held_out[:, 1:])):
            positions = members[tokens]
            loss = {side: float(runs[side]["losses"][positions].sum()) for side in SIDES}
            groups[group][f"held-out loss by {where}"] = {"positions": int(positions.sum()), **loss}
    worst = rows["same gradients: int8"]["off"].topk(WORST).indices.tolist()
    one_by_one = [one_row(exact, rows, counts, row) for row in worst]
    return {"groups": groups, "elements": by_fraction(exact, counts), "worst rows": one_by_one}


def norms(exact: Figures) -> Tensor:
    norm: Tensor = (exact["end"] - exact["start"]).norm(dim=1)
    return norm


def row_figures(exact: Tensor, other: Tensor) -> dict[str, Tensor]:
    """Return how far each row's movement is from the exact one, as a fraction of that; their cosine; how far along."""
    figures = {
        "off": (exact - other).norm(dim=1) / exact.norm(dim=1),
        "cosine": F.cosine_similarity(exact, other),
        "along": (exact * other).sum(dim=1) / exact.square().sum(dim=1),
    }
    same = (exact == other).all(dim=1)
    return {name: values.where(~same, float(name != "off")) for name, values in figures.items()}


def one_row(exact: Figures, rows: dict[str, dict[str, Tensor]], counts: Tensor, row: int) -> Figures:
    """Return how far a row is off, and which of its elements is off most with the same gradients in int8."""
    figures: Figures = {"token": row, "count": int(counts[row]), "steps with a gradient": int(exact["steps"][row])}
    figures |= {name: float(of_side["off"][row]) for name, of_side in rows.items()}
    figures["moved"] = float(norms(exact)[row])
    difference = exact["twins"]["int8"][row] - exact["end"][row]
    element = int(difference.abs().argmax())
    figures["worst element"] = {
        "moved": float((exact["end"] - exact["start"])[row, element]),
        "off by": float(difference[element]),
        "share of the row's square": float((difference[element] / difference.norm()).square()),
        "least gradient, of its block's largest": float(exact["least"][row, element]),
    }
    return figures


def by_fraction(exact: Figures, counts: Tensor) -> list[Figures]:
    """Return how far elements are off with the same gradients, by the least gradient that they had in their block."""
    difference, movement = exact["twins"]["int8"] - exact["end"], exact["end"] - exact["start"]
    results = []
    for low, high in itertools.pairwise(FRACTIONS):
        members = (exact["least"] > low) & (exact["least"] <= high) & (counts > 0).unsqueeze(1)
        off = difference[members].norm() / movement[members].norm()
        results.append({"least gradient": [low, high], "elements": int(members.sum()), "off": float(off)})
    return results


def tables(results: list[Figures], model: str) -> str:
    """Return the comparison as Markdown tables: rows with the same gradients, rows of own runs, and held-out losses."""
    of_model = [result["groups"] for result in results if result["model"] == model]
    return "\n\n".join(
        [
            *(rows_table(of_model, f"{model}, {kind}", kind) for kind in ("same gradients", "own run")),
            *(loss_table(of_model, f"{model}, loss by {where}", where) for where in ("input", "target")),
        ]
    )


def rows_table(of_seeds: list[dict[str, Figures]], title: str, kind: str) -> str:
    """Return a table of how far rows are off."""
    names = [name for name in of_seeds[0]["1"] if name.startswith(f"{kind}: ")]
    sides = [name.removeprefix(f"{kind}: ") for name in names]
    lines = [[title, "tokens", "moved", *(f"{side}: median (worst), least cosine, along" for side in sides)]]
    for group in GROUPS:
        own = [groups[group] for groups in of_seeds]
        cells = [group, f"{fmean(g['tokens'] for g in own):.0f}", f"{fmean(g['moved'] for g in own):.3f}"]
        for name in names:
            median, along = (fmean(g[name][key] for g in own) for key in ("off", "along"))
            worst, cosine = max(g[name]["worst"] for g in own), min(g[name]["least cosine"] for g in own)
            cells.append(f"{median:.2g} ({worst:.2g}), {cosine:.4f}, {along:.4f}")
        lines.append(cells)
    return markdown(lines)


def loss_table(of_seeds: list[dict[str, Figures]], title: str, where: str) -> str:
    """Return a table of held-out losses in fp32, and of the differences to them."""
    others = [side for side in SIDES if side != "fp32"]
    lines = [[title, "positions", "fp32", *others]]
    for group in GROUPS:
        sums = [groups[group][f"held-out loss by {where}"] for groups in of_seeds]
        positions = sum(part["positions"] for part in sums)
        mean = {side: sum(part[side] for part in sums) / max(1, positions) for side in SIDES}
        differences = [f"{mean[side] - mean['fp32']:+.3f}" for side in others]
        lines.append([group, str(positions), f"{mean['fp32']:.3f}", *differences])
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    """Return cells as a Markdown table, of which the first line is the head."""
    head, *body = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, "| --- " * len(lines[0]) + "|", *body])


if __name__ == "__main__":
    main()
