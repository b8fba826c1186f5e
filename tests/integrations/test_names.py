"""Names that all integrations share: the mark of a patch, and flags of other packages."""

from __future__ import annotations

from enum import Enum

import pytest

from hf_muon.integrations.names import is_muon, is_ours, is_set, mark


def test_marked_patches_are_recognized():
    def patch():
        pass

    assert not is_ours(patch)
    assert not is_ours(None)
    assert mark(patch) is patch
    assert is_ours(patch)


def test_both_names_are_ours_unless_another_package_owns_the_member():
    class Optimizers(str, Enum):
        MUON = "muon"
        ADAMW = "adamw"

    class Marked(str, Enum):
        MUON = "hf_muon"

    mark(Marked.MUON)
    assert is_muon("muon")
    assert is_muon("hf_muon")
    assert is_muon(Marked.MUON)
    assert not any(is_muon(optim) for optim in (Optimizers.MUON, Optimizers.ADAMW, "adamw", "HF_MUON", None))


@pytest.mark.parametrize(
    ("package", "text", "expected"),
    [
        ("accelerate", "true", True),
        ("accelerate", " YES ", True),
        ("accelerate", "y", False),
        ("accelerate", "", False),
        ("llamafactory", "y", True),
        ("llamafactory", "1", True),
        ("llamafactory", "yes", False),
    ],
)
def test_flags_mean_what_the_other_package_reads(package, text, expected, monkeypatch):
    monkeypatch.setenv("SOME_FLAG", text)
    assert is_set(package, "SOME_FLAG") is expected
    monkeypatch.delenv("SOME_FLAG")
    assert not is_set(package, "SOME_FLAG")
