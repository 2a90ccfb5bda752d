"""Number formats: torch's type for each precision of the configuration."""

import torch

from weft.conf.schema import Precision

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
