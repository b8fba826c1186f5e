"""Whole steps on CUDA tensors that do not exist: every operator runs, on shapes and dtypes alone.

Nothing has values, so that what the host reads is answered as in a good step. Compiled functions run as their plain
twins, and their calls are noted: these are what the other tests of this folder compile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import hf_muon.math
from hf_muon import build_optimizer
from hf_muon.diagnostics.log import logger
from hf_muon.math.elementwise import Elementwise, as_tensor
from hf_muon.math.moments import BLOCK
from tests.cuda import fake_gpu
from tests.support.accelerated import as_accelerator
from tests.support.fake_layouts import mesh_of, rank_of, shard_

CUDA = torch.device("cuda", 0)
WIDTH = 1024
"""Of rows that are no blocks."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _short(dtype: torch.dtype) -> str:
    """Return a short name: fp32, bf16, int8."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


# --- calls of compiled functions


class Argument(NamedTuple):
    """What compilation depends on in an argument of a compiled function."""

    dtype: torch.dtype
    ndim: int
    device: str
    contiguous: bool
    place: int
    """Of the first argument that is the same tensor."""

    def made(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return such a tensor; of a number, a likely one."""
        if not self.ndim:
            value = {torch.bool: True, torch.int32: 3}.get(self.dtype, 0.5)
            return torch.tensor(value, dtype=self.dtype) if self.device == "cpu" else torch.empty((), device=device)
        if self.contiguous:
            return torch.empty(shape, dtype=self.dtype, device=device)
        return torch.empty((*shape[:-1], 2 * shape[-1]), dtype=self.dtype, device=device)[..., : shape[-1]]


