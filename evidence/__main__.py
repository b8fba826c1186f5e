"""Run studies, say how much is left, and draw tables and pictures.

python -m evidence run STUDY... [--jobs 2] [--minutes 60] [--retry]
python -m evidence plan
python -m evidence draw
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from evidence.agenda import remaining
from evidence.chat import chat, corpus_in
from evidence.corpus import corpus
from evidence.results import RESULTS, read_rows
from evidence.runner import Runner, drop_failed
from evidence.study import STUDIES, Study, read_study
from evidence.tables import draw
from evidence.times import measure

ORDER = (
    "rival",
    "precision",
    "pretrain",
    "batch",
    "settings",
    "halves",
    "rules",
    "variants",
    "clipping",
    "finetune",
    "halves-finetune",
    "pretrained",
    "transfer",
)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "plan", "draw"))
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"one or more of {', '.join(ORDER)}")
    parser.add_argument("--jobs", type=int, default=1, help="trials at once, one core each")
    parser.add_argument("--first-core", type=int, help="the core of the first trial; others take the next ones")
    parser.add_argument("--minutes", type=float, help="start no more trials after this time")
    parser.add_argument("--retry", action="store_true", help="repeat failed trials")
    parser.add_argument("--folder", type=Path, default=STUDIES, help="of the YAML files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV files")
    parser.add_argument("--corpus", type=Path, help="folder of other text, for tests")
    options = parser.parse_args(words)
    try:
        studies = [_read(options.folder, name) for name in options.studies or _all(options.folder)]
        if options.command == "plan":
            _plan(studies, options.out)
        elif options.command == "draw":
            draw(studies, options.out)
        else:
            return _run(studies, options)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run it again and it continues", file=sys.stderr)
        return 130
    return 0


def _read(folder: Path, name: str) -> Study:
    if name not in _all(folder):
        raise ValueError(f"there is no study {name}. Valid: {', '.join(_all(folder))}")
    return read_study(folder / f"{name}.yaml")


def _all(folder: Path) -> list[str]:
    names = {path.stem for path in folder.glob("*.yaml")}
    return [name for name in ORDER if name in names] + sorted(names - set(ORDER))


def _run(studies: list[Study], options: argparse.Namespace) -> int:
    errors, makers = [], {"packages": corpus, "chat": chat}
    for study in studies:
        text = corpus_in(options.corpus) if options.corpus else makers[study.corpus]()
        path = options.out / f"{study.name}.csv"
        if options.retry:
            drop_failed(path)
        cores = _cores(options.jobs, options.first_core)
        if Runner(study, path, text, cores, options.minutes).run():
            try:
                measure(study, options.out, text, cores[0])
            except RuntimeError as error:
                errors.append(error)
    draw(studies if options.out != RESULTS else [_read(STUDIES, name) for name in _all(STUDIES)], options.out)
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


def _cores(jobs: int, first: int | None) -> list[int | None]:
    """Return the core of each trial that runs at once; None where processes cannot be pinned.

    Raises:
        ValueError: there are fewer cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [None] * jobs
    cores = sorted(os.sched_getaffinity(0))
    cores = [core for core in cores if first is None or core >= first]
    if not 1 <= jobs <= len(cores):
        raise ValueError(f"--jobs {jobs}: there are {len(cores)} cores to use")
    return list(cores[:jobs])


def _plan(studies: list[Study], out: Path) -> None:
    total = 0.0
    for study in studies:
        rows = read_rows(out / f"{study.name}.csv")
        count, seconds = remaining(study, rows)
        total += seconds
        print(f"{study.name:<10} {len(rows):>4} trials done, about {count:>3} left, {seconds / 3600:5.1f} core-hours")
    print(f"{'together':<10} {total / 3600:38.1f} core-hours")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
