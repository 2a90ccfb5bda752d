"""Imports and computations of every rank before its first engine, done once by the process that forks ranks.

Even with torch, DeepSpeed and transformers loaded, a rank needs seconds of processor time. DeepSpeed compiles test
programs to check which operators can be built, and transformers creates its table of weight conversions.
"""

from contextlib import suppress
from importlib import import_module

import deepspeed.ops
import peft  # noqa: F401
import torch.distributed.pipelining  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import weft.engine.initialize  # noqa: F401

for name in (
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "peft.utils.transformers_weight_conversion",
):
    with suppress(ImportError):  # DeepSpeed 0.19.8 and peft 0.21 import them for their first use; others need not
        import_module(name)
assert deepspeed.ops.__compatible_ops__
get_checkpoint_conversion_mapping("llama")
