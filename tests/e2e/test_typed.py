"""The pages, typed: each block of commands runs as it stands, from a new folder and in a new environment.

What a page takes from elsewhere stands in the folder under the name that the page gives it: the repository, models,
data sets, a checkout of LLaMA-Factory, files of one's own. Packages other than hf_muon are those of an environment of
`make install`, so that pip finds them installed. `cpu_ranks` stands for GPUs, and ends runs of
examples after two steps.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import CPU_RANKS, ROOT, run
from tests.support import fixtures_text

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/quickstart.md",
    "docs/learning-rate.md",
    *sorted(f"docs/recipes/{p.name}" for p in (ROOT / "docs/recipes").glob("*.md")),
]
NEWEST, LLAMAFACTORY = ".venv", ".venv-llamafactory"
INSTALLED = "muon: [0-9,]+ parameters"
TABLE = "which parameter goes where"
ACCEPTED = "optim: muon is accepted without any import"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git"),
]


@dataclasses.dataclass(frozen=True)
class Typed:
    """How a block is typed.

    Attributes:
        shows: what is printed, and how often.
        folder: where; `hf_muon` is the checkout that README's first block makes.
        packages: the environment of `make install` whose packages are there.
        first: blocks that are typed before it, in the same folder and shell.
    """

    shows: tuple[str, int]
    folder: str = "."
    packages: str = NEWEST
    first: tuple[str, ...] = ("README.md 1",)


LLAMAFACTORY_FIRST = ("docs/recipes/llamafactory.md 1",)
BLOCKS: dict[str, Typed | str] = {
    "README.md 1": Typed(shows=(ACCEPTED, 1), first=()),
    "README.md 2": Typed(shows=("muon: [0-9]+ parameters|per rank: mean", 2)),
    "README.md 3": "CI runs `make test`, and test_demo.py the demo; `make finetune` fetches 93 MB",
    "CONTRIBUTING.md 1": "test_examples_of_running_a_test types it in this checkout, which has the environments",
    "docs/quickstart.md 1": "README.md 1, without its comments",
    "docs/quickstart.md 2": Typed(shows=("muon: [0-9]+ parameters|per rank: mean", 2)),
    "docs/quickstart.md 3": Typed(shows=("muon: [0-9]+ parameters", 1)),
    "docs/quickstart.md 4": Typed(shows=("muon_report.html", 1)),
    "docs/learning-rate.md 1": Typed((TABLE, 3), "hf_muon"),
    "docs/recipes/llamafactory.md 1": Typed(
        shows=("Successfully installed (llamafactory|hf_muon)-", 2), packages=LLAMAFACTORY, first=()
    ),
    "docs/recipes/llamafactory.md 2": Typed((TABLE, 1), "hf_muon", LLAMAFACTORY, LLAMAFACTORY_FIRST),
    "docs/recipes/llamafactory.md 3": Typed((TABLE, 1), "hf_muon", LLAMAFACTORY, LLAMAFACTORY_FIRST),
    "docs/recipes/llamafactory.md 4": Typed((TABLE, 2), "LLaMA-Factory", LLAMAFACTORY, LLAMAFACTORY_FIRST),
    "docs/recipes/trainer.md 1": Typed((TABLE, 3), "hf_muon", NEWEST),
    "docs/recipes/trl.md 1": Typed((TABLE, 4), "hf_muon"),
    "docs/recipes/verl.md 1": "verl needs GPUs; tests/integrations/test_verl.py does as its engine does",
}


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of the blocks of all pages in a language, such as `README.md 1`."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for k, block in enumerate(re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL), 1):
            yield f"{page} {k}", block


COMMANDS = dict(blocks("bash"))
SCRIPT = dict(blocks("python"))["README.md 1"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Return a repository with the files of this one as they are now."""
    folder = tmp_path_factory.mktemp("repository")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    user = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*user, "commit", "-q", "-m", "as it is"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


