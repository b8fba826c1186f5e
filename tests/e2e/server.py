"""Run scripts in processes that are forked from one that has imported what they import, which takes 3 to 10 s.

Usage: server.py MODULE ... ; each line on stdin is an order in JSON, and each line on stdout its exit code.
An order has: words (a script and its arguments), ranks, cwd, environment, output (a file).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from typing import Any


def be(order: dict[str, Any], rank: int, port: str) -> None:
    """Become a process of a run; several ranks get what torchrun tells them."""
    out = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    if order["ranks"] > 1:
        size = str(order["ranks"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    script = order["words"][0]
    sys.path[:0] = [os.path.dirname(script), *(folder for folder in folders if folder not in sys.path)]
    if folders and os.path.exists(site := os.path.join(folders[0], "sitecustomize.py")):
        runpy.run_path(site)
    sys.argv = order["words"]
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    if code == 0 and order["ranks"] > 1 and sys.modules["torch"].distributed.is_initialized():
        sys.modules["torch"].distributed.barrier()  # if one rank ends alone, the others abort
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # finalizing the interpreter may make a waiting thread of gloo abort the process


def run(order: dict[str, Any]) -> int:
    """Return the exit code of the first rank that fails, after which the others are ended, or 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    ranks = set()
    for rank in range(order["ranks"]):
        if not (process := os.fork()):
            be(order, rank, port)
        ranks.add(process)
    code = 0
    while ranks:
        process, status = os.wait()
        ranks.discard(process)
        if not code and (code := os.waitstatus_to_exitcode(status)):
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return code


def main(modules: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(run(json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
