"""torchrun's elastic runs: ranks that die are started again, and a later launch has another number of them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e import elastic_worker
from tests.e2e.harness import BIN, CPU_RANKS, ROOT, free_port, run
from tests.support.bounds import beyond_rounding

pytestmark = [pytest.mark.slow, pytest.mark.extended]

SCRIPT = Path(elastic_worker.__file__)


def launch(folder, last, ranks, deaths=None):
    """Run the script by torchrun, and return from which step each start went on."""
    conf = "last_call_timeout=1,join_timeout=60"  # torchrun waits so long for a second node
    options = ["--nnodes", "1:2", "--nproc-per-node", ranks, "--max-restarts", 2, "--monitor-interval", 0.1]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf", conf]
    command = [BIN / "torchrun", *options, *rendezvous, "--rdzv-id", "elastic", "--local-addr", "127.0.0.1"]
    # With the store that torchrun shares, ranks that are started again find addresses of before (pytorch#135712).
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (CPU_RANKS, ROOT)))
    printed = run([*command, SCRIPT, folder, last, json.dumps(deaths or {})], cwd=folder.parent, **variables)
    return re.findall(r"restart (\d+): (\d+) ranks go on from step (\d+)", printed)


def test_a_run_whose_ranks_die_and_whose_number_changes_is_that_of_one_process(pools, tmp_path):
    """Compare bits as long as the number of ranks is the same, and then what rounding explains."""
    folder, straight = tmp_path / "run", str(tmp_path / "straight")
    starts = launch(folder, 4, ranks=3, deaths={"0": (1, "killed"), "1": (3, "raises")})
    assert starts == [("0", "3", "0"), ("1", "3", "1"), ("2", "3", "3")]
    expected = pools[3].run(elastic_worker.train, folder=straight, last=4, saves=False)[0]
    model, optimizer, step = elastic_worker.started(folder)
    assert step == 4
    result = elastic_worker.tensors(model, optimizer)
    assert result.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(result[name], tensor)] == []

    shutil.copytree(folder, tmp_path / "copy")
    assert launch(folder, 6, ranks=2) == [("0", "2", "4")]
    result = elastic_worker.tensors(*elastic_worker.started(folder)[:2])
    whole, *controls = [elastic_worker.train(0, straight, 6, saves=False, moved=seed) for seed in (None, *range(4))]
    assert beyond_rounding(result, whole, controls) == {}
    # The same comparison notices moments that are lost.
    lost = pools[2].run(elastic_worker.train, folder=str(tmp_path / "copy"), last=6, saves=False, drops=True)[0]
    assert set(beyond_rounding(lost, whole, controls)) >= {name for name in whole if not name.endswith("step")}
