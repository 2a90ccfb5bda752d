"""Every module of the package can be the first that is imported."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("module", ["weft.engine.initialize", "weft.engine.execution.batches", "weft.engine.stages"])
def test_a_module_can_come_first(module):
    code = f"import os; os.environ.setdefault('DS_ACCELERATOR', 'cpu'); import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
