"""States of an optimizer that accelerate has prepared, through torch.distributed.checkpoint."""

from __future__ import annotations

import accelerate
import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.optimizer.cases import build, equal, stepped


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_into_an_optimizer_that_accelerate_has_prepared(tmp_path):
    model, optimizer = stepped()
    dcp.save({"o": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    other, prepared = accelerate.Accelerator(cpu=True).prepare(*build())
    into = prepared.optimizer
    state = get_optimizer_state_dict(other, into)
    dcp.load({"o": state}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, into, state)
    assert equal(optimizer.state_dict(), into.state_dict())
