"""What processes that tests start do first; for tests alone, which put this folder on PYTHONPATH.

Deprecation warnings that our code causes are errors, as in pyproject.toml.

They collect garbage less often. Imports of torch and transformers make objects that stay. To look through them after
every 700 new ones, the default of Python 3.11, takes a sixth of the time of such an import.
"""

import gc
import warnings

gc.set_threshold(10_000)
for category in (DeprecationWarning, FutureWarning):
    warnings.filterwarnings("error", category=category, module="hf_muon")
