"""Check and measure hf_muon on a GPU, and write one page, with a Python that has torch and transformers:

python -m benchmarks.gpu --device cuda --answers     # is it right? All parts at once, three minutes
python -m benchmarks.gpu --device cuda --times       # how fast? One part after the other, five minutes
python -m benchmarks.gpu --device cpu                # the same parts at small sizes, to check that everything runs

Each part is a process with a budget of seconds. If it fails, hangs or kills its process, or what it imports is missing,
the page says so, and the others run. The page is rewritten as parts find something, and keeps what earlier runs on this
card found. The last lines that are printed are a table with a line for each part.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import add_dion

_HERE = Path(__file__).resolve().parent
ROOT = _HERE.parent
LAUNCH = ["-m", "benchmarks.gpu"]
"""How Python runs this program."""
_NO_DEVICE = 2
ANSWERS, TIMES = "answers", "times"


@dataclass(frozen=True)
class Part:
    """A part, which runs in a separate process.

    Attributes:
        title: on the page.
        call: `ANSWERS` or `TIMES`.
        budget_s: seconds after which it is stopped, on a card.
        runs: the function that it runs, as ``module:function``.
    """

    title: str
    call: str
    budget_s: int
    runs: str


# The most important first. Answers have their budgets at the same time, times one after the other.
PARTS = {
    "machine": Part("Machine", ANSWERS, 60, "benchmarks.gpu_answers:machine"),
    "layouts": Part("Layouts compared with one process", ANSWERS, 165, "benchmarks.gpu_layouts:layouts"),
    "tests": Part("Tests marked `gpu`", ANSWERS, 165, "benchmarks.gpu_answers:tests"),
    "compiled": Part(
        "Compiled functions compared with uncompiled ones", ANSWERS, 165, "benchmarks.gpu_answers:compiled"
    ),
    "trainer": Part("Trainer", ANSWERS, 165, "benchmarks.gpu_training:trainer"),
    "llamafactory": Part("LLaMA-Factory", ANSWERS, 165, "benchmarks.gpu_training:llamafactory"),
    "deepspeed": Part("DeepSpeed on one rank", ANSWERS, 165, "benchmarks.gpu_training:deepspeed"),
    "waits": Part("Waits, memory that is lost, and wrong addresses", ANSWERS, 165, "benchmarks.gpu_answers:waits"),
    "rates": Part("Rates of this card", TIMES, 30, "benchmarks.gpu_times:rates"),
    "newton_schulz": Part("Newton-Schulz", TIMES, 80, "benchmarks.gpu_times:newton_schulz"),
    "step": Part("A step compared with other optimizers", TIMES, 90, "benchmarks.gpu_times:step"),
    "memory": Part("Memory of training compared with `hf-muon plan`", TIMES, 100, "benchmarks.gpu_times:memory"),
    "host": Part("A small model: the host's part of a step", TIMES, 45, "benchmarks.gpu_times:host"),
    "products": Part("Symmetric products by one kernel", TIMES, 50, "benchmarks.gpu_products:products_of"),
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--answers", action="store_true", help="run the parts that tell whether it is right")
    parser.add_argument("--times", action="store_true", help="run the parts that tell how fast it is")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of each part; default: its own")
    add_dion(parser)
    parser.add_argument("--out", type=Path, help="the page; default benchmarks/results/gpu/CARD.md, build/gpu/cpu.md")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # what a process of this program runs
    parser.add_argument("--body", type=Path, help=argparse.SUPPRESS)  # where it writes what it finds
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.card = "a CPU, at small sizes" if options.device == "cpu" else _card()
    options.log = options.out.with_suffix(".log") if options.out else ROOT / "build/gpu/log.log"
    if options.out is None and options.part is None:
        file = re.sub(r"[^a-z0-9]+", "-", options.card.lower()).strip("-")
        options.out = ROOT / "build/gpu/cpu.md" if options.device == "cpu" else _HERE / "results/gpu" / f"{file}.md"
    calls = [call for call in (ANSWERS, TIMES) if getattr(options, call)] or [ANSWERS, TIMES]
    options.only = options.only or [name for name, part in PARTS.items() if part.call in calls]
    return options


def _card() -> str:
    """Return the name of the first card."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.splitlines()[0].strip()
    return "cuda"


