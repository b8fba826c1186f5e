"""Let ranks of tests run on CPU and gloo; for tests alone, which put this folder on PYTHONPATH.

A thread of gloo that drops the tensors of the last collective waits for the interpreter. Where it still does so while
the interpreter is finalized, it aborts the process. So a rank gives it some time at its end.
"""

import atexit
import functools
import gc
import importlib
import importlib.machinery
import os
import sys
import time

gc.set_threshold(10_000)  # as tests/startup
os.environ.setdefault("DS_ACCELERATOR", "cpu")
if "RANK" in os.environ:
    atexit.register(time.sleep, 0.3)


def leave_out_shared_memory(ops):
    """Keep DeepSpeed from compiling its collectives in shared memory, which takes a minute in each process."""
    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def wait_for_all_gathers(partition_parameters):
    """See `deepspeed_0184.py`, which reads what is installed: too slow for processes that do not import DeepSpeed."""
    importlib.import_module("deepspeed_0184").wait_for_all_gathers(partition_parameters)


def name_gloo(state):
    """Name gloo as the backend: accelerate 1.15 has a backend for DeepSpeed on accelerators only."""
    prepare = state.PartialState._prepare_backend

    @functools.wraps(prepare)
    def prepare_backend(*args, **kwargs):
        backend, kind = prepare(*args, **kwargs)
        return backend or ("gloo" if "LOCAL_RANK" in os.environ else None), kind

    state.PartialState._prepare_backend = prepare_backend


def synchronize_nothing(helper):
    """Let LLaMA-Factory v1 synchronize, as it does after each step, where there is no accelerator."""
    helper.torch.accelerator.synchronize = lambda *args, **kwargs: None


def end_early(arguments):
    """Train for as many steps as a variable says, whatever a training file says."""
    kind = arguments.TrainingArguments
    post_init = kind.__post_init__

    @functools.wraps(post_init)
    def end_early(self):
        self.max_steps = int(os.environ[STEPS])
        post_init(self)

    if STEPS in os.environ:
        kind.__post_init__ = end_early


def have_bf16(utils):
    """Take the settings of a GPU together with that number of steps."""
    if STEPS in os.environ:
        utils.is_torch_bf16_gpu_available = lambda: True


STEPS = "HF_MUON_TESTS_STEPS"
AFTER = {
    "transformers.utils.import_utils": have_bf16,
    "transformers.training_args": end_early,
    "llamafactory.v1.config.training_args": end_early,
    "deepspeed.ops": leave_out_shared_memory,
    "deepspeed.runtime.zero.partition_parameters": wait_for_all_gathers,
    "accelerate.state": name_gloo,
    "llamafactory.v1.accelerator.helper": synchronize_nothing,
}


class Finder:
    """Finds modules as usual, and calls a function of AFTER when its module has been executed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            AFTER[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
