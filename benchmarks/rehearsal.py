"""Rehearse optimizer steps without an accelerator: what each asks of one, in the table ``rehearsal.csv``.

    python -m benchmarks.rehearsal                    # compare with the table
    python -m benchmarks.rehearsal --write            # write it
    python -m benchmarks.rehearsal --only FSDP2 int8  # rows whose names have these texts
    python -m benchmarks.rehearsal --host             # the host's time, which the table does not have

Figures are counted on the meta device, not measured, and nothing is sent: see `tests.support.count` and
`tests.support.fake_layouts`. A test asserts the table, so that a change that costs launches shows as a difference.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_muon import build_optimizer
from hf_muon.diagnostics import log
from hf_muon.storage.tensors import local_of
from tests.support.accelerated import META, as_accelerator
from tests.support.count import Count, counting
from tests.support.fake_layouts import DTYPES, mesh_of, meta_model, rank_of, shard_, zero_step
from tests.support.live_bytes import LiveBytes

MOST_RANKS = 4  # counted of each case, evenly spaced
TABLE = Path(__file__).with_name("rehearsal.csv")
QWEN, EXPERTS, LLAMA, SMALL, LORA = (
    *("Qwen3-0.6B", "Qwen3-30B-A3B, 2 layers", "Llama-3.1-8B, 4 layers"),
    *("Qwen3-0.6B, 2 layers", "Qwen3-0.6B, LoRA 16"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to rehearse: a row of the table.

    Attributes:
        model: one of `fake_layouts.MODELS`.
        layout: how ranks store it.
        ranks: their number.
        weights: their dtype; ZeRO steps fp32 copies of them.
        momentum: `momentum_dtype`.
        adamw: `adamw_state_dtype`.
        ns_dtype: of the products.
        offload: the option that keeps tensors in the host's memory; empty without one.
    """

    model: str = QWEN
    layout: str = "one process"
    ranks: int = 1
    weights: str = "bf16"
    momentum: str = "fp32"
    adamw: str = "fp32"
    ns_dtype: str = "bf16"
    offload: str = ""

    def __str__(self) -> str:
        where = self.layout if self.ranks == 1 else f"{self.layout} on {self.ranks}"
        moments = self.momentum if self.momentum == self.adamw else f"{self.momentum} and {self.adamw}"
        text = f"{self.model}, {where}, {self.weights} weights, {moments} moments, {self.ns_dtype} products"
        return f"{text}, {self.offload}" if self.offload else text


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a step asks of an accelerator: means over ranks, unless the attribute says otherwise.

    Attributes:
        launches: on a rank.
        most: launches on the rank with most.
        products: of the launches, matrix products.
        collectives: of the launches, on the rank with most.
        waits: of the host for the device, on the rank with most.
        traffic: elementwise, in bytes for each weight that a rank stores.
        host: bytes copied between both memories, for each weight that a rank stores.
        peak: temporary memory of the device in MB, on the rank with most.
    """

    launches: float
    most: int
    products: float
    collectives: int
    waits: int
    traffic: float
    host: float
    peak: float


def _cases() -> Iterator[Case]:
    for model, weights, moments in itertools.product(
        (QWEN, EXPERTS, LLAMA), ("bf16", "fp32"), ("fp32", "bf16", "int8")
    ):
        yield Case(model, weights=weights, momentum=moments, adamw=moments)
    yield Case(momentum="int8")
    yield from (Case(model, ns_dtype="fp16") for model in (QWEN, EXPERTS, LLAMA))
    for layout, ranks in (("DDP", (2, 8, 64)), ("FSDP2", (2, 8, 64)), ("HSDP", (8, 64)), ("TP", (2, 8))):
        yield from (Case(layout=layout, ranks=count) for count in ranks)
    yield from (Case(layout="FSDP2 and TP", ranks=ranks) for ranks in (8, 64))
    for stage, ranks in itertools.product(("ZeRO-1 or 2", "ZeRO-3"), (2, 8, 64)):
        yield Case(layout=stage, ranks=ranks, weights="fp32")
    for moments in ("bf16", "int8"):
        yield from (Case(layout=layout, ranks=8, momentum=moments, adamw=moments) for layout in ("DDP", "FSDP2"))
    yield Case(layout="FSDP2", ranks=8, weights="fp32")
    yield Case(layout="ZeRO-3", ranks=8, weights="fp32", momentum="bf16", adamw="bf16")
    yield from (Case(EXPERTS, layout, 8) for layout in ("DDP", "FSDP2", "TP"))
    yield Case(EXPERTS, "ZeRO-3", 8, "fp32")
    yield Case(LORA)
    yield from (Case(LORA, layout, 8) for layout in ("DDP", "FSDP2"))
    yield Case(SMALL, layout="FSDP2", ranks=8, offload="CPUOffloadPolicy")
    yield Case(SMALL, layout="ZeRO-3", ranks=8, weights="fp32", offload="offload_optimizer")


CASES = list(_cases())


def read_table() -> dict[Case, Figures]:
    """Return the committed table."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {_record(Case, row): _record(Figures, row) for row in rows}


def write_table(table: Mapping[Case, Figures]) -> None:
    """Write the table, in the order of `CASES`."""
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for kind in (Case, Figures) for field in dataclasses.fields(kind)])
        for case in CASES:
            if case in table:
                writer.writerow(
                    [
                        f"{v:g}" if isinstance(v, float) else v
                        for v in (*dataclasses.astuple(case), *dataclasses.astuple(table[case]))
                    ]
                )