class Computer:
    """A home folder and its shells, in which the environment `env` is active.

    Args:
        home: an empty folder.
        packages: the environment of `make install` whose packages are there.
    """

    def __init__(self, home: Path, packages: str) -> None:
        self.home, libraries, programs = home / "home", home / "packages", home / "bin"
        prefix = Path(sys.prefix) if packages == NEWEST else ROOT / packages
        if not prefix.is_dir():
            pytest.skip(f"no {packages}; `make install` makes it")
        for folder in (self.home, libraries, programs):
            folder.mkdir()
        # Links outside of `env`, which pip does not change. Without what the pages install themselves.
        for entry in Path(sysconfig.get_path("purelib", vars={"base": str(prefix)})).iterdir():
            if not entry.name.startswith(
                ("hf_muon", "__editable__", "llamafactory", "torchaudio", "pip", "setuptools")
            ):
                (libraries / entry.name).symlink_to(entry)
        for program in ("accelerate", "torchrun", "trl"):
            if (prefix / "bin" / program).exists():
                _, _, code = (prefix / "bin" / program).read_text(encoding="utf-8").partition("\n")
                (programs / program).write_text(f"#!/usr/bin/env python\n{code}", encoding="utf-8")
                (programs / program).chmod(0o755)
        self._exports = self.printed = ""
        self._variables = {
            "PYTHONPATH": os.pathsep.join([str(CPU_RANKS), str(libraries)]),
            "PATH": os.pathsep.join([str(programs), f"{sys.base_prefix}/bin", os.environ["PATH"]]),
            "PIP_CONSTRAINT": str(prefix / "constraints.txt"),
            "DISABLE_VERSION_CHECK": "",
            "NPROC_PER_NODE": "2",
        }

    def type(self, text: str, folder: str = ".") -> str:
        """Run a block of commands in a new shell, and return what it prints."""
        text = text.replace("/path/to", str(self.home))
        if folder != "." and not (self.home / "LLaMA-Factory").is_dir():
            self._write_files_of_examples()
        script = f". {self.home}/env/bin/activate\n{self._exports}{text}"
        variables = self._variables | ({"HF_MUON_TESTS_STEPS": "2"} if folder != "." else {})
        printed = run(["bash", "-euo", "pipefail", "-c", script], cwd=self.home / folder, **variables)
        self._exports += "".join(re.findall(r"^export .*\n", text, re.MULTILINE))  # "in each shell"
        return printed

    def own(self, repository: Path) -> None:
        """Write what a user has: files, models and data sets by the names that pages and examples give them."""
        subprocess.run([f"{sys.base_prefix}/bin/python3", "-m", "venv", "env"], cwd=self.home, check=True)
        (self.home / "URL_OF_THIS_REPOSITORY").symlink_to(repository)
        (self.home / "script.py").write_text(SCRIPT, encoding="utf-8")

    def _write_files_of_examples(self) -> None:
        checkout, theirs = self.home / "hf_muon", self.home / "LLaMA-Factory"
        model = fixtures_text.build_model_folder(self.home / "model")
        for folder in (checkout, theirs):
            for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"):
                shutil.copytree(model, folder / name)
        texts = [{"text": text} for text in fixtures_text.texts()]
        fixtures_text.write_jsonl(checkout / "my_texts" / "texts.jsonl", texts)
        fixtures_text.write_messages(checkout / "trl-lib" / "Capybara")
        for name in ("ultrafeedback_binarized", "DeepMath-103K"):
            fixtures_text.write_preferences(checkout / "trl-lib" / name)
        reward = "def score(completions, **_):\n    return [float(len(str(text))) for text in completions]\n"
        (checkout / "my_rewards.py").write_text(reward, encoding="utf-8")
        data = fixtures_text.write_llamafactory_data(theirs / "data")
        names = {name: {"file_name": "tiny_sft.jsonl"} for name in ("identity", "alpaca_en_demo")}
        (data / "dataset_info.json").write_text(json.dumps(names), encoding="utf-8")
        fixtures_text.write_v1_data(data, data).rename(data / "v1_sft_demo.yaml")


@pytest.fixture(scope="module")
def computer(tmp_path_factory, repository):
    """Return a function that returns a computer on which some blocks were typed."""
    ready: dict[tuple[str, ...], Computer] = {}

    def get(packages: str, *typed: str) -> Computer:
        key = (packages, *typed)
        if key not in ready:
            ready[key] = own = Computer(tmp_path_factory.mktemp("computer"), packages)
            own.own(repository)
            own.printed = "".join(map(own.type, typed))
        return ready[key]

    return get


# --- README's three steps


STARTS = {
    "script": "python script.py",
    "module": "python -m script",
    "torchrun": "torchrun --nproc-per-node 1 script.py",
    "accelerate": "accelerate launch script.py",
    # Whose path begins with an empty text, as that of `python -c`.
    "notebook": """python -c "import runpy; runpy.run_path('script.py', run_name='__main__')" """,
    "beside": "mkdir beside && cp script.py beside && cd beside && python script.py",
}


@pytest.mark.extended
@pytest.mark.second_tier("^notebook$")
@pytest.mark.parametrize(
    ("editable", "start"),
    [(False, start) for start in STARTS] + [(True, "script"), (True, "notebook")],
    ids=[*STARTS, "editable-script", "editable-notebook"],
)
def test_the_script_trains_in_the_folder_of_the_checkout(editable, start, computer):
    """Where the folder of the checkout has the name of the package."""
    install = COMMANDS["README.md 1"]
    printed = computer(NEWEST, install.replace("pip install", "pip install -e") if editable else install).type(
        STARTS[start]
    )
    assert re.search(INSTALLED, printed), printed
    assert "train_loss" in printed


# --- all blocks


def test_every_block_is_typed_or_has_a_reason():
    assert BLOCKS.keys() == COMMANDS.keys()
    assert re.sub(" +#.*", "", COMMANDS["README.md 1"]) == COMMANDS["docs/quickstart.md 1"]


@pytest.mark.first_tier(r"README.md 1")
@pytest.mark.second_tier(r"README|quickstart.md 4|llamafactory.md [12]|trainer.md")
@pytest.mark.parametrize("name", [name for name, typed in BLOCKS.items() if isinstance(typed, Typed)])
def test_block(name, computer):
    typed = BLOCKS[name]
    if typed.first:
        printed = computer(typed.packages, *(COMMANDS[first] for first in typed.first)).type(
            COMMANDS[name], typed.folder
        )
    else:
        printed = computer(typed.packages, COMMANDS[name]).printed
    words, count = typed.shows
    assert len(re.findall(words, printed)) == count, printed


@pytest.mark.extended
def test_examples_of_running_a_test():
    missing = [packages for packages in (NEWEST, LLAMAFACTORY) if not (ROOT / packages).is_dir()]
    if missing:
        pytest.skip(f"no {missing}; `make install` makes them")
    variables = {"PYTEST_ADDOPTS": "--collect-only"}  # that they find tests: others run these
    printed = run(["bash", "-euo", "pipefail", "-c", COMMANDS["CONTRIBUTING.md 1"]], cwd=ROOT, **variables)
    assert len(re.findall(r"[1-9]\d*(/\d+)? tests? collected", printed)) == 3, printed
