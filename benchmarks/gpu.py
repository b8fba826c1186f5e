"""Check and measure hf_muon on a GPU, and write one page: `make gpu`, or with a Python that has torch
and what `pyproject.toml` lists:

python -m benchmarks.gpu --device cuda
python -m benchmarks.gpu --device cpu     # the same parts at small sizes, to check that everything runs

Each part is a process with a budget of seconds. If it fails, hangs or kills its process, the page says so, and the next
one runs. The page is rewritten after each part, and keeps what earlier runs on this card found in the others.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import add_dion

_HERE = Path(__file__).resolve().parent
ROOT = _HERE.parent
_NO_DEVICE = 2


@dataclass(frozen=True)
class Part:
    """A part, which runs in a separate process.

    Attributes:
        title: on the page.
        budget_s: seconds after which it is stopped.
    """

    title: str
    budget_s: int


# The most important first, fourteen minutes in all.
PARTS = {
    "machine": Part("Machine", 20),
    "tests": Part("Tests marked `gpu`", 150),
    "compiled": Part("Compiled functions compared with uncompiled ones", 110),
    "products": Part("Symmetric products by one kernel", 240),
    "memory": Part("Memory of a step compared with `hf-muon plan`, and its kernels", 60),
    "step": Part("A step compared with other optimizers", 140),
    "ranks": Part("Two ranks compared with one process", 90),
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of each part; default: its own")
    add_dion(parser)
    parser.add_argument("--out", type=Path, help="the page; default benchmarks/results/gpu/CARD.md, build/gpu/cpu.md")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # what a process of this program runs
    parser.add_argument("--body", type=Path, help=argparse.SUPPRESS)  # where it writes what it finds
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.out is None and options.part is None:
        options.out = ROOT / "build/gpu/cpu.md" if options.device == "cpu" else _HERE / "results/gpu" / f"{_card()}.md"
    return options


def _card() -> str:
    """Return the name of the first card, as the name of a file."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return "cuda"
    name = (asked.stdout.splitlines() or ["cuda"])[0]
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "cuda"


class Body:
    """A file with what a part has found so far: blocks of Markdown lines, replaced by name."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._blocks: dict[str, list[str]] = {}

    def __setitem__(self, name: str, lines: list[str]) -> None:
        self._blocks[name] = lines
        text = "\n\n".join("\n".join(block).strip() for block in self._blocks.values() if block)
        text = re.sub(r"\n{3,}", "\n\n", text)
        new = self._file.with_suffix(".new")
        new.write_text(text + "\n")
        new.replace(self._file)


def _run_part(options: argparse.Namespace) -> int:
    """Run a part in this process."""
    body = Body(options.body)

    def say(text: str) -> None:
        print(f"{time.time() - options.began:6.0f} s  {options.part}: {text}", flush=True)

    try:
        from benchmarks import gpu_parts

        gpu_parts.run(options.part, gpu_parts.Where(options.device, options.dion, say), body)
    except SystemExit as error:  # there is no such device
        print(error, file=sys.stderr)
        return _NO_DEVICE
    except BaseException as error:  # noqa: BLE001  the page says what went wrong
        trace = traceback.format_exc()
        print(trace, file=sys.stderr, flush=True)
        where = [line.strip() for line in trace.splitlines() if line.lstrip().startswith("File ")][-3:]
        first = (str(error).strip().splitlines() or [""])[0][:300]
        body["failed"] = [f"**Failed: {type(error).__name__}: {first}**", "", "```", *where, "```"]
        return 1
    return 0


def _in_process(options: argparse.Namespace, name: str, budget_s: float) -> str:
    """Run a part in a process, and return how it ended; empty if it ended well."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--part",
        name,
        "--device",
        options.device,
        "--body",
        str(options.body),
    ]
    command += ["--began", str(options.began), *(["--dion", options.dion] if options.dion else [])]
    threads = 1 if options.device == "cpu" else min(16, os.cpu_count() or 1)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
    if options.device == "cpu":  # torch.compile would take minutes for other packages' functions
        environment["TORCHDYNAMO_DISABLE"] = "1"
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait(timeout=budget_s)
    except subprocess.TimeoutExpired:
        return f"stopped after {budget_s:.0f} s; what follows was found until then"
    finally:
        _end(process)
    if code == _NO_DEVICE:
        raise SystemExit(_NO_DEVICE)
    return "" if code == 0 else f"its process ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
            process.wait(timeout=5)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def _write(page: Path, name: str, section: str, *, small: bool) -> None:
    """Write a section of the page, and keep the others that are there."""
    sections = (
        dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)) if page.exists() else {}
    )
    sections[PARTS[name].title] = section
    lines = [f"# hf_muon on {'a CPU, at small sizes' if small else 'a GPU'}", ""]
    lines += ["Written by `make gpu`; [what the parts are](../../README.md#on-a-gpu).", ""]
    for part in PARTS.values():
        lines += [f"## {part.title}", "", sections.get(part.title, "Not run.").strip(), ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines).rstrip() + "\n")


def main() -> None:
    """Run the parts in order, and write the page after each."""
    options = arguments()
    if options.part:
        raise SystemExit(_run_part(options))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the part that runs is ended, and the page written
    failed = []
    for name in options.only:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            options.body = Path(folder) / "body.md"
            try:
                ending = _in_process(options, name, options.budget or PARTS[name].budget_s)
            except KeyboardInterrupt:
                ending = "interrupted"
            found = options.body.read_text() if options.body.exists() else ""
        head = f"{datetime.datetime.now():%Y-%m-%d %H:%M}, hf_muon `{_commit()}`, {time.monotonic() - began:.0f} s."
        note = f"**Not complete: {ending}.**\n\n" if ending else ""
        _write(options.out, name, f"{head}\n\n{note}{found}", small=options.device == "cpu")
        print(f"{time.time() - options.began:6.0f} s  {name}: {ending or 'done'}", flush=True)
        failed += [name] if ending else []
        if ending == "interrupted":
            break
    print(f"written: {options.out}" + (f"; not complete: {', '.join(failed)}" if failed else ""))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
