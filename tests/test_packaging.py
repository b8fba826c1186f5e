"""The declarations of pyproject.toml, and the files of the distributions."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hf_muon.integrations.transformers.refusals import OLDEST

ROOT = Path(__file__).parents[1]


def bounds():
    return dict(re.findall(r'^    "(\w+)>=([\d.]+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


def test_the_oldest_versions_are_refused_and_tested():
    """Check that CI runs the oldest allowed versions, with LLaMA-Factory, and that errors name these versions."""
    declared = bounds()
    pins = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "constraints-llamafactory.txt").read_text(), re.MULTILINE))
    for package in ("transformers", "accelerate", "peft"):
        assert pins[package].removesuffix(".0") == declared[package]
    assert OLDEST.items() <= declared.items()


def build(folder, what):
    """Build a distribution of a folder, beside it, with the build system of pyproject.toml."""
    code = f"import setuptools.build_meta as build; print(build.build_{what}('..'))"
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return folder.parent / process.stdout.split()[-1]


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_sdist_is_the_repository_and_the_wheel_the_package(tmp_path):
    """Check that nothing tracked is missing from either, and that sdist and checkout build one wheel."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {name: (ROOT / name).read_bytes() for name in tracked.split("\0") if (ROOT / name).is_file()}
    clone = tmp_path / "clone" / "checkout"
    for name, content in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes(content)
    with tarfile.open(build(clone, "sdist")) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("hf_muon-*")
    missing = [name for name in files if not (unpacked / name).is_file()]
    assert not missing, missing
    wheel = contents(build(unpacked, "wheel"))
    assert wheel == contents(build(clone, "wheel"))
    package = {name: content for name, content in files.items() if name.startswith(("hf_muon/", "hf_muon_autoload"))}
    assert {name: content for name, content in wheel.items() if ".dist-info/" not in name} == package
