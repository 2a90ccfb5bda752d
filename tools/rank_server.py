"""Imported once by the server that ranks are forked from: the imports that all ranks share.

With torch, DeepSpeed and transformers loaded, a rank still spends seconds of processor time before its first engine:
DeepSpeed compiles test programs to see which operators could be built, transformers makes its table of weight
conversions, and every search for garbage looks through all that was imported.
"""

import gc
import os
from contextlib import suppress
from importlib import import_module

gc.disable()  # until all is imported: each search would look through what is there so far
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.ops
import peft  # noqa: F401
import torch
import torch.distributed.pipelining
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import weft.engine.initialize  # noqa: F401

for name in ("deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_layer"):
    with suppress(ImportError):  # DeepSpeed 0.19.8 imports them for its first engine; another need not have them
        import_module(name)
torch.set_num_threads(1)  # a process with threads cannot be forked safely
assert deepspeed.ops.__compatible_ops__
get_checkpoint_conversion_mapping("llama")
gc.enable()
gc.collect()
gc.freeze()
