"""Types of numbers: the configured types, and each weight's type in the base model, computations and exports."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from weft.conf.schema import ExportDtype, Precision

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
"""torch's type for each precision of the configuration."""
EXPORTED = {ExportDtype.fp32: torch.float32, ExportDtype.bf16: torch.bfloat16, ExportDtype.fp16: torch.float16}
"""torch's type for each format of an export, except that of the base."""
_GIVEN, _COMPUTED, _EXACT = "_weft_given", "_weft_computed", "_weft_exact"


def check_supported(precision: Precision) -> None:
    """Check that DeepSpeed trains in this format on this host's devices. Raise ValueError if it does not."""
    if precision is Precision.fp16 and not get_accelerator().is_fp16_supported():
        raise ValueError(
            f"train.precision=fp16: DeepSpeed does not train in fp16 on this host's {get_accelerator().device_name()}; "
            "set train.precision=bf16 or fp32"
        )


def set_given(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Record the type of a weight in the base model, because the weight is loaded in another type."""
    setattr(parameter, _GIVEN, dtype)


def given_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the type of a weight in the base model."""
    return getattr(parameter, _GIVEN, parameter.dtype)


def computed_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the type of a weight in computations once training has begun."""
    return getattr(parameter, _COMPUTED, parameter.dtype)


def compute_in(parameters: Iterable[nn.Parameter], dtype: torch.dtype, exported: Collection[nn.Parameter]) -> None:
    """Set the type of weights in computations: of frozen weights now, of trained weights when they have masters.

    So masters have the precision of the base model.

    Args:
        exported: frozen weights that an export writes. Their original values stay in host memory.
    """
    for parameter in parameters:
        if not parameter.is_floating_point():
            continue
        set_given(parameter, given_dtype(parameter))
        if parameter.requires_grad:
            setattr(parameter, _COMPUTED, dtype)
        elif parameter.dtype != dtype:
            if parameter in exported:
                setattr(parameter, _EXACT, parameter.data.cpu())
            parameter.data = parameter.data.to(dtype)


def exact_value(parameter: nn.Parameter) -> Tensor | None:
    """Return the original value of a frozen weight, or None if it is not stored."""
    return getattr(parameter, _EXACT, None)
