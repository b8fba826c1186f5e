"""Deprecation warnings that the package causes are errors in the tests, here and in the processes that tests start."""

from __future__ import annotations

import subprocess
import sys

import pytest

WARN = "import warnings; warnings.warn('old', {})"


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
def test_only_those_of_our_code_are_errors(category):
    code = WARN.format(category.__name__)
    with pytest.raises(category):
        exec(code, {"__name__": "hf_muon.math.gram"})
    with pytest.warns(category):
        exec(code, {"__name__": "torch.optim"})
    here = f"exec({code!r}, {{'__name__': 'torch.optim'}}); print('no error')"
    there = f"exec({code!r}, {{'__name__': 'hf_muon.build'}})"
    process = subprocess.run([sys.executable, "-c", f"{here}\n{there}"], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (1, "no error\n"), process.stderr
