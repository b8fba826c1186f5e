"""Every error and warning of the package by its code: tests/golden/messages.txt, and the texts of troubleshooting.

A message is a text of the source that ends in a code, as ``is not an option of muon. [unknown-option]``. ``python -m
tests.messages``, which `make golden` calls, reads them from the source and writes them into both files.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "messages.txt"
PAGE = ROOT / "docs" / "troubleshooting.md"
_CODED = re.compile(r"(.+) \[([a-z0-9]+(?:-[a-z0-9]+)*)\](?::\n  - )?", re.DOTALL)
_RAISED = re.compile(r"(?!NotImplemented|Assertion|Invalid)\w+Error|.*\.(?:warning|warn|BadParameter)|sys\.exit|fail")
_LOGGED = re.compile(r"%(?:\.\d)?[sdgf]")


def messages() -> dict[str, list[str]]:
    """Return the texts of each code, with `...` in place of what varies."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "hf_muon").rglob("*.py")):
        for text in texts_of(path.read_text(encoding="utf-8")):
            if match := _CODED.fullmatch(text):
                found.setdefault(match[2], set()).add(" ".join(match[1].split()))
    return {code: sorted(found[code]) for code in sorted(found)}


def texts_of(source: str) -> Iterator[str]:
    """Yield the texts of a module, docstrings included; constants of the module stand in place of their names."""
    tree = ast.parse(source)
    constants: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            constants[ast.unparse(node.targets[0])] = node.value.value
            yield re.sub(r"\{\w+\}", "...", node.value.value)  # a template of str.format
    templates = {id(node.value) for node in tree.body if isinstance(node, ast.Assign)}
    inside = {id(x) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for x in ast.walk(node) if x != node}
    for node in ast.walk(tree):
        if id(node) in inside or id(node) in templates:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(_part(value, constants) for value in node.values)
            yield re.sub(r"(\.\.\.)+", "...", text)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _LOGGED.sub("...", node.value).replace("%%", "%")


def _part(value: ast.expr, constants: dict[str, str]) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    name = value.value.id if isinstance(value, ast.FormattedValue) and isinstance(value.value, ast.Name) else ""
    return constants.get(name, "...")


def listed(found: dict[str, list[str]]) -> str:
    """Return the golden file."""
    return "".join(f"[{code}]\n" + "".join(f"  {text}\n" for text in texts) for code, texts in found.items())


def without_code(source: str) -> Iterator[str]:
    """Yield the texts of errors and warnings that have no code: none but those that end in another text."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args or not _RAISED.fullmatch(ast.unparse(node.func)):
            continue
        begins = node.args[0]
        while isinstance(begins, ast.BinOp):
            begins = begins.left
        if isinstance(begins, (ast.Constant, ast.JoinedStr)):
            (text,) = texts_of(ast.unparse(begins)) if isinstance(begins, ast.JoinedStr) else (str(begins.value),)
            if not _CODED.fullmatch(text) and not text.endswith(("...", ":", ":\n  - ")):
                yield text


# --- docs/troubleshooting.md: entries of bold texts, each followed by why it comes and what to do


_BOLD = re.compile(r"\*\*(`+) ?(.+?) ?\1\*\*(?: \\)*")


def bold_texts(page: str) -> dict[str, list[str]]:
    """Return the texts in bold on the page by their codes; those without one under an empty code."""
    found: dict[str, list[str]] = {}
    for line in page.split("\n"):
        if bold := _BOLD.fullmatch(line):
            coded = _CODED.fullmatch(bold[2])
            found.setdefault(coded[2] if coded else "", []).append(coded[1] if coded else bold[2])
    return found


def with_texts(page: str, found: dict[str, list[str]]) -> str:
    """Return the page with today's texts of each code that it has: others go, and new ones come behind the old ones."""
    page = re.sub(r"^(\*\*`.*`\*\*)$", r"\1 \\", page, flags=re.MULTILINE)  # a line break behind each text

    def replaced(old: str, code: str, new: list[str]) -> str:
        return page.replace(f"{_line(old, code)}\n", "".join(f"{_line(text, code)}\n" for text in new))

    for code, shown in bold_texts(page).items():
        new = [text for text in found.get(code, ()) if text not in shown]
        for old in [text for text in shown if code in found and text not in found[code]]:
            like = difflib.get_close_matches(old, new, n=1, cutoff=0)
            page = replaced(old, code, like)
            new = [text for text in new if text not in like]
        if new:
            last = bold_texts(page)[code][-1]
            page = replaced(last, code, [last, *new])
    return re.sub(r" \\\n\n", "\n\n", page)


def _line(text: str, code: str) -> str:
    quote = "``" if "`" in text else "`"
    return f"**{quote}{text} [{code}]{quote}** \\"


def problems(page: str, found: dict[str, list[str]]) -> list[str]:
    """Return what is wrong with the entries that only a person can repair."""
    codes = bold_texts(page).keys() - {""}
    lacking = [
        f"[{code}] has no entry: write **`{found[code][0]} [{code}]`** and, below it, why it comes and what to do"
        for code in found
        if code not in codes
    ]
    return lacking + [f"[{code}] is gone: remove its entry" for code in sorted(codes) if code not in found]


def main() -> None:
    """Write what follows from the source."""
    found = messages()
    GOLDEN.write_text(listed(found), encoding="utf-8")
    PAGE.write_text(with_texts(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
