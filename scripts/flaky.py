"""Repeat parts of the tests on a busy machine, and print the tests whose outcomes differ: `make flaky`.

``python -m scripts.flaky --tier first --times 5 --busy 2 on-newest on-deepspeed``
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path("build") / "flaky"


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processes computing."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def outcomes(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each test in a report of pytest, and "passed", "skipped", or what failed."""
    for case in ElementTree.parse(file).iter("testcase"):
        failures = [node for node in case if node.tag in ("failure", "error", "rerun")]
        text = "; ".join(f"{node.tag}: {node.get('message')}" for node in failures)
        skipped = case.find("skipped") is not None
        yield f"{case.get('classname')}::{case.get('name')}", text or ("skipped" if skipped else "passed")


def summary(folders: Sequence[Path], parts: Sequence[str]) -> list[str]:
    """Return a line for each report that is missing, and for each test that failed or did not run each time."""
    lines = []
    for part in parts:
        seen: dict[str, list[str]] = defaultdict(list)
        reports = [folder / f"{part}.xml" for folder in folders]
        lines += [f"{report}: missing, so pytest did not end" for report in reports if not report.exists()]
        reports = [report for report in reports if report.exists()]
        for report in reports:
            for name, outcome in outcomes(report):
                seen[name].append(outcome)
        for name, found in seen.items():
            wrong = [outcome for outcome in found if outcome not in ("passed", "skipped")]
            if wrong:
                lines.append(f"{part}: {name}: failed {len(wrong)} of {len(found)} times\n    {wrong[0][:2000]}")
            elif len(set(found)) > 1 or len(found) != len(reports):
                lines.append(f"{part}: {name}: {', '.join(found)} in {len(reports)} runs")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", help="targets of the Makefile")
    parser.add_argument("--tier", default="first")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--busy", type=int, default=2, help="processes that compute meanwhile")
    arguments = parser.parse_args()
    folders = [FOLDER / str(number) for number in range(1, arguments.times + 1)]
    shutil.rmtree(FOLDER, ignore_errors=True)
    with busy(arguments.busy):
        for folder in folders:
            folder.mkdir(parents=True)
            for part in arguments.parts:
                start = time.monotonic()
                with (folder / f"{part}.log").open("w") as log:
                    command = ["make", part, f"TIER={arguments.tier}", f"OUTCOMES={folder}"]
                    code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
                ending = "passed" if code == 0 else f"failed: {log.name}"
                print(
                    f"{folder.name} of {arguments.times} {part}: {ending} ({time.monotonic() - start:.0f} s)",
                    flush=True,
                )
    lines = summary(folders, arguments.parts)
    print(*lines or ["== the same each time"], sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
