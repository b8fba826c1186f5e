"""Lets DeepSpeed run on CPU and gloo in every process that has this folder on its PYTHONPATH; for tests alone.

With the collectives of DeepSpeed's that are left out, each process would first compile a C++ extension for a minute.
Which backend is taken, and which device, is accelerate's and DeepSpeed's own choice on a machine without a GPU.
"""

import importlib.machinery
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")


class _Finder:
    """Finds `deepspeed.ops` as everybody does, and takes one name off its list after it was executed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "deepspeed.ops":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.__compatible_ops__["deepspeed_shm_comm"] = False

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
