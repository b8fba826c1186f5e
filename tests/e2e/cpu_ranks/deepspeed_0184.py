"""A repair of DeepSpeed 0.18.4 on CPUs, for the tests; it goes when LLaMA-Factory allows 0.19, which has it."""

import functools
import importlib.metadata
from unittest import mock

IS_INSTALLED = importlib.metadata.version("deepspeed") == "0.18.4"


def wait_for_all_gathers(partition_parameters):
    """Let ZeRO-3 wait for every parameter that it gathers.

    `_allgather_params_coalesced`, which runs after each step and each load, starts a gather for each parameter and
    waits for the last one only. NCCL completes them in order. gloo does not: in 5 of 80 loads some parameters are
    still uninitialized memory when the function returns, with AdamW as with Muon.
    """
    dist, init = partition_parameters.dist, partition_parameters.Init
    start, gather = dist.all_gather_into_tensor, init._allgather_params_coalesced

    def finished(*args, **kwargs):
        handle = start(*args, **kwargs)
        handle.wait()
        return handle

    @functools.wraps(gather)
    def gather_and_wait(self, *args, **kwargs):
        with mock.patch.object(dist, "all_gather_into_tensor", finished):
            return gather(self, *args, **kwargs)

    if IS_INSTALLED:
        init._allgather_params_coalesced = gather_and_wait
