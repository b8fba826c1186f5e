"""The README's table of options, generated from `MuonConfig`: ``python -m tests.option_table`` writes it."""

from __future__ import annotations

from pathlib import Path

from hf_muon.config import OPTIONS
from hf_muon.options.declaration import Option, as_text

README = Path(__file__).parent.parent / "README.md"
BEGIN = "<!-- options: generated from hf_muon/config.py by `python -m tests.option_table` -->\n"
END = "<!-- end of options -->\n"


def default_of(option: Option) -> str:
    """Return the default column: where the value comes from, and Python's own default."""
    if option.default is None:
        return option.fallback
    text = f"`{option.default}`" if isinstance(option.default, str) else as_text(option.default)
    return f"{option.fallback}; in Python {text}" if option.fallback else text


def table() -> str:
    """Return the table as Markdown."""
    rows = [("option", "default", "meaning", "source"), ("---",) * 4]
    rows += [(f"`{name}`", default_of(option), option.meaning, option.source) for name, option in OPTIONS.items()]
    return "".join(f"|{'|'.join(cell(text) for text in row)}|\n" for row in rows)


def cell(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return f" {escaped} " if escaped else " "


def with_table(readme: str) -> str:
    """Return the README with today's table between its markers."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"README.md lacks the lines {BEGIN!r} and {END!r}"
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