class Body:
    """A file with what a part has found so far: blocks of Markdown lines, replaced by name, after a verdict."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._blocks: dict[str, list[str]] = {"verdict": []}

    def __setitem__(self, name: str, lines: list[str]) -> None:
        self._blocks[name] = lines
        text = "\n\n".join("\n".join(block).strip() for block in self._blocks.values() if block)
        text = re.sub(r"\n{3,}", "\n\n", text)
        new = self._file.with_suffix(".new")
        new.write_text(text + "\n")
        new.replace(self._file)

    def verdict(self, text: str) -> None:
        """Say what the part has found, in a line."""
        self["verdict"] = [f"**{' '.join(text.split())}**"]


def _run_part(options: argparse.Namespace) -> int:
    """Run a part in this process."""
    body = Body(options.body)

    def say(text: str) -> None:
        print(f"{time.time() - options.began:6.0f} s  {options.part}: {text}", flush=True)

    try:
        from benchmarks.gpu_shared import Where, begin

        where = Where(options.device, options.dion, say)
        begin(where)
        module, _, function = PARTS[options.part].runs.partition(":")
        getattr(importlib.import_module(module), function)(where, body)
    except SystemExit as error:  # there is no such device
        print(error, file=sys.stderr)
        return _NO_DEVICE
    except BaseException as error:  # noqa: BLE001  the page says what went wrong
        trace = traceback.format_exc()
        print(trace, file=sys.stderr, flush=True)
        where_in = [line.strip() for line in trace.splitlines() if line.lstrip().startswith("File ")][-3:]
        first = (str(error).strip().splitlines() or [""])[0][:300]
        body["failed"] = [f"**Failed: {type(error).__name__}: {first}**", "", "```", *where_in, "```"]
        return 1
    return 0


class Run:
    """A part that runs in a process.

    Attributes:
        name: of the part.
        ending: how it ended; None while it runs, empty if it ended well.
    """

    def __init__(self, name: str, options: argparse.Namespace, folder: str) -> None:
        self.name = name
        self.ending: str | None = None
        self._date = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
        self._budget_s = options.budget or PARTS[name].budget_s * (4 if options.device == "cpu" else 1)  # maybe busy
        self._began = time.monotonic()
        self._seconds = 0.0
        self._body = Path(folder) / f"{name}.md"
        self._log = Path(folder) / f"{name}.log"
        command = [sys.executable, *LAUNCH, "--part", name, "--device", options.device, "--body", str(self._body)]
        command += ["--began", str(options.began), *(["--dion", options.dion] if options.dion else [])]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=_environment(name, options.device), stdout=log, stderr=log, start_new_session=True
            )

    def poll(self) -> None:
        """Note whether the part has ended; end it if its time is over.

        Raises:
            SystemExit: there is no such device.
        """
        code = self._process.poll()
        self._seconds = time.monotonic() - self._began
        if code is not None:
            words = signal.Signals(-code).name if code < 0 else f"code {code}"
            self.end("" if code == 0 else f"its process ended with {words}")
        elif self._seconds > self._budget_s:
            self.end(f"stopped after {self._budget_s:.0f} s; what follows was found until then")
        if code == _NO_DEVICE:
            raise SystemExit(self._log.read_text(errors="replace")[-1000:])

    def printed(self) -> str:
        """Return what it printed, or the end of it."""
        return f"===== {self.name}\n{self._log.read_text(errors='replace')[-400_000:]}\n"

    def end(self, ending: str) -> None:
        """End the process, and those that it has started."""
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, kind)
                self._process.wait(timeout=2)
        self.ending = ending

    def section(self) -> str:
        """Return what the page says of it."""
        found = self._body.read_text() if self._body.exists() else ""
        if self.ending and self.ending.startswith("its process") and "Failed: " not in found:
            found += "\n".join(["", "```", *self._log.read_text(errors="replace").splitlines()[-12:], "```"])
        ending = "running" if self.ending is None else self.ending or "done"
        head = f"{self._date}, hf_muon `{_commit()}`, {self._seconds:.0f} s: {ending}."
        return f"{head}\n\n{'**Not complete.**' if self.ending else ''}\n\n{found}".replace("\n\n\n\n", "\n\n")


def _environment(name: str, device: str) -> dict[str, str]:
    """Return the environment of a part's process."""
    alone = PARTS[name].call == TIMES
    threads = 1 if device == "cpu" else min(16 if alone else 2, os.cpu_count() or 1)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    # Its functions are single kernels, which gain nothing from a pool of compilers in each process.
    own |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    own |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # all ranks are here, maybe without another network
    if device == "cpu":  # torch.compile would take minutes for other packages' functions
        own |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
        own |= {"TRITON_INTERPRET": "1"} if name == "products" else {}
    return {**os.environ, **own}


