"""Cells: what is trained, how it is stepped and where it is stored; arrays in which all pairs of values meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.rules.settings import TOGETHER, TRIPLES

# Shapes that no number of ranks divides, fewer rows than ranks, and stacks of experts.
MATRICES = [(7, 5), (10, 16), (3, 7, 5), (10, 16), (1, 9), (2, 3), (16, 10), (5, 6, 4), (7, 5)]
# Fused, interleaved, transposed and folded weights and stacks, whose sizes no number of ranks divides.
VIEWS = [
    ((16, 5), "rows 7+4+5"),
    ((12, 7), "rows 3*(2+1+1)"),
    ((7, 10), "transposed, columns 5*(1+1)"),
    ((5, 14), "transposed, columns 6+8"),
    ((3, 8, 5), "rows 4+4"),
    ((3, 5, 8), "transposed, columns 4*(1+1)"),
    ((6, 5, 3), "flat"),
    ((8, 3, 2, 2), "flat, rows 2x4"),
    ((4, 3, 5), "transposed, flat"),
    ((11, 6), "rows 2x(3+1)+3"),
    ((8, 5), ""),
    ((13, 7), "columns 3*(1+1)+1"),
]
# Rows of several blocks of 8-bit moments, of a single block, and too short for a block.
WIDE = [
    ((7, 130), ""),
    ((3, 5, 70), "rows 2+3"),
    ((9, 64), "rows 3*(2+1)"),
    ((6, 150), "transposed, columns 75*(1+1)"),
    ((8, 20), ""),
    ((6, 8), ""),
    ((5, 2, 33), "flat"),
    ((7, 130), ""),
    ((2, 4, 66), "transposed"),
]
# Columns that two ranks cut where a block of 8 bits ends.
ALIGNED = [((6, 128), ""), ((3, 5, 256), ""), ((9, 128), "rows 4+5")]
# Large and wide enough for the Gram form.
LARGE = [((65, 130), ""), ((130, 65), ""), ((3, 65, 130), ""), ((66, 101), "")]
# Stacks and matrices of one shape that share batches.
SHARED = [((14, 3, 13), ""), ((17, 3, 13), ""), ((3, 13), ""), ((6, 13), "rows 3+3"), ((9, 3, 13), "")]
# Stepped by AdamW: vectors, and tables as embeddings are.
VECTORS = [(9,), (3,), (11, 4)]
TABLES = {"wide": [(9, 150), (3, 64), (40, 8)], "aligned": [(9, 128), (5, 256)]}
MODELS = {
    "small": [*((shape, "") for shape in MATRICES), *VIEWS, *SHARED],
    "wide": [*WIDE, *LARGE],
    "aligned": ALIGNED,
    "routed": [],  # a model that hf_muon routes itself, as a plan does
}

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "normuon": {"normalize": "rows"},
    "cautious": {"weight_decay_mode": "cautious"},
    "warmup": {"momentum_warmup": 2},
    "original": {"nesterov": False, "adjust_lr_fn": "original", "ns_coefficients": "original"},
    "unclamped": {"adjust_lr_fn": "spectral_unclamped", "ns_coefficients": TRIPLES},
    "nearest": {"weight_rounding": "nearest"},
    "scaled": {"scaled": True, "scheduled": True},
    "together": {"scaled": True, "scheduled": True, "update_rms": 0.3, "ns_coefficients": TRIPLES, **TOGETHER},
    "watched": {"diagnostics_every": 1},
    "others": {"their_everything": True, "bimaxwell": 2, "balance": "updates"},
    "balanced": {"balance": "updates"},
    "sinkhorn": {"sinkhorn": True},
    "travels": {"comm_dtype": "bf16"},
}
"""Options by name. `scaled` gives parameters learning rates of their own, and `scheduled` every step another one."""

SAVED, LAST = 2, 4
"""A cell saves after so many steps, and ends after so many."""


@dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        place: of `layouts.PLACES`, with a number of ranks: "fsdp-2".
        model: of `MODELS`.
        dtype: of weights.
        grad_dtype: of gradients; "" for that of weights.
        momentum: `momentum_dtype`.
        adamw: `adamw_state_dtype`.
        rule: of `RULES`.
        batch: `max_batch_bytes`; 0 for the default.
        missing: whether some parameters have no gradient in some steps.
        numbers: "cpu"; "gpu": batches and elementwise functions are those of a GPU, on the CPU; on a stand-in for an
            accelerator: "device"; "nccl", which communicates from there alone; "host", which computes there and stores
            parameters on the host, as with FSDP2's CPUOffloadPolicy.
        form: of the checkpoint: "sharded", "flat" (flattened keys), or "full" (whole tensors in one file).
        then: the place in which the saved state goes on; "" for none.
        fault: of `layouts.FAULTS`, on one rank before the last step; "" for none.
    """

    place: str = "single-1"
    model: str = "small"
    dtype: str = "float32"
    grad_dtype: str = ""
    momentum: str = "auto"
    adamw: str = "auto"
    rule: str = "plain"
    batch: int = 0
    missing: bool = False
    numbers: str = "cpu"
    form: str = "sharded"
    then: str = ""
    fault: str = ""

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._changed()) or "place=single-1"

    def _changed(self) -> Iterator[tuple[str, Any]]:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) != field.default:
                yield field.name, value

    @classmethod
    def of(cls, text: str) -> Cell:
        """Return the cell of a text, as `str` writes it."""
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        pairs = (word.split("=", 1) for word in text.split())
        return cls(**{name: eval(value) if kinds[name] in (int, bool) else value for name, value in pairs})

    @property
    def layout(self) -> str:
        return self.place.rpartition("-")[0]

    @property
    def ranks(self) -> int:
        return int(self.place.rpartition("-")[2])

    def at(self, place: str) -> Cell:
        """Return the same run in another place, without what a place alone has."""
        return dataclasses.replace(self, place=place, then="", fault="", form="sharded")

    def alone(self) -> Cell:
        """Return the run of one process whose bits this one has: it is not watched."""
        rule = "plain" if self.rule in ("watched", "travels") else self.rule
        numbers = {"device": "gpu", "nccl": "gpu", "host": "cpu"}.get(self.numbers, self.numbers)
        return dataclasses.replace(self.at("single-1"), rule=rule, numbers=numbers)

    @property
    def on_device(self) -> bool:
        """Whether ranks have the stand-in, which stays in a process for good."""
        return self.numbers in ("device", "nccl", "host")

    @property
    def options(self) -> dict[str, Any]:
        """Options of `Muon`."""
        own = {key: value for key, value in RULES[self.rule].items() if key not in ("scaled", "scheduled")}
        return {
            "lr": 0.02,
            "ns_dtype": "bf16" if self.dtype == "bfloat16" else "fp32",
            "momentum_dtype": self.momentum,
            "adamw_state_dtype": self.adamw,
            **({"weight_rounding": "nearest"} if self.dtype == "float16" else {}),
            **({"max_batch_bytes": self.batch} if self.batch else {}),
            **own,
        }

    def shapes(self) -> list[tuple[str, tuple[int, ...], str, bool]]:
        """Return each parameter's name, its shape, its view, and whether Muon steps it."""
        matrices = [(f"m{i}", shape, view, True) for i, (shape, view) in enumerate(MODELS[self.model])]
        others = [*VECTORS, *TABLES.get(self.model, [])]
        return [*matrices, *((f"v{i}", shape, "", False) for i, shape in enumerate(others))]

    def is_missing(self, step: int, index: int) -> bool:
        """Return whether a parameter has no gradient in a step, on any rank."""
        return self.missing and (index + step) % (len(MODELS[self.model]) + len(VECTORS)) in (0, 2, 5, 9)


def pairwise(values: Mapping[str, list[Any]], is_valid: Callable[[Cell], bool]) -> list[Cell]:
    """Return cells in which each pair of values of two fields meets, if some valid cell has it."""
    from allpairspy import AllPairs  # a machine that only runs cells need not have it

    names = list(values)

    def fits(row: list[Any]) -> bool:
        return is_valid(Cell(**dict(zip(names, row, strict=False))))

    return [Cell(**dict(zip(names, row, strict=True))) for row in AllPairs(list(values.values()), filter_func=fits)]


def few_first(cells: Sequence[Cell], few_in: Any = ()) -> list[Any]:
    """Return cells as parameters: few, in which each value of each field is found, and nightly ones, with all pairs.

    `few_in`: the mark of the few; without one they are in the first tier.
    """

    def values(cell: Cell) -> set[tuple[str, Any]]:
        return set(dataclasses.asdict(cell).items())

    few: list[Cell] = []
    missing = set().union(*map(values, cells))
    while missing:
        few.append(max(cells, key=lambda cell: len(values(cell) & missing)))
        missing -= values(few[-1])
    return [pytest.param(cell, marks=few_in if cell in few else pytest.mark.nightly) for cell in cells]
