"""Sphinx: ``make docs`` builds the site into build/docs, with warnings as errors."""

import os
import re
from pathlib import Path

from hf_muon import __version__

HERE = Path(__file__).parent
# Documents outside of this folder that are pages of the site, too; written here when it is built.
PAGES = {
    "../benchmarks/README.md": "benchmarks.md",
    "../benchmarks/findings.md": "benchmark-findings.md",
    **{
        f"../benchmarks/results/{path.parent.name}/tables.md": f"benchmark-tables-{path.parent.name}.md"
        for path in sorted((HERE.parent / "benchmarks" / "results").glob("*/tables.md"))
    },
    "../evidence/README.md": "evidence.md",
    "../evidence/results/tables.md": "evidence-tables.md",
    "../CHANGELOG.md": "changelog.md",
    "../CONTRIBUTING.md": "contributing.md",
}

# The site's tables of contents, below pages that link to the same ones; a forge would show the blocks as they are.
CONTENTS = {
    "Use it": "quickstart recipes/index programs learning-rate options command-line migrating troubleshooting messages",
    "On your hardware": "what-fits layouts fsdp2 deepspeed ulysses offload bf16-weights momentum",
    "Understand it": (
        "how-it-works researchers rules qk-clip weights exactness limits benchmarks benchmark-findings "
        "benchmark-tables-* evidence evidence-tables api design policy contributing changelog"
    ),
}
RECIPES = {"Programs": "llamafactory trainer trl verl"}

project = "hf_muon"
author = "the authors of hf_muon"
version = release = __version__
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "hf_muon"
html_static_path = ["_static"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "dollarmath"]


def relocated(text: str, folder: str) -> str:
    """Return Markdown of another folder, relative to this one, with links as they are from here."""

    def link(match: re.Match[str]) -> str:
        target, _, fragment = match[1].partition("#")
        if not target or ":" in target:
            return match[0]
        target = os.path.normpath(os.path.join(folder, target))
        return f"]({PAGES.get(target, target)}{'#' * bool(fragment)}{fragment})"

    return re.sub(r"\]\(([^)\s]+)\)", link, text)


def prepare(app: object, name: str, source: list[str]) -> None:
    """Let links to documents lead to their pages, and add tables of contents."""
    if "/" not in name:
        source[0] = relocated(source[0], "")
    for caption, pages in {"index": CONTENTS, "recipes/index": RECIPES}.get(name, {}).items():
        names = "\n".join(pages.split())
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{names}\n```\n"


def setup(app: object) -> None:
    """Write the pages that stand elsewhere, and have Sphinx call `prepare`."""
    for path, page in PAGES.items():
        text = relocated((HERE / path).read_text(encoding="utf-8"), os.path.dirname(path))
        if not text.startswith("# "):
            text = f"# {page.removesuffix('.md').capitalize().replace('-', ' ')}\n\n{text}"
        if not (HERE / page).exists() or (HERE / page).read_text(encoding="utf-8") != text:
            (HERE / page).write_text(text, encoding="utf-8")
    app.connect("source-read", prepare)  # type: ignore[attr-defined]
