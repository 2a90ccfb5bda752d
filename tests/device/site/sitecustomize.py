"""Gives every Python that starts with this folder in PYTHONPATH as many emulated GPUs as the environment names."""

import os

if number := os.environ.get("WEFT_EMULATED_GPUS"):
    from tests.device import cuda

    cuda.install(int(number))  # before torch is imported
    cuda.native.emulated_fuse_attention()
    from tests.device import group

    group.register()
