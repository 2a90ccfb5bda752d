"""The DeepSpeed engine subclass that executes a schedule, and all of its parts."""

import os

# Each is read once, by an import or by the first use of a GPU.
for _name, _value in {
    "DEEPSPEED_LOG_LEVEL": "error",  # by default it logs every step of its set-up
    # Loading a kernel at its first launch waits for the device, and may wait behind a collective
    # that waits for a rank which does the same.
    "CUDA_MODULE_LOADING": "EAGER",
    # Otherwise NCCL connects an algorithm when it is first used, in the middle of a step.
    "NCCL_RUNTIME_CONNECT": "0",
}.items():
    os.environ.setdefault(_name, _value)
