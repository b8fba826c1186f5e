"""Detection of damaged checkpoint files; `tests/e2e/test_trainer_resume.py` resumes from such checkpoints."""

from __future__ import annotations

import pytest
import torch

from hf_muon.integrations.archives import complete_or_absent
from hf_muon.integrations.transformers.checkpoint_files import damaged_files, earlier_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    """Make a folder with the files that Trainer may save, in one process or under FSDP2."""
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    for name in ("optimizer.pt", "optimizer.bin", "scheduler.pt"):
        torch.save({"x": torch.arange(1000.0), "y": [1, 2]}, folder / name)
    return folder


def test_undamaged(checkpoint):
    assert damaged_files(checkpoint) == []


def test_empty(tmp_path):
    assert damaged_files(tmp_path) == []


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin", "scheduler.pt"])
@pytest.mark.parametrize("part", [0, 0.3, 0.9])
def test_cut_off(checkpoint, name, part):
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[: int(part * len(content))])
    (damage,) = damaged_files(checkpoint)
    assert damage.startswith(f"{checkpoint / name} is cut off")


def test_one_bit_of_one_number(checkpoint):
    """Flip a bit that loading does not notice: the number is still a number."""
    file = checkpoint / "optimizer.pt"
    content = bytearray(file.read_bytes())
    place = content.index(torch.tensor([300.0, 301.0]).numpy().tobytes())
    content[place] ^= 1
    file.write_bytes(content)
    (damage,) = damaged_files(checkpoint)
    assert damage.startswith(f"{file} has changed since it was written (checksum of ")


def test_earlier_checkpoint(checkpoint):
    assert earlier_checkpoint(checkpoint) is None
    for name in ("checkpoint-3", "checkpoint-10", "checkpoint-30", "checkpoint-best"):
        (checkpoint.parent / name).mkdir()
    assert earlier_checkpoint(checkpoint) == checkpoint.parent / "checkpoint-10"
    assert earlier_checkpoint(checkpoint.parent / "checkpoint-best") is None


def test_without_checksums_what_can_be_read_is_not_damaged(checkpoint):
    """Accept files without checksums, for which torch writes zeros."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.arange(1000.0)}, checkpoint / "optimizer.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert damaged_files(checkpoint) == []


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path):
    target = tmp_path / "page.html"
    with complete_or_absent(target) as file:
        file.write_text("old")
    with pytest.raises(RuntimeError), complete_or_absent(target) as file:
        raise RuntimeError(file.write_text("half of the new"))
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