class Call(NamedTuple):
    """A call of a compiled function, up to the sizes of its tensors and the values of its numbers."""

    function: str
    arguments: tuple[Argument, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def in_blocks(self) -> bool:
        """Whether rows are blocks: there are codes."""
        return any(argument.ndim == 2 and not argument.dtype.is_floating_point for argument in self.arguments)

    @property
    def in_rows(self) -> bool:
        """Whether rows are computed together: there are numbers for each of them."""
        return {argument.ndim for argument in self.arguments} >= {1, 2}

    @property
    def has_gaps(self) -> bool:
        """Whether rows of tensors have gaps between them."""
        return not all(argument.contiguous for argument in self.arguments)

    def shape_of(self, argument: Argument, size: int) -> tuple[int, ...]:
        """Return the shape of an argument for about `size` elements, or for `size` blocks."""
        rows = size if self.in_blocks or not self.in_rows else -(-size // WIDTH)
        if argument.ndim < 2:
            return (rows,) * argument.ndim
        return (size, BLOCK) if self.in_blocks else (-(-size // WIDTH), WIDTH)

    def tensors(self, size: int, device: torch.device = CUDA) -> list[Tensor]:
        """Return arguments, with about `size` elements, or with `size` blocks."""
        made: list[Tensor] = []
        for place, argument in enumerate(self.arguments):
            known = argument.place < place
            made.append(made[argument.place] if known else argument.made(self.shape_of(argument, size), device))
        return made

    def __str__(self) -> str:
        words = [self.function]
        for place, argument in enumerate(self.arguments):
            if argument.ndim:
                same = f"={argument.place} " if argument.place < place else ""
                gaps = "" if argument.contiguous else " with gaps"
                words.append(same + _short(argument.dtype) + gaps)
        return " ".join([*words, *(f"{key}={value}" for key, value in self.options)])


def functions() -> dict[str, Elementwise]:
    """Return every function of hf_muon that is compiled on accelerators, by name."""
    modules = [
        importlib.import_module(f"hf_muon.math.{module.name}") for module in pkgutil.iter_modules(hf_muon.math.__path__)
    ]
    every = [value for module in modules for value in vars(module).values()]
    return {value.name: value for value in every if isinstance(value, Elementwise)}


def _call_of(function: Elementwise, tensors: Sequence[Tensor], options: dict[str, Any]) -> Call:
    arguments = tuple(
        Argument(
            tensor.dtype,
            tensor.ndim,
            tensor.device.type,
            tensor.is_contiguous(),
            next(place for place, other in enumerate(tensors) if other is tensor),
        )
        for tensor in tensors
    )
    return Call(function.name, arguments, tuple(sorted(options.items())))


# --- what a step asks for


class Asked(FakeTensorMode):
    """A mode in which tensors on CUDA are fake and those on the host are real; notes what the card is asked for.

    Attributes:
        operators: the dtypes of each operator's tensors, as texts.
        reads: by the host, of the card.
        calls: of compiled functions, whose plain twins are not among the operators.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._inside = False
        self.forget()

    def forget(self) -> None:
        """Forget what was noted."""
        self.operators: dict[str, set[str]] = {}
        self.reads = 0
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("DTensor" in kind.__name__ for kind in types):
            return NotImplemented  # its operators on local tensors follow
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1].rstrip("_")
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if not fakes and getattr(kwargs.get("device"), "type", "cpu") == "cpu":
            return func(*args, **kwargs)
        if self._inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if fakes and not func.is_view and func.namespace == "aten":
            dtypes = dict.fromkeys(_short(leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))
            self.operators.setdefault(name, set()).add(" ".join(dtypes))
        if name == "_local_scalar_dense":
            self.reads += 1
            return args[0].dtype is torch.bool  # all gradients are finite
        if name == "_to_copy" and fakes and "device" in kwargs and kwargs["device"].type == "cpu":
            self.reads += not kwargs.get("non_blocking")
        if name == "copy" and not isinstance(args[0], FakeTensor):
            return args[0]  # from the card: there is nothing to copy
        with self._unnoted():
            return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def _unnoted(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextlib.contextmanager
    def noting_calls(self) -> Iterator[None]:
        """Note the calls of compiled functions in the block."""
        plain = Elementwise.__call__

        def noted(function: Elementwise, *tensors: Tensor | float, **options: Any) -> None:
            self.calls[_call_of(function, [*map(as_tensor, tensors)], options)] += 1
            with self._unnoted():
                plain(function, *tensors, **options)

        with mock.patch.object(Elementwise, "__call__", noted):
            yield


# --- steps


# Some weights are stepped together, others are large enough for calls of their own. GPT-2's are cut by columns.
MODELS = {
    "llama": transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=16384,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_hidden_layers=1,
        vocab_size=32768,
        tie_word_embeddings=False,
    ),
    "gpt2": transformers.GPT2Config(n_embd=256, n_head=4, n_layer=1, vocab_size=512),
}


class Step(NamedTuple):
    """A step of a small model.

    Attributes:
        options: of `build_optimizer`.
        dtype: of the weights.
        grads: dtype of the gradients; None for that of the weights.
        layout: one process, DDP or FSDP2.
        model: of `MODELS`.
    """

    options: dict[str, Any]
    dtype: str = "bf16"
    grads: str | None = None
    layout: str = "one process"
    model: str = "llama"

    def __str__(self) -> str:
        words = [self.model, self.dtype, *([f"{self.grads} gradients"] if self.grads else [])]
        words += [] if self.layout == "one process" else [self.layout]
        return " ".join([*words, *(f"{key}={value}" for key, value in self.options.items())])

    def asked(self) -> Asked:
        """Take two steps, and return what the second asks for."""
        asked = Asked()
        ranks = 1 if self.layout == "one process" else 4
        quiet = mock.patch.object(logger(), "disabled", new=True)
        with quiet, fake_gpu.card(90), asked, rank_of(ranks, 1 % ranks, device=CUDA):
            with torch.device(CUDA):
                model = transformers.AutoModelForCausalLM.from_config(MODELS[self.model], dtype=DTYPES[self.dtype])
            for param in model.parameters():
                param.grad_dtype = DTYPES[self.grads or self.dtype]
                param.grad = torch.empty_like(param, dtype=param.grad_dtype)
            if self.layout == "FSDP2":
                shard_(model, self.layout, mesh_of(self.layout, ranks, "cuda"), CUDA)
            group = dist.group.WORLD if self.layout == "DDP" else None
            optimizer = build_optimizer(model, {"lr": 1e-3, **self.options}, replicate_group=group)
            with as_accelerator(device=CUDA):
                optimizer.step()
                asked.forget()
                with asked.noting_calls():
                    optimizer.step()
        return asked


def _steps() -> Iterator[Step]:
    for dtype in ("fp32", "bf16"):
        yield Step({}, dtype)
        for stored in ("bf16", "int8"):
            yield Step({"momentum_dtype": stored, "adamw_state_dtype": stored}, dtype)
    for dtype in ("bf16", "fp16"):
        yield Step({"weight_rounding": "nearest", "nesterov": False}, dtype)
    yield Step({"momentum_dtype": "int8", "adamw_state_dtype": "int8", "weight_rounding": "nearest", "nesterov": False})
    yield Step({}, grads="fp32")
    for ns_dtype in ("bf16", "fp32"):
        yield Step({"ns_dtype": ns_dtype}, "fp32")
    for layout in ("DDP", "FSDP2"):
        yield Step({}, layout=layout)
    for stored in ("fp32", "int8"):
        yield Step({"momentum_dtype": stored}, model="gpt2")


STEPS = {str(step): step for step in _steps()}
FIRST = (
    "llama fp32",
    "llama bf16 DDP",
    "llama bf16 momentum_dtype=int8 adamw_state_dtype=int8",
    "gpt2 bf16 momentum_dtype=fp32",
)
"""Steps that call every function, in little time."""
OFTEN = ("step", "move_alone", "sum_squares", "invert", "scale")
"""Functions whose kernels take little time; those of the others are looked at each night."""


@functools.cache
def asked_of(name: str) -> Asked:
    """Return what a step of `STEPS` asks for."""
    return STEPS[name].asked()


@functools.cache
def calls(steps: Sequence[str] = tuple(STEPS)) -> dict[str, list[Call]]:
    """Return the calls of each compiled function in some of `STEPS`, by name."""
    every = sorted({call for name in steps for call in asked_of(name).calls}, key=str)
    return {name: [call for call in every if call.function == name] for name in functions()}


def few(name: str) -> list[Call]:
    """Return few calls of a function in which each argument has each of its dtypes in `FIRST`, and each option."""

    def features(call: Call) -> set[Any]:
        arguments = {(place, argument) for place, argument in enumerate(call.arguments)}
        return arguments | set(call.options)

    found, candidates = [], calls(FIRST)[name]
    left = set().union(*map(features, candidates))
    while left:
        found.append(max(candidates, key=lambda call: len(features(call) & left)))
        left -= features(found[-1])
    return found
