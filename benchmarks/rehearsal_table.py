"""The table ``rehearsal.csv``: the steps that are rehearsed, their figures, and what of them README.md shows."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("rehearsal.csv")
README = Path(__file__).with_name("README.md")
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
        offload: what lies in the host's memory, in the words of the option.
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
    """What a step asks of an accelerator. Ranks differ in what they own: means, if not said otherwise.

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
    for moments in ("fp32", "bf16", "int8"):
        yield Case(momentum=moments, adamw=moments, offload="momentum_offload=cpu")
    yield Case(weights="fp32", offload="momentum_offload=cpu")
    yield Case(layout="FSDP2", ranks=8, offload="momentum_offload=cpu")
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
                    [f"{v:g}" if isinstance(v, float) else v for v in (*_values(case), *_values(table[case]))]
                )


def differences(case: Case, figures: Figures, expected: Figures | None) -> list[str]:
    """Say how figures differ from the table's."""
    if expected is None:
        return [f"{case}: not in the table"]
    pairs = zip(dataclasses.fields(Figures), _values(expected), _values(figures), strict=True)
    return [f"{field.name} of {case}: {old:g} -> {new:g}" for field, old, new in pairs if old != new]


ADVICE = "If this is meant, run python -m benchmarks.rehearsal --write, and commit the table with the change"


def _values(record: Any) -> tuple[Any, ...]:
    return dataclasses.astuple(record)


def _record(kind: Any, row: Mapping[str, str]) -> Any:
    """Return a row as a record; what an older table lacks is -1."""
    types = {"str": str, "int": int, "float": float}
    return kind(**{field.name: types[field.type](row.get(field.name, "-1")) for field in dataclasses.fields(kind)})


# --- README.md

_ENDS = "<!-- written by python -m benchmarks.rehearsal --write -->", "<!-- end of what it writes -->"


def _alone(case: Case) -> bool:
    return case.ranks == 1 and not case.offload and case.weights == "bf16" and case.momentum == case.adamw


def _shared(case: Case) -> bool:
    return case.ranks > 1 and case.model == QWEN and case.momentum == case.adamw == "fp32" and not case.offload


def _markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    cells = ([f"{cell:,g}" if isinstance(cell, (int, float)) else cell for cell in row] for row in rows)
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells)]


def readme_lines(table: Mapping[Case, Figures]) -> list[str]:
    """Return the tables of README.md: one process with bf16 weights, and ranks with fp32 moments."""
    alone = _markdown(
        [
            "one process, bf16 weights",
            "moments",
            "products",
            "launches",
            "of them products",
            "waits",
            "traffic",
            "peak MB",
        ],
        (
            (c.model, c.momentum, c.ns_dtype, f.most, f.products, f.waits, f.traffic, f.peak)
            for c, f in table.items()
            if _alone(c)
        ),
    )
    shared = _markdown(
        [
            "Qwen3-0.6B, fp32 moments",
            "weights",
            "launches",
            "most",
            "of them collectives",
            "waits",
            "traffic",
            "peak MB",
        ],
        (
            (
                f"{c.layout} on {c.ranks}",
                c.weights,
                f.launches,
                f.most,
                f.collectives,
                f.waits,
                f.traffic,
                f.peak,
            )
            for c, f in table.items()
            if _shared(c)
        ),
    )
    return [*alone, "", *shared]


def readme_with(text: str, lines: Sequence[str]) -> str:
    """Return the text of README.md with these lines in the place that is written."""
    head, rest = text.split(_ENDS[0] + "\n")
    return "\n".join([head + _ENDS[0], "", *lines, "", _ENDS[1] + rest.split(_ENDS[1])[1]])
