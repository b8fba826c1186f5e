"""The five checks, each a function over a cell and what its ranks have returned, and the one that makes them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.equality import runs
from tests.equality.cells import Cell
from tests.equality.layouts import CUTS_COLUMNS

Results = Sequence[Mapping[str, Any]]


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of what differs; tensors that only `other` has are those that a layout has not whole."""
    assert one, "nothing to compare"
    return [f"{name}: {value}, expected {other.get(name)}" for name, value in one.items() if value != other.get(name)]


def bits_are_those_of_one_process(cell: Cell, results: Results) -> None:
    expected = runs.alone(cell.alone())
    for when in ("saved", "last"):
        assert not differing(results[0][when], expected[when]), when
    assert expected["saved"] != expected["last"]


def ranks_agree(cell: Cell, results: Results) -> None:
    for result in results[1:]:
        for when in ("saved", "last"):
            assert not differing(result[when], results[0][when]), f"ranks differ: {when}"


def resumed_is_uninterrupted(cell: Cell, results: Results) -> None:
    for result in results:
        assert not differing(result["resumed"], result["last"])


def goes_on_in_another_place(cell: Cell, results: Results, pools: Any, folder: str) -> None:
    there = dataclasses.replace(cell.at(cell.then), form=cell.form)
    others = everywhere(runs.finish, there, pools, folder)
    expected = runs.alone(cell.alone())
    for loaded, last in others:
        assert not differing(loaded, expected["saved"]), f"loaded into {cell.then}"
        assert not differing(last, expected["last"]), f"went on in {cell.then}"


def refused_step_changed_nothing(cell: Cell, results: Results) -> None:
    """Expect one error on all ranks; that nothing changed is seen in the bits of the steps that follow."""
    texts = {result["refusal"] for result in results}
    assert len(texts) == 1
    assert "Muon refuses this step" in texts.pop()


def copies_kept_order(cell: Cell, results: Results) -> None:
    """On the stand-in: the host has waited for what it reads, and updates and directions have travelled to it."""
    for result in results:
        assert result["races"] == []
        assert cell.numbers != "host" or min(result["copied"].values()) > 0


def is_valid(cell: Cell) -> bool:
    """Return whether hf_muon and torch support a cell, and whether it is one that shows something."""
    layouts = {cell.layout.removeprefix("placed-"), cell.then.rpartition("-")[0]}
    cuts = bool(layouts & CUTS_COLUMNS)
    int8 = "int8" in (cell.momentum, cell.adamw)
    in_four = cell.ranks == 4 and cell.layout in ("tp", "last", "mixed", "mixed-turned")  # each row, of two blocks
    return not (
        (int8 and cuts and (cell.model != "aligned" or in_four))
        or ("fsdp-tp" in layouts and cell.form == "full")  # which torch does not load into strided shards
        or (cell.layout == "middle" and cell.model not in ("aligned",))
    )


def everywhere(function: Callable[..., Any], cell: Cell, pools: Any, folder: str, **options: Any) -> list[Any]:
    """Return what a function returns on the ranks of a cell; a cell of one rank runs in this process."""
    if cell.ranks == 1 and not cell.on_device:
        return [function(0, cell, folder, **options)]
    return pools[cell.ranks].run(function, cell=cell, folder=folder, **options)


def check(cell: Cell, pools: Any, folder: str) -> None:
    """Run a cell and make all of the checks that it has data for.

    Raises:
        AssertionError: with the line that runs the cell again.
    """
    try:
        results = everywhere(runs.run, cell, pools, folder)
        bits_are_those_of_one_process(cell, results)
        ranks_agree(cell, results)
        if cell.fault:
            refused_step_changed_nothing(cell, results)
        if cell.then:
            resumed_is_uninterrupted(cell, results)
            goes_on_in_another_place(cell, results, pools, folder)
        if cell.on_device:
            copies_kept_order(cell, results)
    except Exception as error:
        raise AssertionError(f"{error}\nagain: python -m tests.equality {cell}") from error
