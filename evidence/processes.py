"""Processes of one thread, their folders and locks, and what they run on: processor, versions, source."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from evidence.corpus import BUILD, Corpus

ROOT = Path(__file__).resolve().parents[1]
# glibc gives large blocks back at once, and each step asks for the pages of its logits again. Others ignore this.
KEEP_MEMORY = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=4294967296"
PACKAGES = ("hf-muon", "torch", "transformers", "accelerate", "peft", "llamafactory", "deepspeed")


def launch(
    program: Sequence[str], spec: Any, corpus: Corpus, folder: Path, core: int | None
) -> subprocess.Popen[bytes]:
    """Start a process that reads `spec.json` of a folder and writes `result.json` there.

    Args:
        program: words after `python`; the two files follow.
        spec: what the process does.
        corpus: the text.
        folder: of the files, and of `output.log`.
        core: to pin the process to; None for no pinning.
    """
    (folder / "spec.json").write_text(json.dumps({"spec": spec, "corpus": str(corpus.folder)}), encoding="utf-8")
    words = [sys.executable, "-W", "ignore", *program, str(folder / "spec.json"), str(folder / "result.json")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DISABLE_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
        "GLIBC_TUNABLES": KEEP_MEMORY,
        "TORCH_COMPILE_DISABLE": "1",  # DeepSpeed compiles its Muon, which takes longer than a trial
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    # A process inherits the cores of the thread that starts it. macOS has no such call.
    usual = os.sched_getaffinity(0) if core is not None else set()
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        with (folder / "output.log").open("wb") as log:
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=ROOT)
    finally:
        if core is not None:
            os.sched_setaffinity(0, usual)


def machine() -> str:
    """Return the processor, with its family and model where its name may hide them, and whether it multiplies bf16."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    facts = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in lines if ":" in line}
    has_bf16 = "avx512_bf16" in facts.get("flags", "") or "amx_bf16" in facts.get("flags", "")
    kind = f" family {facts['cpu family']} model {facts['model']}" if "cpu family" in facts else ""
    return f"one core of {facts.get('model name', platform.machine())}{kind}{', bf16' if has_bf16 else ''}"


def versions() -> str:
    """Return the versions of the packages that matter, `name==version` each."""
    texts = []
    for package in PACKAGES:
        try:
            texts.append(f"{package}=={version(package)}")
        except PackageNotFoundError:
            continue
    return " ".join([f"python=={platform.python_version()}", *texts])


def source(package: Path = ROOT / "hf_muon") -> str:
    """Return a hash of a package's Python files, which its version does not tell apart."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py"), key=lambda file: file.relative_to(package).as_posix()):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def new_folder(kind: str, name: str) -> Path:
    """Return an empty folder for a process."""
    # With this process's number: one that outlives a killed parent writes elsewhere.
    folder = BUILD / kind / f"{name}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file of results.

    Raises:
        RuntimeError: another process holds it.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    with (BUILD / f"{path.stem}-{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(f"another process runs {path.stem}: wait for it, or end it") from error
        yield


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that the processes of trials end with the study."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