def differences(case: Case, figures: Figures, expected: Figures | None) -> list[str]:
    """Return a line for each figure that differs from the table's."""
    if expected is None:
        return [f"{case}: not in the table"]
    pairs = zip(dataclasses.fields(Figures), dataclasses.astuple(expected), dataclasses.astuple(figures), strict=True)
    return [f"{field.name} of {case}: {old:g} -> {new:g}" for field, old, new in pairs if old != new]


ADVICE = "If this is meant, run python -m benchmarks.rehearsal --write, and commit the table with the change"


def _record(kind: Any, row: Mapping[str, str]) -> Any:
    """Return the columns of a row that a dataclass has, as an instance of it."""
    types = {"str": str, "int": int, "float": float}
    return kind(**{field.name: types[field.type](row[field.name]) for field in dataclasses.fields(kind)})


# --- counting


def options_of(case: Case) -> dict[str, Any]:
    """Return the options of `build_optimizer`."""
    return {
        "lr": 1e-3,
        "ns_dtype": case.ns_dtype,
        "momentum_dtype": case.momentum,
        "adamw_state_dtype": case.adamw,
        **({"comm_dtype": "bf16"} if case.ranks > 1 else {}),
        **({"lora": "muon"} if case.model == LORA else {}),
    }


def step_of(case: Case, model: nn.Module) -> Callable[[], Any]:
    """Return the step of a case on this rank. Replaces the parameters of the model by those that the rank stores."""
    device = torch.device("cpu") if case.offload else META
    if case.layout.startswith("ZeRO"):
        return zero_step(model, options_of(case), 3 if case.layout == "ZeRO-3" else 2, device)
    if case.layout not in ("one process", "DDP"):
        shard_(model, case.layout, mesh_of(case.layout, case.ranks), device)
    group = dist.group.WORLD if case.layout == "DDP" else None
    return build_optimizer(model, options_of(case), replicate_group=group).step  # type: ignore[no-any-return]


def rehearse_rank(case: Case, rank: int) -> tuple[Count, int, float]:
    """Return what the second step of a rank asks of its device, its peak memory, and the number of its weights."""
    with rank_of(case.ranks, rank), as_accelerator():
        model = meta_model(case.model, DTYPES[case.weights])
        total = sum(param.numel() for param in model.parameters() if param.requires_grad)
        step = step_of(case, model)
        with counting():  # answers reads of values
            step()
        with LiveBytes("meta") as live, counting() as count, as_accelerator(count):
            step()
        local = sum(local_of(param).numel() for param in model.parameters() if param.requires_grad)
    return count, live.peak, total / case.ranks if case.layout.startswith("ZeRO") else local


def ranks_of(case: Case) -> range:
    """Return the ranks that are counted."""
    return range(0, case.ranks, max(1, case.ranks // MOST_RANKS))


def rehearse(case: Case) -> Figures:
    """Return the figures of a case."""
    counts, peaks, numels = zip(*(rehearse_rank(case, rank) for rank in ranks_of(case)), strict=True)
    launches = [count.launches.total() for count in counts]
    return Figures(
        launches=round(fmean(launches), 1),
        most=max(launches),
        products=round(fmean(count.products for count in counts), 1),
        collectives=max(count.collectives for count in counts),
        waits=max(count.waits.total() for count in counts),
        traffic=round(sum(count.traffic.total() for count in counts) / sum(numels), 1),
        host=round(sum(count.host_bytes for count in counts) / sum(numels), 1),
        peak=round(max(peaks) / 1e6, 1),
    )


def host_ms(case: Case) -> float:
    """Measure the processor time of the host in a step, in milliseconds, the median of ranks; without reads."""
    seconds = []
    for rank in ranks_of(case):
        with rank_of(case.ranks, rank, reads=False), as_accelerator(reads=False):
            step = step_of(case, meta_model(case.model, DTYPES[case.weights]))
            step()
            step()
            begin = time.process_time()
            step()
            seconds.append(time.process_time() - begin)
    return 1e3 * median(seconds)


def main() -> None:
    """Print the figures with what differs from the table, or write the table."""
    log.logger().setLevel("ERROR")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--write", action="store_true", help="write rehearsal.csv")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose names have all of these")
    parser.add_argument("--host", action="store_true", help="measure the host's time, too")
    parser.add_argument("--names", action="store_true", help="print what rank 0 launches and waits for, by name")
    arguments = parser.parse_args()
    table = read_table()
    for case in CASES:
        if not all(text in str(case) for text in arguments.only):
            continue
        figures = rehearse(case)
        host = f", host {host_ms(case):.0f} ms" if arguments.host and not case.offload else ""
        print(f"{case}: {', '.join(f'{k} {v:g}' for k, v in dataclasses.asdict(figures).items())}{host}", flush=True)
        if arguments.names:
            count, *_ = rehearse_rank(case, 0)
            waits = [f"wait: {name} {number}" for name, number in count.waits.items()]
            print("  " + ", ".join([*(f"{name} {number}" for name, number in count.launches.items()), *waits]))
        for line in differences(case, figures, table.get(case)):
            print(f"  {line}")
        table[case] = figures
    if arguments.write:
        write_table(table)


if __name__ == "__main__":
    main()
