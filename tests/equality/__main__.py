"""Run a cell again: `python -m tests.equality place=fsdp-2 model=views`."""

from __future__ import annotations

import sys
import tempfile

from tests.equality.cells import Cell


def main() -> None:
    from tests.distributed.pool import Pool
    from tests.equality.checks import check

    cell = Cell.of(" ".join(sys.argv[1:]))
    pools = {size: Pool(size, forks=True) for size in (1, 2, 3, 4)}
    with tempfile.TemporaryDirectory() as folder:
        check(cell, pools, folder)
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
