"""The declarations of pyproject.toml, and the files of the distributions."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import hf_muon
from hf_muon.integrations.deepspeed.engine import wrapping
from hf_muon.optimizer.muon import Muon
from hf_muon.versions import OLDEST, TESTED, remark
from scripts.pin import bounds
from scripts.release import complaints, for_index, version

ROOT = Path(__file__).parents[1]


def test_versions_are_those_of_pyproject_of_the_quick_start_and_of_llamafactory():
    rows = re.findall(
        r"^\| (LLaMA-Factory|\w+)[^|]*\| ([\d.]+) \| [^|]*?([\d.]+) \|$",
        (ROOT / "docs/quickstart.md").read_text(),
        re.MULTILINE,
    )
    documented = {package.lower().replace("-", ""): (oldest, newest) for package, oldest, newest in rows}
    assert documented.keys() - {"python"} == TESTED.keys()
    pins = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "constraints" / "llamafactory.txt").read_text(), re.MULTILINE))
    for package, (oldest, newest) in TESTED.items():
        assert documented[package][0] == oldest
        assert f"{documented[package][1]}.".startswith(f"{newest}.")
        assert package == "llamafactory" or bounds()[package] == oldest
        assert package in ("torch", "llamafactory") or pins[package].removesuffix(".0") == oldest


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.18.3", "too old: 0.18.4 or newer"),
        ("0.18.4", ""),
        ("0.19.99", ""),
        ("0.20.0.dev1", "newer than tested: 0.19"),
    ],
)
def test_what_is_said_of_a_version(version, words):
    assert remark("deepspeed", version) == words
    assert remark("unknown", version) == ""


@pytest.mark.parametrize("package", ["torch", "deepspeed"])
def test_an_older_version_is_refused(package, monkeypatch):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Muon([weight])
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == package else version(name))
    with pytest.raises(RuntimeError, match=rf"{package} {OLDEST[package]} .*0\.1.*\[too-old\]"):
        Muon([weight]) if package == "torch" else wrapping(optimizer, {}).__enter__()


# --- what is released


def test_version_citation_and_changelog_agree():
    assert complaints() == []
    assert version() == hf_muon.__version__


def test_a_tag_is_released_only_when_nothing_is_missing(tmp_path):
    names = ["pyproject.toml", "CITATION.cff", "CHANGELOG.md", "hf_muon/__init__.py"]
    (tmp_path / "hf_muon").mkdir()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    url = "https://example.com/hf_muon"
    made = {
        "pyproject.toml": lambda text: text.replace("hf-muon.invalid", "example.com"),
        "CITATION.cff": lambda text: re.sub(
            r"^version: .*$",
            f"version: 0.1.0\ndate-released: 2027-01-02\nrepository-code: {url}",
            text,
            flags=re.MULTILINE,
        ),
        "CHANGELOG.md": lambda text: re.sub(r"^## .*$", "## [0.1.0] - 2027-01-02", text, count=1, flags=re.MULTILINE),
        "hf_muon/__init__.py": lambda text: text.replace(version(), "0.1.0"),
    }
    for name in names:
        (tmp_path / name).write_text(made[name](texts[name]), encoding="utf-8")
    assert complaints(tmp_path, "v0.1.0") == []
    assert len(complaints(tmp_path, "v0.1.1")) == 1
    for name in names:
        (tmp_path / name).write_text(texts[name], encoding="utf-8")
        assert complaints(tmp_path, "v0.1.0"), name
        (tmp_path / name).write_text(made[name](texts[name]), encoding="utf-8")


def test_the_readme_of_the_index_needs_no_other_file():
    """Expect complete links that lead to files of the repository, no placeholder, and the same script."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    url = "https://example.com/hf_muon"
    text = for_index(readme, url, "v0.1.0")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [link for link in links if "://" not in link] == []
    ours = [re.sub(r"(raw|blob)/v0\.1\.0/", "", link[len(url) + 1 :]) for link in links if link.startswith(url)]
    assert len(ours) > 10
    assert [path for path in ours if not (ROOT / path.partition("#")[0]).is_file()] == []
    assert "URL_OF_THIS_REPOSITORY" not in text
    assert "<!--" not in text
    assert re.search('pip install "?hf_muon', text)
    scripts = (re.search(r"^```python\n.*?^```", page, re.MULTILINE | re.DOTALL)[0] for page in (readme, text))
    assert len(set(scripts)) == 1


def build(folder, what):
    """Build a distribution of a folder, beside it, with the build system of pyproject.toml."""
    code = f"import setuptools.build_meta as build; print(build.build_{what}('..'))"
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return folder.parent / process.stdout.split()[-1]


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")
def test_the_sdist_is_the_repository_and_the_wheel_the_package(tmp_path):
    """Check that nothing tracked is missing from either, and that sdist and checkout build one wheel."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {name: (ROOT / name).read_bytes() for name in tracked.split("\0") if (ROOT / name).is_file()}
    clone = tmp_path / "clone" / "checkout"
    for name, content in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes(content)
    with tarfile.open(build(clone, "sdist")) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("hf_muon-*")
    assert [name for name in files if not (unpacked / name).is_file()] == []
    wheel = contents(build(unpacked, "wheel"))
    assert wheel == contents(build(clone, "wheel"))
    package = {name: content for name, content in files.items() if name.startswith(("hf_muon/", "hf_muon_autoload"))}
    assert {name: content for name, content in wheel.items() if ".dist-info/" not in name} == package
