"""Files that are written completely or not at all."""

from __future__ import annotations

import pytest

from hf_muon.integrations.archives import complete_or_absent


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path):
    target = tmp_path / "page.html"
    with complete_or_absent(target) as file:
        file.write_text("old")
    with pytest.raises(RuntimeError), complete_or_absent(target) as file:
        raise RuntimeError(file.write_text("half of the new"))
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
