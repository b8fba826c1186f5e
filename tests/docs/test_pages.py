"""Every snippet of README.md and the documentation runs, or is checked as far as it can be without what it needs.

A comment before a block of Python, ``<!-- not run: why -->``, leaves it out; it must parse nevertheless.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from hf_muon.cli import parse
from hf_muon.config import MuonConfig
from hf_muon.optim_args import parse_optim_args

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# By docs/conf.py.
WRITTEN = ("benchmark", "evidence", "changelog", "contributing")
BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n+)?```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What a snippet may use without making it.
BEFORE = """
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments
config = Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8)
model = Qwen3ForCausalLM(config)
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
loader = torch.utils.data.DataLoader(data, batch_size=2)
"""


def blocks(*languages):
    """Return the blocks of all pages in some languages, as parameters of a test; equal ones once."""
    found = {
        match[0]: pytest.param(match[3], bool(match[1]), id=f"{page.relative_to(ROOT)}-{k}")
        for page in reversed(PAGES)
        if not page.name.startswith(WRITTEN)
        for k, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")))
        if match[2] in languages
    }
    return list(found.values())


@pytest.mark.parametrize(("block", "left_out"), blocks("python"))
def test_python_runs(block, left_out, tmp_path, monkeypatch):
    ast.parse(block)
    if left_out:
        return
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(block)
    names = {"torch": torch, "__file__": str(script), "__name__": "__main__"}
    exec(BEFORE, names)
    exec(compile(block, script, "exec"), names)


def test_the_quick_start_has_the_script_of_the_readme():
    readme, start = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/quickstart.md"))
    assert next(match[0] for match in BLOCK.finditer(readme) if match[2] == "python") in start


def anchors(page):
    """Return the anchors that a forge gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not page.name.startswith(WRITTEN)], ids=lambda page: page.stem
)
def test_links_lead_to_files_and_headings_on_any_forge(page):
    """Not to pages that only the site has: docs/conf.py writes those, and git ignores them."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if "://" not in target:
            file = (page.parent / target) if target else page
            assert file.exists(), target
            assert not file.name.startswith(WRITTEN) or file.parent.name != "docs", target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize(("block", "_"), blocks("yaml"))
def test_yaml_has_options_that_exist(block, _):
    for settings in filter(None, yaml.safe_load_all(block)):
        for options in (settings.get("optim_args"), settings.get("optim_config")):
            named = parse_optim_args(options) if isinstance(options, str) else dict(options or {})
            assert named.keys() - {"name"} <= set(MuonConfig.__dataclass_fields__)


@pytest.mark.parametrize(("block", "_"), blocks("bash", "console"))
def test_commands_are_understood(block, _):
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["hf-muon"] and words[1:]:
            parse(words[1:])
        if words[:1] == ["make"]:
            assert re.search(rf"^(\w+ )*{words[1]}( \w+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE)
