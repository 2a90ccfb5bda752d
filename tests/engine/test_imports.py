"""The first import of the engine prepares CUDA and NCCL."""

import os

import pytest

from tests.interpreter import python

BEFORE_A_GPU_IS_USED = {"CUDA_MODULE_LOADING": "EAGER", "NCCL_RUNTIME_CONNECT": "0"}
"""The settings of the engine's first import: nothing is loaded or connected in the middle of a step."""


@pytest.mark.parametrize("given", [{}, {"CUDA_MODULE_LOADING": "LAZY", "NCCL_RUNTIME_CONNECT": "1"}])
def test_kernels_are_loaded_and_nccl_is_connected_before_a_step_unless_the_user_says_otherwise(given):
    env = {name: value for name, value in os.environ.items() if name not in BEFORE_A_GPU_IS_USED} | given
    code = f"import weft.engine, os; print(*(os.environ[name] for name in {list(BEFORE_A_GPU_IS_USED)}))"
    done = python("-c", code, env=env)
    assert done.stdout.split() == list((BEFORE_A_GPU_IS_USED | given).values()), done.stderr[-2000:]
