"""docs/troubleshooting.md has the fixed words of every message that a user can meet.

The messages are read from the source: texts with at least four words in a row between their variable parts. What is no
message is left out by rule (docstrings, assertions, `NotImplementedError`, lines for INFO and DEBUG, help texts) or by
`NO_MESSAGES`, with the reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
WORDS = 4
# In a text of `logging`, of `str.format`, and in an f-string (see `text_of`); a line break ends a run of words, too.
VARIABLE = re.compile(r"\0|%(?:\.\d)?[sdgf]%*|(?<!\{)\{\w+\}|\n| \[[a-z0-9-]+\]")
# These rooms print tables, pages and help. What is a message there is raised, warned of, or made by such a function.
PRINTING = ("hf_muon/cli/", "hf_muon/diagnostics/", "hf_muon/plan/")
MAKES_MESSAGES = re.compile(r"complaint|reason|refus|freeze_quantized|_valid")
# Texts of other packages that stand on the page for people who search for them.
OF_OTHERS = ("... is not a valid OptimizerNames", "Missing key in checkpoint state_dict: ...")
# A file, or a function or constant of it, whose texts are no messages, and why.
NO_MESSAGES = {
    "hf_muon/_autoload.py": "what is lost with a hook, behind `is not in place` and in `hf-muon doctor`",
    "hf_muon/integrations/timm.py::_register": "in timm's list of optimizers",
    "hf_muon/math/cost.py": "describes products in a plan",
    "hf_muon/optimizer/first_step_report.py": "the report of HF_MUON_STEP_REPORT",
    "hf_muon/optimizer/layout_lines.py": "values in `the ranks disagree`",
    "hf_muon/options/declaration.py::quoted": "a value in a message",
    "hf_muon/options/types.py": "what is valid, behind `Valid:`",
    "hf_muon/ready_groups.py::__init__": "the name of a model in a message",
    "hf_muon/routing/fused.py": "names of classes",
    "hf_muon/routing/parameters.py": "reasons in the table of routes: docs/weights.md",
    "hf_muon/routing/rules.py::not_hidden_matrices": "reasons in the table of routes: docs/weights.md",
    "hf_muon/routing/rules.py::_named": "reasons in the table of routes: docs/weights.md",
    "hf_muon/routing/rules.py::_reason_against": "reasons in the table of routes: docs/weights.md",
    "hf_muon/routing/rules.py::_structural": "reasons in the table of routes: docs/weights.md",
    "hf_muon/routing/rules.py::_view": "reasons in the table of routes: docs/weights.md",
    "hf_muon/routing/route.py": "the table of routes",
}


class Message(NamedTuple):
    """A text of the source, with NUL in place of the variable parts of an f-string."""

    file: str
    line: int
    names: tuple[str, ...]  # of the functions and classes around it, or of the constant
    text: str


def text_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def runs(text: str) -> list[str]:
    """Return the runs of fixed words in a text that are long enough to be searched for."""
    return [" ".join(run.split()) for run in VARIABLE.split(text) if len(run.split()) >= WORDS]


def messages(source: str, file: str) -> Iterator[Message]:
    """Yield the messages of one file of the package."""

    def visit(node: ast.AST, names: tuple[str, ...], is_raised: bool) -> Iterator[Message]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = (*names, node.name)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and not names:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names = (target.id,) if isinstance(target, ast.Name) else ()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.Raise) and node.exc is not None:
            if re.search("NotImplementedError|AssertionError", ast.unparse(node.exc)):
                return
            is_raised = True
        if isinstance(node, ast.Assert):
            return
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.endswith((".info", ".debug")) or called in ("option", "Option", "typer.Option", "typer.Argument"):
                return
            is_raised |= called.endswith(("Error", ".warning"))
        text = text_of(node)
        if text is None:
            for child in ast.iter_child_nodes(node):
                yield from visit(child, names, is_raised)
        elif runs(text) and (is_raised or not file.startswith(PRINTING) or MAKES_MESSAGES.search(" ".join(names))):
            yield Message(file, getattr(node, "lineno", 0), names, text)

    for message in visit(ast.parse(source), (), is_raised=False):
        if not {file, *(f"{file}::{name}" for name in message.names)} & NO_MESSAGES.keys():
            yield message


def all_messages() -> list[Message]:
    paths = sorted((ROOT / "hf_muon").rglob("*.py"))
    return [m for path in paths for m in messages(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())]


def missing(page: str, texts: list[Message]) -> list[str]:
    """Return what to add to the page, a line for each run of words that is not on it."""
    words = " ".join(page.split())
    return [
        f"{m.file}:{m.line} ({'.'.join(m.names)}): {run}" for m in texts for run in runs(m.text) if run not in words
    ]


def test_the_page_has_every_message():
    lines = missing(PAGE.read_text(encoding="utf-8"), all_messages())
    assert not lines, (
        f"{len(lines)} texts are not in docs/troubleshooting.md. Add an entry for each: the text in bold code, `...` "
        "for its variable parts, why it comes and what to do; or, for what is no message, a line with the reason to "
        "NO_MESSAGES in tests/docs/test_troubleshooting.py:\n" + "\n".join(lines)
    )


def test_every_exception_still_stands_for_something():
    """Fail for a line whose function is gone: it would hide a message that gets its name later."""
    for place in NO_MESSAGES:
        file, _, name = place.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert not name or name in {getattr(node, "name", None) for node in ast.walk(tree)}, place


def test_no_entry_stands_for_a_message_that_is_gone():
    """Look for a run of words of each text in bold, or as much as it has of one, in the source."""
    known = [" ".join(VARIABLE.sub(" ", m.text).split()) for m in everything()]
    bold = re.findall(r"^\*\*(`+)(.+?)\1\*\*", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(bold) > 200
    stale = []
    for _, text in bold:
        if text in OF_OTHERS:
            continue
        parts = [" ".join(part.split()) for part in text.split("...")]
        longest = max(parts, key=lambda part: len(part.split())).strip(" .,:;()")
        if not any(longest in text for text in known):
            stale.append(text)
    assert not stale, "these entries of docs/troubleshooting.md are in no message any more:\n" + "\n".join(stale)


def everything() -> Iterator[Message]:
    """Yield every text of the package, short ones as well."""
    for path in (ROOT / "hf_muon").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if text := text_of(node):
                yield Message(path.name, 0, (), text)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise ValueError(f'{x} is not a good number')", ["is not a good number"]),
        ("LATE = '{name} is much too late now'\n", ["is much too late now"]),
        ("def f():\n    logger().warning('%s has lost its way home', x)", ["has lost its way home"]),
        ("yield_ = [f'the size {x} does not fit in here']", ["does not fit in here"]),
        ("def f():\n    'A docstring of five words.'", []),
        ("assert x, 'this is our own bug'", []),
        ("raise NotImplementedError('nobody will ever see this')", []),
        ("logger().info('all is as it was')", []),
    ],
)
def test_messages_are_read_from_the_source(source, expected):
    collected = list(messages(source, "hf_muon/build.py"))
    assert [run for message in collected for run in runs(message.text)] == expected
    assert len(missing("a page of nothing", collected)) == len(expected)


def test_rooms_that_print_count_what_they_raise():
    source = "def show():\n    print('the loss of this run')\n    raise ValueError('the loss is not finite')"
    assert [m.text for m in messages(source, "hf_muon/cli/plan.py")] == ["the loss is not finite"]
