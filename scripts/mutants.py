"""Break single lines of hf_muon/ and see whether the tests notice: `python -m scripts.mutants math --sample 20`.

A mutant is one change by an operator of cosmic-ray (`<` becomes `<=`, a number grows by one, a condition gets a `not`,
a loop has no iterations), or the loss of a call whose result nobody uses. For each room the tool draws places of
code, the same for the same seed, runs the tests of the first tier on each mutant until one fails, and prints:

    killed    and the test that failed: as it should be
    survived  No test protects the behaviour of that line, which deserves a test that compares with something simpler;
              or the change has no effect that a user could see, and the code could often be deleted.
    timeout   The tests took three times as long as without a mutant, as when ranks wait for each other: as killed.
    gone      The line that `--replay` looks for is no longer there.

`--out FILE` adds a JSON line for each mutant; started again with the file, the tool goes on. `--replay FILE` takes the
mutants of such a file, found by file, operator and line, instead of drawing any: it asks the tests of another commit
about the same ones; scripts/mutants.jsonl has some of commit 1a451fe. Everything happens in a temporary worktree of
`--commit`; what is not committed is not tested. A room's tests have to pass before its first mutant, so that a test
that fails on a busy machine is not taken for one that kills.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import parso.python.tree  # before cosmic_ray, whose own order of imports is circular
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

ROOMS = {
    "math": ("math", "optimizer", "refusals"),
    "storage": ("storage", "distributed", "equality", "refusals"),
    "distributed": ("storage", "distributed", "equality", "refusals"),
    "optimizer": ("optimizer", "distributed", "equality", "refusals"),
    "rules": ("rules", "equality", "refusals"),
    "routing": ("routing", "rules", "refusals"),
}
FIRST_TIER = '-m "not gpu and not extended"'  # for pytest
# Arithmetic stays arithmetic: an error of types is killed by any test that runs the line.
LEFT_OUT = re.compile(
    r"Variable|BinaryOperator_.*_(RShift|LShift|Bit\w+)$|ComparisonOperator_([^I]\w*_Is(Not)?|Is(Not)?_[^I]\w*)$"
)
DRAWN = ("room", "file", "operator", "before", "after", "nth")
SHOWN = ("result", "room", "at", "before", "after", "by", "seconds")
# Quick files first, so that most mutants die in seconds.
QUICK_FIRST = """
import json, os, pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    seconds = json.loads(os.environ["MUTANTS_SECONDS"])
    items.sort(key=lambda item: seconds.get(item.nodeid.partition("::")[0], 0))
"""


class DeleteCall(Operator):
    """An operator that deletes a call whose result is not used."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and node.children[0].type == "atom_expr":
            yield (node.start_pos, node.end_pos)

    def mutate(self, node: Any, index: int) -> Any:
        call = node.children[0]
        node.children[0] = parso.parse(f"{call.get_first_leaf().prefix}pass")
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        return ()


OPERATORS = {"DeleteCall": DeleteCall()} | {
    name.removeprefix("core/"): get_operator(name)() for name in sorted(operator_names()) if not LEFT_OUT.search(name)
}


def unseen(node: ast.AST) -> bool:
    """Return whether a node is a message, a log line or an assertion, on which no result depends."""
    if isinstance(node, ast.Call):
        return bool(re.match(r"(logger|log|warnings)\.", ast.unparse(node.func)))
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "__str__")
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.keyword):
        return node.arg in ("strict", "maxsize")  # of zip, against our own mistakes, and of caches
    return isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr))


@functools.cache
def places(source: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return the mutants of a module by line and column, each as an operator and an index among those of it."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None), node if unseen(node) else None]
        spans += [((p.lineno, p.col_offset), (p.end_lineno, p.end_col_offset)) for p in parts if p is not None]
    found, counts = defaultdict(list), Counter()
    for node in ast_nodes(get_ast(source)):
        for name, operator in OPERATORS.items():
            for start, _ in operator.mutation_positions(node):
                if not any(first <= start < last for first, last in spans):
                    found[start].append((name, counts[name]))
                counts[name] += 1
    return found


def change(source: str, operator: str, occurrence: int) -> tuple[str, dict[str, Any]]:
    """Return a mutated module, and what distinguishes the mutant from others of the module."""
    mutated = mutate_code(source, OPERATORS[operator], occurrence)
    lines = list(difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=0))
    before, after = ("\n".join(line[1:].strip() for line in lines[3:] if line[0] == sign) for sign in "-+")
    return mutated, {"operator": operator, "before": before, "after": after}


def alike(source: str, mutant: dict[str, Any]) -> list[tuple[int, str]]:
    """Return the lines and the mutated modules of all mutants that read like one."""
    found = []
    lines = source.splitlines()
    for (line, _), here in sorted(places(source).items()):
        for operator, occurrence in here:
            if operator == mutant["operator"] and lines[line - 1].strip() in mutant["before"]:
                mutated, key = change(source, operator, occurrence)
                if all(mutant[name] == value for name, value in key.items()):
                    found.append((line, mutated))
    return found


