"""The tables of docs/options.md, generated from `MuonConfig`: ``python -m scripts.option_table`` writes them."""

from __future__ import annotations

from pathlib import Path

from hf_muon.config import FRONT, OPTIONS
from hf_muon.optim_args import as_text
from hf_muon.options.declaration import Option

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
BEGIN = "<!-- options: generated from hf_muon/config.py by `python -m scripts.option_table` -->\n"
END = "<!-- end of options -->\n"
SECTIONS = {
    "The options in front": " ".join(FRONT),
    "For experiments: rates and decay": "adjust_lr_fn update_rms lr_scales",
    "For experiments: which weights go where": "per_head",
    "For experiments: mathematics": (
        "momentum nesterov ns_coefficients ns_steps ns_dtype adamw_betas adamw_eps weight_rounding"
    ),
    "For experiments: rules, which change the step": ("momentum_warmup normalize balance weight_decay_mode qk_clip"),
    "For experiments: limits": "max_batch_bytes comm_dtype",
}


def default_of(option: Option) -> str:
    """Return the default column: where the value comes from, and Python's own default."""
    if option.default is None:
        return option.fallback
    text = f"`{option.default}`" if isinstance(option.default, str) else as_text(option.default)
    return f"{option.fallback}; in Python {text}" if option.fallback else text


def tables() -> str:
    """Return a table for each section as Markdown; options without a section come first."""
    listed = {name for names in SECTIONS.values() for name in names.split()}
    sections = {"Others": " ".join(name for name in OPTIONS if name not in listed)} | SECTIONS
    return "\n".join(f"## {title}\n\n{table(names.split())}" for title, names in sections.items() if names)


def table(names: list[str]) -> str:
    """Return the table of some options."""
    rows = [("option", "default", "meaning", "source"), ("---",) * 4]
    rows += [
        (f"`{name}`", default_of(option), option.meaning, option.source.replace("(docs/", "("))
        for name, option in ((name, OPTIONS[name]) for name in names)
    ]
    return "".join(f"|{'|'.join(cell(text) for text in row)}|\n" for row in rows)


def cell(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return f" {escaped} " if escaped else " "


def with_tables(page: str) -> str:
    """Return the page with today's tables between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"docs/options.md lacks the lines {BEGIN!r} and {END!r}"
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
