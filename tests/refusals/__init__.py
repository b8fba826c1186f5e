"""What hf_muon refuses: one table of entry points, set-ups and codes.

Each case says that an attempt is refused with a type and the codes at the ends of the texts, and the runner checks that
nothing else has changed. No case repeats the words of an error: tests/golden/messages.txt has them all.

An area is a file of this folder with a list `CASES`, here one about options of the optimizer::

    def model() -> nn.Module:
        return nn.Linear(8, 6)

    CASES = [
        Refusal("unknown-option", "build_optimizer", lambda given: build_optimizer(given, momentun=0.9), given=model),
        Refusal("fsdp1 rival-optimizer", "hf-muon inspect", inspected),
        *table(
            [
                ("invalid-value", "MuonConfig", lambda: MuonConfig(momentum=2), "momentum=2"),
                ("ranks-disagree", "Muon.step on ranks", lambda pools: pools[2].run(two_rates)),
            ]
        ),
        *table([("no-gradients", "Muon.step", stepped_without_gradients)], error=None),
    ]

`given` makes what must not change, and `attempt` gets it by that name; other arguments of both are fixtures of pytest
(`tmp_path`, `monkeypatch`, `pools`). An attempt raises, or returns the texts of what has refused it: stderr of a
command, the errors of all ranks. Functions that run on ranks are functions of the area's module, and compare there.
With `error=None` nothing is raised, and the text is in the log.

The area of DeepSpeed runs where DeepSpeed is installed (tests/deepspeed/test_starting.py). `marks` of a case are marks
of pytest. Test each refusal once for each entry point that has a way of its own to it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scripts.messages import messages

HERE = Path(__file__).parent
CODE = re.compile(r"\[([a-z0-9-]+)\]")
KNOWN = frozenset(messages())


@dataclass(frozen=True)
class Refusal:
    """An attempt that is refused.

    Args:
        code: the codes of the text, with blanks between them: exactly these.
        entry: the function, class or command that the user calls.
        attempt: makes the attempt. It raises, or returns the text of the refusal, or a list of texts with these codes.
        error: the type that is raised; None for a warning.
        given: makes what must not change.
        says: a regular expression for the names and the numbers that the user needs, not for words.
        name: tells cases of the same code and entry point apart.
        marks: marks of pytest.
    """

    code: str
    entry: str
    attempt: Callable[..., Any]
    error: type[Exception] | None = ValueError
    given: Callable[..., Any] | None = None
    says: str = ""
    name: str = ""
    marks: Sequence[pytest.MarkDecorator] = ()

    def __str__(self) -> str:
        return "-".join(filter(None, [self.entry, self.code, self.name])).replace(" ", "_")


def table(rows: Iterable[Sequence[Any]], **common: Any) -> list[Refusal]:
    """Return refusals of rows: the code, the entry point, the attempt, and what the text says, which may be missing.

    If `common` has an `attempt`, rows have what is given in its place.
    """
    own = "given" if "attempt" in common else "attempt"
    return [
        Refusal(code, entry, name=str(k), says="".join(says), **{own: what}, **common)
        for k, (code, entry, what, *says) in enumerate(rows)
    ]


def error_of(act: Callable[[], Any], kind: type[Exception] = RuntimeError, match: str = "") -> str:
    """Return the text of an error, which there must be."""
    with pytest.raises(kind, match=match) as error:
        act()
    return str(error.value)


def codes_in(text: str) -> set[str]:
    """Return the codes in a text. Values in brackets, as [1], are none."""
    return KNOWN & set(CODE.findall(text))


def check(case: Refusal, request: pytest.FixtureRequest) -> None:
    """Make an attempt, and assert that it is refused and that nothing has changed."""
    given = _call(case.given, request) if case.given else None
    before = snapshot(given)
    logged = request.getfixturevalue("caplog")
    texts: Any
    try:
        texts = _call(case.attempt, request, given=given)
    except Exception as error:
        if case.error is None or type(error) is not case.error:
            raise
        texts = str(error)
    else:
        if case.error is None:
            texts = logged.text
        assert isinstance(texts, (str, list)), f"not refused: {texts!r:.500}"
    assert texts, "there is no text"
    for text in [texts] if isinstance(texts, str) else texts:
        assert codes_in(text) == set(case.code.split()), text
        assert re.search(case.says, text, re.DOTALL), text
    changed = differences(before, snapshot(given))
    assert not changed, f"changed, although the attempt was refused: {changed}"


def _call(function: Callable[..., Any], request: pytest.FixtureRequest, **known: Any) -> Any:
    """Call a function with what it asks for by name: `known` values, and fixtures."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind in named]
    return function(**{name: known[name] if name in known else request.getfixturevalue(name) for name in wanted})


def snapshot(thing: Any, at: str = "given") -> dict[str, Any]:
    """Return copies of all values in a thing by the path to each: weights, gradients, state, groups, files."""
    parts: Mapping[Any, Any]
    if isinstance(thing, Tensor):
        own = thing.detach().clone() if thing.device.type != "meta" else None
        return {at: (type(thing), thing.requires_grad, own), **_of(thing.grad, f"{at}.grad")}
    if isinstance(thing, nn.Module):
        parts = {**dict(thing.named_parameters()), **dict(thing.named_buffers()), "training": thing.training}
    elif isinstance(thing, Optimizer):
        parts = {"param_groups": thing.param_groups, "state": dict(enumerate(thing.state.values()))}
        parts |= {"keys": [id(key) for key in thing.state]}
    elif isinstance(thing, Path):
        files = sorted(thing.rglob("*")) if thing.is_dir() else [thing]
        parts = {str(file): file.read_bytes() if file.is_file() else file.exists() for file in files}
    elif isinstance(thing, Mapping):
        parts = thing
    elif isinstance(thing, (list, tuple)):
        parts = dict(enumerate(thing))
    elif is_dataclass(thing) and not isinstance(thing, type):
        parts = {field.name: getattr(thing, field.name) for field in fields(thing)}
    elif isinstance(thing, SimpleNamespace):
        parts = vars(thing)
    else:
        return {at: thing}
    return {at: type(thing), **{key: x for name in parts for key, x in snapshot(parts[name], f"{at}.{name}").items()}}


def _of(grad: Tensor | None, at: str) -> dict[str, Any]:
    return {} if grad is None else snapshot(grad, at)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the paths of what differs between two snapshots."""
    return [at for at in {**before, **after} if at not in before or at not in after or not _same(before[at], after[at])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
    return one is other or bool(one == other)


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor whose NaNs are equal."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return torch.nan_to_num(local, nan=-7.0) if local.is_floating_point() else local


def areas() -> list[str]:
    """Return the names of the files with cases."""
    names = sorted(path.stem for path in HERE.glob("*.py"))
    return [name for name in names if name != "__init__" and not name.startswith("test_")]


def codes_of_tests() -> set[str]:
    """Return the codes that tests name, read from their files, of which some need a package that is not installed."""
    codes: set[str] = set()
    for path in HERE.parent.rglob("test_*.py"):
        codes |= codes_in(path.read_text(encoding="utf-8").replace("\\[", "[").replace("\\]", "]"))
    for name in areas():
        for node in ast.walk(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                codes |= set(node.value.split())
    return codes
