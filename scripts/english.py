"""List words and turns in pages, docstrings and comments that readers of English stumble over; exit with 1 if any."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/findings.md")),
    ROOT / "evidence" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
SOURCES = [path for folder in ("hf_muon", "benchmarks", "evidence") for path in sorted((ROOT / folder).rglob("*.py"))]
# Written from other files.
GENERATED = re.compile(r"docs/(benchmark|evidence|changelog|contributing)|docs/options\.md")

# What to write instead of a word or turn.
PATTERNS = {
    r"\bbesides?\b": "next to, compared with, in addition",
    r"\balone\b": "only",
    r"\b(?:stands|stood)\b": "is",
    r"\bof (?:its|their|our|your) own(?: ?[,.;:)]| (?:and|for|in|is|are|of|on|or|than|that|to|with)\b|$)": "its own",
    r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|\w+er\b)\w+": "is not a",
    r"(?<!side by )(?<!-)\bsides?\b(?! by side|-| effect)": "dimension, argument, configuration",
    r"\bcells?\b": "entry, combination",
    r"\bAdamW half\b|\b(?:Muon|AdamW)'s half\b": "the parameters of AdamW",
    r"\banew\b": "again",
    r"\bin silence\b|\bwithout a word\b": "silently",
    r"\btold\b": "logged, distinguished",
    r"\b(?:what|which) (?:it|they) (?:has|have)\b": "its",
    r"\bas far as\b": "if, to the extent that",
    r"\bgoe?s? on\b": "continues",
    r"\bput right\b": "fixed",
    r"\b(?:nobody|somebody) (?:asks|needs|wants|takes)\b": "is not needed",
    r"\bhands? (?:out|over|back)\b": "passes, returns",
    r"\bunder way\b": "in flight",
    r"\bfew bits\b": "low precision",
}
BAD = {pattern: re.compile(pattern, re.IGNORECASE) for pattern in PATTERNS}
RIGHT = {"evidence/": re.compile("cells?|sides?", re.IGNORECASE)}  # words that evidence/README.md defines, by folder


def prose(path):
    """Yield the number and text of each line of prose, without code, links, quotations and names of arguments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
        lines = list(enumerate(text.splitlines(), 1))
    else:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        lines = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # docstrings, of attributes too
                lines += enumerate(str(node.value.value).splitlines(), node.lineno)
    for number, line in sorted(lines):
        yield number, re.sub(r"^ +\*{0,2}\w+: |`+[^`]*`+|\]\([^)]*\)|\"[^\"]*\"", "", line)


def found(path):
    """Return a line for each word to avoid: where it is, what to write instead, and the sentence."""
    name = str(path.relative_to(ROOT))
    return [
        f"{name}:{number}: {match[0]!r}, write: {PATTERNS[pattern]} | {line.strip()}"
        for number, line in prose(path)
        for pattern, bad in BAD.items()
        if (match := bad.search(line))
        and not any(name.startswith(folder) and right.fullmatch(match[0]) for folder, right in RIGHT.items())
    ]


if __name__ == "__main__":
    checked = [path for path in (*PAGES, *SOURCES) if not GENERATED.match(str(path.relative_to(ROOT)))]
    lines = [line for path in checked for line in found(path)]
    print(*lines, sep="\n", end="\n" * bool(lines))
    sys.exit(bool(lines))
