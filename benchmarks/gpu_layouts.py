"""Layouts on one card: ranks that share it step the bits of one process, or the page says which shapes do not.

Ranks are processes of one gloo group, which takes CUDA tensors in every collective of a step; NCCL refuses two ranks on
one card. Parameters are stored as frameworks store them, and gradients are given, on every rank the same ones. Each
rank takes the steps of one process, too: what it stores is compared with its part of those results, and hashes of the
results with those of all other processes, which tells a layout that differs from a product that differs.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu import Body
from benchmarks.gpu_shared import Where, entry, judged, words_of
from benchmarks.tables import table
from tests.distributed.pool import Pool
from tests.one_card.layouts import CUT_COLUMNS, LAYOUTS, STEPS, cases, compare

MENDS = {
    "a fixed workspace (`CUBLAS_WORKSPACE_CONFIG=:4096:8`)": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "no workspace (`CUBLAS_WORKSPACE_CONFIG=:0:0`)": {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
    "cuBLASLt (`TORCH_BLAS_PREFER_CUBLASLT=1`)": {"TORCH_BLAS_PREFER_CUBLASLT": "1"},
}


@dataclass
class _Found:
    """What all pools have found so far.

    Attributes:
        rows: of the table, by case.
        hashes: of each process that took the steps of one process, by case.
        count: of comparisons.
        different: layouts that differ, by case and what differs there.
        products: names of weights and moments that differ between processes in these steps, by case.
    """

    rows: dict[str, list[str]] = field(default_factory=dict)
    hashes: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    count: int = 0
    different: dict[str, list[str]] = field(default_factory=dict)
    products: dict[str, list[str]] = field(default_factory=dict)


def layouts(where: Where, body: Body) -> None:
    """Compare every layout with one process, 2 and 4 ranks at the same time, and try what mends differences."""
    todo, found, lock = cases(where.products), _Found(), threading.Lock()
    small = 1 if where.on_cuda else 32
    if not where.on_cuda:
        todo = [(model, options) for model, options in todo if model == "uneven" or len(options) == 1]
    backend = "cpu:gloo,cuda:gloo"

    def ask(ranks: int) -> None:
        pool = Pool(ranks, timeout=120, backend=backend, forks=not where.on_cuda)
        for model, options in todo:
            int8 = options.get("momentum_dtype") == "int8"
            which = [layout for layout in LAYOUTS[ranks] if not (int8 and layout in CUT_COLUMNS)]
            arguments = {"model": model, "options": options, "kind": where.kind, "small": small}
            try:
                results = pool.run(compare, layouts=which, **arguments)
            except BaseException as error:  # noqa: BLE001  a rank died or hung; the pool starts again
                results = [({}, {layout: [f"does not run: {str(error)[-300:]}"] for layout in which})] * ranks
            with lock:
                _add(found, f"{model}; {words_of(options)}", ranks, results)
                where.say(f"{ranks} ranks, {model}; {words_of(options)}: {found.count} compared")
                _show(body, found, finished=False)
        pool.close(kill=True)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(ask, LAYOUTS))
    _show(body, found, finished=True)
    if found.products:
        body["mends"] = _mended(where, found, backend, small)


def _add(found: _Found, case: str, ranks: int, results: Sequence[tuple[dict[str, str], dict[str, list[str]]]]) -> None:
    """Add what the ranks have found in a case."""
    row = found.rows.setdefault(case, [""] * (sum(map(len, LAYOUTS.values())) + 1))
    for layout in results[0][1]:
        names = list(dict.fromkeys(name for _, of_rank in results for name in of_rank[layout]))
        column = [*LAYOUTS].index(ranks) * len(LAYOUTS[2]) + LAYOUTS[ranks].index(layout)
        ran = not (names and names[0].startswith("does not run"))
        row[column] = ("=" if not names else f"**{len(names)} differ**") if ran else "does not run"
        found.count += 1
        if names:
            reason = ", ".join(names[:4]) if ran else entry(names[0], 300)
            found.different.setdefault(f"{case}: {reason}", []).append(f"{layout}-{ranks}")
    hashes = found.hashes.setdefault(case, [])
    hashes += [alone for alone, _ in results if alone]
    unlike = _unlike(hashes)
    row[-1] = f"**{len(unlike)} differ**" if unlike else f"{len(hashes)}: =" if len(hashes) > 1 else "not compared"
    if unlike:
        found.products[case] = unlike


def _unlike(hashes: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of what is not equal in all processes."""
    return [name for name in (hashes[0] if hashes else ()) if len({own[name] for own in hashes}) > 1]


def _show(body: Body, found: _Found, *, finished: bool) -> None:
    columns = [f"{layout}-{ranks}" for ranks in LAYOUTS for layout in LAYOUTS[ranks]]
    lines = [f"- {', '.join(which)}: {text}" for text, which in [*found.different.items()][:16]]
    alone = [f"- processes alone differ in {case}: {', '.join(names[:12])}" for case, names in found.products.items()]
    body["layouts"] = [
        f"Weights and moments after {STEPS} steps from given gradients, on each rank compared with those of one "
        "process there. The last column compares hashes of what each process has when it steps alone.",
        "",
        *table(["", *columns, "processes"], [[case, *row] for case, row in found.rows.items()]),
        "",
        *alone,
        *lines,
    ]
    different = [f"{layout} ({text})" for text, which in found.different.items() for layout in which]
    different += [f"processes that step alone ({case})" for case in found.products]
    body.verdict(judged(found.count, different) + ("" if finished else ", and more were under way"))


def _mended(where: Where, found: _Found, backend: str, small: int) -> list[str]:
    """Let ranks take the steps of one process again under what may make products equal, and say what does."""
    wanted = [case for case in cases(where.products) if f"{case[0]}; {words_of(case[1])}" in found.products]
    lines = []
    for name, variables in MENDS.items():
        before = dict(os.environ)
        os.environ.update(variables)
        pool = Pool(2, timeout=60, backend=backend, forks=not where.on_cuda)
        left: list[str] = []
        try:
            for model, options in wanted[:4]:
                arguments = {"model": model, "options": options, "kind": where.kind, "small": small}
                left += _unlike([alone for alone, _ in pool.run(compare, layouts=(), **arguments)])
        except BaseException as error:  # noqa: BLE001  a rank died
            left.append(f"does not run: {entry(str(error)[-200:])}")
        pool.close(kill=True)
        os.environ.clear()
        os.environ.update(before)
        rest = entry(", ".join(left), 200)
        lines.append(f"- With {name}: {f'still different: {rest}' if left else 'equal'}")
    return ["What mends it, in the first cases that differ:", "", *lines]
