"""The declarations of pyproject.toml, and the files of a source distribution."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
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


def test_data_files_are_in_the_wheel():
    """Check that `package-data` names every file of the package that is no module."""
    (patterns,) = re.findall(r"^hf_muon = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    files = [path.relative_to(ROOT / "hf_muon") for path in (ROOT / "hf_muon").rglob("*") if path.is_file()]
    data = [path for path in files if path.suffix not in (".py", ".pyc")]
    assert {str(path) for path in data} >= {"cli/known_configs.yaml"}
    assert all(any(path.match(pattern) for pattern in json.loads(patterns)) for path in data), data


def test_the_sdist_is_the_whole_repository(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    clone = tmp_path / "clone"
    for name in tracked.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    build = "import setuptools.build_meta as build; build.build_sdist('..')"
    process = subprocess.run([sys.executable, "-c", build], cwd=clone, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    missing = [str(path.relative_to(clone)) for path in clone.rglob("*") if path.is_file()]
    missing = [name for name in missing if ".egg-info" not in name and name not in names]
    assert not missing, missing
