"""Let ranks on gloo end without aborting; for tests alone, which put this folder on PYTHONPATH.

A thread of gloo that drops the tensors of the last collective waits for the interpreter. Where it still does so while
the interpreter is finalized, it aborts the process. So a rank gives it some time at its end.
"""

import atexit
import gc
import os
import time

gc.set_threshold(10_000)  # as tests/startup

if "RANK" in os.environ:
    atexit.register(time.sleep, 0.3)