def draw(root: Path, room: str, sample: int, seed: int) -> list[dict[str, Any]]:
    """Return mutants of a room at different places, in random order."""
    random_ = random.Random(f"{seed} {room}")
    sources = {
        str(path.relative_to(root)): path.read_text() for path in sorted((root / "hf_muon" / room).rglob("*.py"))
    }
    everywhere = [(file, place, here) for file, source in sources.items() for place, here in places(source).items()]
    random_.shuffle(everywhere)  # a larger sample begins with the smaller one
    drawn = []
    for file, _, here in everywhere[:sample]:
        mutated, key = change(sources[file], *random_.choice(here))
        same = [other for _, other in alike(sources[file], key)]
        drawn.append({"room": room, "file": file, **key, "nth": same.index(mutated)})
    return drawn


def run_tests(
    root: Path, which: Sequence[str], seconds: Mapping[str, float] | None = None, limit: float | None = None
) -> dict[str, Any]:
    """Run tests until one fails; return how that ended."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "quick_first", *which]
    path = os.pathsep.join([str(root), str(root.parent)])
    environment = os.environ | {"PYTHONPATH": path, "MUTANTS_SECONDS": json.dumps(seconds or {})}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            result = "killed" if process.wait(limit) else "survived"
        except subprocess.TimeoutExpired:
            result = "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):  # ranks, too
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        text = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
    by = {} if result != "killed" else {"by": failed[1] if failed else text.strip()[-300:]}
    return {"result": result, **by, "seconds": round(time.monotonic() - start, 1)}


def measure(root: Path, room: str, which: Sequence[str]) -> dict[str, Any]:
    """Return the seconds of each file of tests without a mutant; a test that fails then would kill every mutant."""
    report = root.parent / "report.xml"
    outcome = run_tests(root, [f"--junitxml={report}", *which])
    if outcome["result"] != "survived":
        raise SystemExit(f"{room}: without a mutant the tests fail: {outcome['by']}")
    files: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        module = re.sub(r"\.[A-Z].*", "", case.get("classname", ""))  # without the name of a class
        files[module.replace(".", "/") + ".py"] += float(case.get("time", 0))
    return {"room": room, **outcome, "result": "clean", "files": files}


def try_mutant(root: Path, mutant: Mapping[str, Any], which: Sequence[str], clean: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the tests say about a mutant; its line may have moved to another file since it was drawn."""
    drawn = {name: mutant[name] for name in DRAWN}
    for path in [root / mutant["file"], *sorted((root / "hf_muon").rglob("*.py"))]:
        source = path.read_text() if path.exists() else ""
        if mutant["before"].partition("\n")[0] in source and mutant["nth"] < len(found := alike(source, mutant)):
            line, mutated = found[mutant["nth"]]
            try:
                path.write_text(mutated)
                outcome = run_tests(root, which, clean["files"], max(120, 3 * clean["seconds"]))
            finally:
                path.write_text(source)
            return {**drawn, "at": f"{path.relative_to(root)}:{line}", **outcome}
    return {**drawn, "result": "gone"}


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Yield a checkout of a commit that is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        root = Path(folder, "checkout")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", root, commit], check=True)
        Path(folder, "quick_first.py").write_text(QUICK_FIRST)
        try:
            yield root
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", root], check=True)


def records(path: Path | None) -> list[dict[str, Any]]:
    """Return what an earlier run wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; all, if none is named")
    parser.add_argument("--sample", type=int, default=12, help="mutants of each room (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=FIRST_TIER, help="which tests, for pytest (default: %(default)s)")
    parser.add_argument("--tests", nargs="+", help="folders of tests to run instead of the room's")
    parser.add_argument("--commit", default="HEAD", help="what to mutate and to test (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file of results to append to, and to go on with")
    parser.add_argument("--replay", type=Path, help="file of results whose mutants to take")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further mutant after so many")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    done, replayed, rooms = records(options.out), records(options.replay), options.rooms or list(ROOMS)

    def tell(record: dict[str, Any]) -> None:
        done.append(record)
        print(*(str(record[name]).partition("\n")[0] for name in SHOWN if name in record), sep="  ", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")

    with worktree(options.commit) as root:
        for room in rooms:
            paths = options.tests or [f"tests/{folder}" for folder in ROOMS[room]]
            paths = [path for path in paths if (root / path).exists()]
            which = [*shlex.split(options.only), *paths]
            mutants = [old for old in replayed if old["room"] == room and old["result"] != "clean"]
            if not options.replay:
                mutants = draw(root, room, options.sample, options.seed)
            finished = [[old.get(name) for name in DRAWN] for old in done]
            clean = next((old for old in done if (old["room"], old["result"]) == (room, "clean")), None)
            if clean is None:
                tell(clean := measure(root, room, which))
            for mutant in mutants:
                if [mutant[name] for name in DRAWN] not in finished and time.monotonic() < end:
                    tell(try_mutant(root, mutant, which, clean))
    results = Counter((old["room"], old["result"]) for old in done)
    for room in rooms:
        print(room, *(f"{name} {results[room, name]}" for name in ("killed", "timeout", "survived", "gone")), sep="  ")


if __name__ == "__main__":
    main()
