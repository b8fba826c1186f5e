"""Measure what metrics cost: optimizer steps with and without them take turns.

python benchmarks/diagnostics_cost.py --matrices 4096x4096 --count 8 --device cuda
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from meters import spread
from torch import nn

from hf_muon import Muon


def seconds(function, device: torch.device) -> float:
    """Return the processor time of a call on a CPU, or its wall time on CUDA, until the device has finished.

    Other programs do not add to processor time.
    """
    if device.type != "cuda":
        begin = time.thread_time()
        function()
        return time.thread_time() - begin
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    function()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def main() -> None:
    """Measure, and print the result as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", default="512x2048", help="shape of the matrices")
    parser.add_argument("--count", type=int, default=8, help="number of matrices")
    parser.add_argument("--embedding", default="8192x512", help="shape of the parameter that AdamW steps")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--every", type=int, default=50, help="steps from one watched step to the next")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    shape, table = ([int(n) for n in text.split("x")] for text in (options.matrices, options.embedding))
    torch.set_num_threads(1)  # so that on a CPU the time of the calling thread is all of it
    named = [(f"layers.{i}.weight", nn.Parameter(torch.randn(*shape, device=device))) for i in range(options.count)]
    embedding = ("embed.weight", nn.Parameter(torch.randn(*table, device=device)))
    for _, param in (*named, embedding):
        param.grad = torch.randn_like(param)
    with tempfile.TemporaryDirectory() as folder:
        groups = [{"params": named}, {"params": [embedding], "use_muon": False}]
        optimizer = Muon(groups, diagnostics_every=1, diagnostics_file=str(Path(folder) / "lines.jsonl"))
        metrics = optimizer.metrics
        times: dict[str, list[float]] = {"off": [], "watched": [], "off again": []}
        for turn in range(options.rounds + 2):
            for side, some in times.items():
                optimizer.metrics = metrics if side == "watched" else None
                step_s = seconds(optimizer.step, device)
                if turn >= 2:
                    some.append(step_s)
    off, again = times["off"], times["off again"]
    added = [(watched - o) / o for watched, o in zip(times["watched"], off, strict=True)]
    result = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "milliseconds": {side: spread([1e3 * t for t in some]) for side, some in times.items()},
        "a watched step costs more, in optimizer steps": spread(added),
        f"on average, watched every {options.every} steps, percent of an optimizer step": spread(
            [100 * part / options.every for part in added]
        ),
        "two steps that nobody watches differ, percent": spread(
            [100 * (b - a) / a for a, b in zip(off, again, strict=True)]
        ),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
