"""What torch.compile, Triton and ptxas make of a call of a compiled function, for a card that does not exist."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_muon.math import compiler
from tests.cuda.fake_step import Call, functions

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


@dataclasses.dataclass
class Written:
    """The modules that Inductor has written, none of which ran, and the arguments that the latest was called with."""

    modules: list[str] = dataclasses.field(default_factory=list)
    arguments: list[Any] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def writing() -> Iterator[Written]:
    """Keep what Inductor writes in the block, instead of running it. Compiled functions must return nothing."""
    from torch._inductor.graph import GraphLowering

    written = Written()

    def keep(arguments: list[Any]) -> list[Any]:
        written.arguments = list(arguments)
        return []

    def compile_to_module(graph: Any) -> SimpleNamespace:
        wrapper, kernels = graph.codegen()
        written.modules.append(wrapper.value + (kernels.value if kernels else ""))
        return SimpleNamespace(call=keep, __file__=None)

    with mock.patch.object(GraphLowering, "compile_to_module", compile_to_module):
        yield written


def write(call: Call, size: int, device: torch.device) -> tuple[Written, list[Tensor]]:
    """Return what is written for the first call in a process, and its fake arguments; see `Call.tensors`."""
    with nothing_compiled(), writing() as written, FakeTensorMode(allow_non_fake_inputs=True):
        tensors = call.tensors(size, device)
        function = functions()[call.function]
        compiler.call(function.plain, tensors, dict(call.options), function.row)
    return written, tensors


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Begin as a new process, in which nothing has been compiled."""
    torch._dynamo.reset()
    with mock.patch.dict(compiler._functions, clear=True):
        yield


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """What a module does around its kernels.

    Attributes:
        kernels: launches.
        allocations: of memory on the card.
        library_calls: operators of torch and of libraries.
    """

    kernels: int
    allocations: int
    library_calls: int


def wrapper_of(module: str) -> Wrapper:
    """Return what a module of Inductor does around its kernels."""
    body = module[module.index("    def call(self, args):") : module.index("runner = Runner")]
    return Wrapper(
        body.count(".run("),
        body.count("empty_strided_cuda("),
        len(re.findall(r"extern_kernels\.|aten\.\w+\.|torch\.ops\.", body)),
    )


def loaded(name: str, source: str) -> Any:
    """Return the kernel of a source, as Inductor's heuristics wrap it."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", prefix=name, delete=False) as file:
        file.write(source)  # Triton reads it again
    spec = importlib.util.spec_from_file_location(Path(file.name).stem, file.name)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


WIDE = r"(?:v4\.[bfsu](?:32|64)|v2\.[bfsu]64|v8\.[bfsu](?:16|32))"
INSTRUCTIONS = {
    "wide accesses": rf"(?:ld|st)\.global[\w.:]*\.{WIDE}\b",
    "narrow accesses": rf"(?:ld|st)\.global(?![\w.:]*\.{WIDE}\b)",
    "fma": r"\bfma\.rn(?:\.ftz)?\.f(?:32|64)",
    "inexact divisions": r"\b(?:div\.(?:full|approx)|rcp\.approx)",
    "inexact roots": r"\br?sqrt\.approx",
    "flushed results": r"\b(?:add|sub|mul|fma|div|sqrt)[\w.]*\.ftz\.",
}


@dataclasses.dataclass(frozen=True)
class Built:
    """A kernel for one target and one config.

    Attributes:
        config: in words.
        registers: of a thread.
        spills: bytes.
        instructions: how often each kind of `INSTRUCTIONS` is in its PTX.
        formula: how its results are computed, see `formula_of`.
    """

    config: str
    registers: int
    spills: int
    instructions: dict[str, int]
    formula: tuple[str, ...]


@functools.cache
def built(name: str, source: str, capability: int) -> list[Built]:
    """Return a kernel of Inductor, in each config that a process may choose, translated by Triton and ptxas."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    every = []
    tuner = loaded(name, source)
    for config in tuner.configs:
        meta = tuner._create_compile_meta(config)
        ast = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
        options = tuner._create_compile_options(config, meta)
        kernel = triton.compile(ast, target=GPUTarget("cuda", capability, 32), options=options)
        ptx = kernel.asm["ptx"]
        said = _said_by_ptxas(ptx, capability, fma=options.get("enable_fp_fusion", True))
        every.append(
            Built(
                ", ".join([*(f"{key}={value}" for key, value in config.kwargs.items()), f"{config.num_warps} warps"]),
                sum(map(int, re.findall(r"Used (\d+) registers", said))),
                sum(map(int, re.findall(r"(\d+) bytes (?:spill|stack)", said))),
                {kind: len(re.findall(pattern, ptx)) for kind, pattern in INSTRUCTIONS.items()},
                formula_of(ptx),
            )
        )
    return every


def _said_by_ptxas(ptx: str, capability: int, *, fma: bool) -> str:
    import triton

    name = "ptxas-blackwell" if capability >= 100 else "ptxas"
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [path, "-v", f"-arch={target[1]}", *([] if fma else ["--fmad=false"]), "-o", os.devnull, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


_OPERATION = re.compile(
    r"(?:@%p\d+ )?(fma|mul|add|sub|neg|div|sqrt)(?:\.rn|\.full|\.approx)?(?:\.ftz)?\.f(?:32|64)\s+(%\w+), (.*);"
)


def formula_of(ptx: str) -> tuple[str, ...]:
    """Return how the results of a kernel are computed: nested operations, which show what is contracted."""
    defined: dict[str, tuple[str, list[str]]] = {}
    for line in ptx.splitlines():
        if found := _OPERATION.match(line.strip()):
            defined[found[2]] = found[1], [word.strip() for word in found[3].split(",")]
    used = {word for _, words in defined.values() for word in words}

    def shown(name: str, depth: int = 0) -> str:
        if name not in defined or depth > 12:
            return "x"
        operation, words = defined[name]
        return f"{operation}({','.join(shown(word, depth + 1) for word in words)})"

    return tuple(sorted({shown(name) for name in defined if name not in used}))
