"""Kernels for CUDA give the bits of the plain functions, wherever an element lies."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from tests.cuda.fake_step import OFTEN, calls, few, functions

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def differences(request):
    """Return what differs; Triton's interpreter has a process of its own, since it is chosen before Triton's import."""
    every = [call for name in OFTEN for call in few(name)]
    if request.param == "rest":
        every = [call for of_function in calls().values() for call in of_function if call not in every]
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cuda.interpreter"],
        input=pickle.dumps(every),
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()
    return process.stdout.decode().splitlines()


REST = [pytest.param("rest", name, marks=pytest.mark.nightly) for name in functions()]


@pytest.mark.parametrize(("differences", "name"), [*(("few", name) for name in OFTEN), *REST], indirect=["differences"])
def test_kernels_give_the_bits_of_the_plain_function(name, differences):
    if own := [line for line in differences if line.split()[0] == name]:
        pytest.fail("\n".join(own), pytrace=False)
