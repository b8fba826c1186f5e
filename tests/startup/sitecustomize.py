"""Let processes that tests start collect garbage less often; for tests alone, which put this folder on PYTHONPATH.

Imports of torch and transformers make objects that stay. To look through them after every 700 new ones, the default of
Python 3.11, takes a sixth of the time of such an import.
"""

import gc

gc.set_threshold(10_000)
