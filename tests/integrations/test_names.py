"""Names that all integrations share: of the optimizer, and flags of other packages."""

from __future__ import annotations

from enum import Enum

import pytest

from hf_muon.integrations.names import is_muon, is_set


def test_both_names_are_ours_also_as_members_of_an_enum_whoever_owns_it():
    class Optimizers(str, Enum):
        MUON = "muon"
        ADAMW = "adamw"

    assert all(is_muon(optim) for optim in ("muon", "hf_muon", Optimizers.MUON))
    assert not any(is_muon(optim) for optim in (Optimizers.ADAMW, "adamw", "HF_MUON", None, 3, ["muon"]))


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
