"""Which tests run on which stack, and in which tier.

`make test` runs the first tier and `make test-all` everything; without `--tier`, pytest runs what its arguments name. A
test that takes too long for the first tier has the mark `extended`. A parametrized test with
`extended(but="expression")` keeps the cases in the first tier whose ids match that regular expression.
"""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.readme import TESTS

TIERS = {
    "quick": "what needs torch and transformers alone, in one process",
    "first": "every promise of the README at least once",
    "rest": "what the first tier leaves out",
    "all": "both",
}

# Tests of DeepSpeed and of LLaMA-Factory; elsewhere they would skip.
DEEPSPEED = ("tests/deepspeed/", "tests/e2e/test_deepspeed.py")
LLAMAFACTORY = ("tests/e2e/test_llamafactory", "tests/e2e/test_v1_ulysses.py")
# `make test-cuda` runs these alone, all of them, in an environment that no other test needs.
CUDA = "tests/cuda/"
# Tests of code that depends on torch alone run once, on the newest stack: all stacks have the same torch.
TORCH_ALONE = (
    *("tests/chaos/", "tests/diagnostics/", "tests/docs/", "tests/distributed/", "tests/math/", "tests/storage/"),
    *("tests/optimizer/", "tests/test_benchmarks.py", "tests/test_bounds.py", "tests/test_config.py"),
    *(
        "tests/test_deprecations.py",
        "tests/test_imports.py",
        "tests/test_rehearsal.py",
        "tests/test_packaging.py",
        "tests/test_promises.py",
        "tests/test_temporary.py",
        "tests/test_tiers.py",
        "tests/test_workers.py",
    ),
)
# In this file accelerate prepares an optimizer.
OF_ACCELERATE = "tests/optimizer/test_loading.py"
# DeepSpeed 0.18.4 loses gradients that later versions do not, and only this stack has it. It handles bf16 steps that
# overflow, and fp32 sums of bf16 gradients, differently: those tests hold for later versions alone.
OLD_DEEPSPEED = re.compile(
    r"tests/deepspeed/test_gradients\.py::.*(2-cpu-4|own_flag|are_clipped|forgets|dropped_do_not_stay)"
)
# Tests that the first tier runs with the older versions: LLaMA-Factory itself, the hooks, the Trainer, and the routes.
OLDER_VERSIONS_FIRST = (
    *("tests/e2e/test_llamafactory", "tests/e2e/test_examples_llamafactory.py", "tests/e2e/test_deepspeed.py"),
    *("tests/integrations/", "tests/routing/test_golden.py", "tests/test_autoload.py", "tests/deepspeed/"),
)
# These start processes of a Trainer script, which the end-to-end tests of that stack start anyway.
NEWEST_FIRST = "tests/integrations/test_transformers.py::TestProcesses"


def stack() -> str:
    """Return the name of the stack that is installed here."""
    packages = (name for name in ("llamafactory", "deepspeed") if importlib.util.find_spec(name))
    return next(packages, "newest")


def belongs(nodeid: str, name: str) -> bool:
    """Return whether a stack runs a test."""
    if nodeid.startswith(CUDA):
        return False
    if name == "deepspeed":
        return nodeid.startswith(DEEPSPEED)
    if name == "llamafactory":
        if nodeid.startswith("tests/deepspeed/"):
            return OLD_DEEPSPEED.match(nodeid) is not None
        return nodeid.startswith(OF_ACCELERATE) or not nodeid.startswith(TORCH_ALONE)
    return not nodeid.startswith((*DEEPSPEED, *LLAMAFACTORY))


def is_extended(item: pytest.Item) -> bool:
    """Return whether a mark leaves this case of a test out of the first tier."""
    case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    return any(not re.search(mark.kwargs.get("but", "(?!)"), case) for mark in item.iter_markers("extended"))


def shows_older_versions(nodeid: str) -> bool:
    """Return whether the first tier of LLaMA-Factory's stack has a test, unless it is extended."""
    return nodeid.startswith(OLDER_VERSIONS_FIRST) and not nodeid.startswith(NEWEST_FIRST)


def is_first(item: pytest.Item, name: str) -> bool:
    """Return whether the first tier of a stack has a test that belongs to the stack."""
    if is_extended(item):
        return False
    return name != "llamafactory" or shows_older_versions(item.nodeid)


def is_quick(item: pytest.Item, name: str) -> bool:
    """Return whether a test of the first tier starts no process, or none that takes long."""
    ranks = "pools" in getattr(item, "fixturenames", ())
    return is_first(item, name) and not ranks and not item.get_closest_marker("slow")


def select(items: list[pytest.Item], tier: str, name: str) -> list[pytest.Item]:
    """Return the tests of a tier on a stack."""
    here = [item for item in items if belongs(item.nodeid, name)]
    if tier == "quick":
        return [item for item in here if is_quick(item, name)]
    return [item for item in here if tier == "all" or is_first(item, name) is (tier == "first")]


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "; ".join(f"{tier}: {meaning}" for tier, meaning in TIERS.items())
    parser.addoption("--tier", choices=list(TIERS), help=f"run the tests of one tier on this stack ({words})")


def lost(collected: list[pytest.Item], selected: list[pytest.Item], name: str) -> list[str]:
    """Return the tests of README promises whose files were collected, but which a stack's first tier lacks."""
    files = {item.nodeid.partition("::")[0] for item in collected}
    there = {item.nodeid.partition("[")[0] for item in selected}
    return sorted(
        test
        for test in TESTS - there
        if test.partition("::")[0] in files
        and belongs(test, name)
        and (name != "llamafactory" or shows_older_versions(test))
    )


def keep_tier(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are not in the requested tier."""
    if tier := config.getoption("--tier"):
        name = stack()
        selected = select(items, tier, name)
        whole = not any("::" in argument for argument in config.args)
        if tier == "first" and whole and (missing := lost(items, selected, name)):
            raise pytest.UsageError(f"promised in README.md, and not in the first tier of {name}: {', '.join(missing)}")
        if left_out := [item for item in items if item not in set(selected)]:
            config.hook.pytest_deselected(items=left_out)
        items[:] = selected