@functools.cache
def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    return "unknown"


class Page:
    """A page with a section for each part; those of parts that do not run again stay if they are of the same card."""

    def __init__(self, file: Path, card: str) -> None:
        self._file, self._head = file, f"# hf_muon on {card}"
        text = file.read_text() if file.exists() else ""
        own = text if text.partition("\n")[0] == self._head else ""
        self._earlier = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", own, re.M | re.S))
        self._sections = dict(self._earlier)

    def write(self, runs: Sequence[Run]) -> None:
        """Write what these parts have found; a part that is stopped before it finds something leaves what was there."""
        for run in runs:
            title, section = PARTS[run.name].title, run.section()
            earlier = self._earlier.get(title, "")
            if len(section.strip().splitlines()) <= 3 and "s: done." not in section and "Not run." not in earlier:
                section += f"\n{earlier.strip()}"
            self._sections[title] = section
        lines = [self._head, "", "Written by `benchmarks/gpu.py`; [its parts](../../README.md#on-a-gpu).", ""]
        lines += ["| part | ended | seconds | verdict |", "| --- | --- | --- | --- |"]
        lines += [f"| {' | '.join(self.row(name))} |" for name in PARTS]
        for part in PARTS.values():
            lines += ["", f"## {part.title}", "", self._sections.get(part.title, "Not run.").strip()]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text("\n".join(lines).rstrip() + "\n")
        new.replace(self._file)

    def row(self, name: str) -> list[str]:
        """Return the entries of a part in the table: its name, how it ended, its seconds, and its verdict."""
        section = self._sections.get(PARTS[name].title, "")
        head = re.search(r"(\d+) s: ([^;\n]*)", section)
        if head is None:
            return [name, "not run", "", ""]
        words = [text for text in re.findall(r"^\*\*(.*)\*\*$", section, re.M) if text != "Not complete."]
        words = words[:1] + [text for text in words[1:] if "Failed" in text]
        if count := section.count("| does not run"):
            words.append(f"{count} do not run")
        return [name, head[2].rstrip("."), head[1], "; ".join(words)]


def main() -> None:
    """Run the answers together and then the times one by one, and write the page as they find something."""
    options = arguments()
    if options.part:
        raise SystemExit(_run_part(options))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the parts that run are ended, and the page written
    page = Page(options.out, options.card)
    together = [name for name in options.only if PARTS[name].call == ANSWERS]
    turns = [together, *([name] for name in options.only if PARTS[name].call == TIMES)]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for names in filter(None, turns):
                runs = [*runs, *(Run(name, options, folder) for name in names)]
                _watch(runs, page, options)
        except KeyboardInterrupt:
            print("interrupted")
        options.log.parent.mkdir(parents=True, exist_ok=True)
        options.log.write_text("\n".join(run.printed() for run in runs))
    rows = [page.row(name) for name in options.only]
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    for row in rows:
        print(
            "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3][:400]]).rstrip()
        )
    failed = [row[0] for row in rows if row[1] != "done"]
    print(f"written: {options.out}, {options.log}" + (f"; not complete: {', '.join(failed)}" if failed else ""))
    raise SystemExit(1 if failed else 0)


def _watch(runs: Sequence[Run], page: Page, options: argparse.Namespace) -> None:
    """Wait until all parts have ended, and write the page every second."""
    try:
        while open_runs := [run for run in runs if run.ending is None]:
            for run in open_runs:
                run.poll()
                if run.ending is not None:
                    seconds = time.time() - options.began
                    print(f"{seconds:6.0f} s  {run.name}: {run.ending or 'done'}", flush=True)
            page.write(runs)
            time.sleep(1 if all(run.ending is None for run in open_runs) else 0)
    except BaseException as error:
        for run in runs:
            if run.ending is None:
                run.end("interrupted")
        if not isinstance(error, SystemExit):  # without a device there is nothing to write
            page.write(runs)
        raise


if __name__ == "__main__":
    main()
