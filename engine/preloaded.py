"""Imports and computations of every rank before its first engine, done once by the process that forks ranks.

Even with torch, DeepSpeed and transformers loaded, a rank needs seconds of processor time. DeepSpeed compiles test
programs to check which operators can be built, and transformers creates its table of weight conversions.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any

import deepspeed.ops
import torch.distributed.pipelining
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

_COMPILE = torch.compile


def _compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replace `torch.compile`: compile at the first call of the function, which imports the compiler."""
    if function is None:
        return partial(_compile_later, **options)
    compiled = cache(lambda: _COMPILE(function, **options))
    return wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))


torch.compile = _compile_later
import_module("peft")  # imports bitsandbytes, which decorates 4 functions: with the compiler this takes 0.8 s longer
torch.compile = _COMPILE
import_module("weft.engine.initialize")

for name in (
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "peft.utils.transformers_weight_conversion",
    "weft.engine.strands.strand_pairs",
):
    with suppress(ImportError):  # DeepSpeed 0.19.8 and peft 0.21 import theirs for their first use; others need not
        import_module(name)
assert deepspeed.ops.__compatible_ops__
get_checkpoint_conversion_mapping("llama")
