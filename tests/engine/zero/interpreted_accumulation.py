"""Compare the accumulation kernel with torch's operations, in a process in which Triton interprets kernels."""

from __future__ import annotations

import itertools
import json
from math import inf, nan

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.engine.models.interpreter import complete_interpreter
from weft.engine.zero.kernels.accumulation import accumulate_plain
from weft.engine.zero.kernels.accumulation_triton import accumulate_fused, elements

BLOCK = 64
LENGTHS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 8)


def normal(length: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Return random numbers of many magnitudes, which begin ``offset`` elements after an aligned address."""
    numbers = torch.randn(length + offset) * 10 ** torch.empty(length + offset).uniform_(-6, 4)
    return numbers.to(dtype)[offset:]


def compared(shard: Tensor, received: Tensor, adds: bool, block: int = BLOCK) -> dict[str, bool | float]:
    """Return whether both shards have the same bits, and the relative difference of the sums of squares."""
    plain, fused = shard.clone(), shard
    accumulate_plain(plain, received, adds=adds)
    squares = accumulate_fused(fused, received, adds=adds, block=block)
    exact = plain.double().square().sum()
    found = squares.double().sum()
    is_same = torch.allclose(found, exact, rtol=0, atol=0, equal_nan=True)
    numbers, others = (torch.where(tensor.isnan(), nan, tensor).view(torch.int32) for tensor in (plain, fused))
    return {
        "bits": torch.equal(numbers, others),
        "off": float((found - exact).abs() / exact) if exact.isfinite() and not is_same else float(not is_same),
    }


@triton.jit
def _write_elements(found, number, block: tl.constexpr):
    tl.store(found + tl.arange(0, block), elements(number, block))


def indices(number: int) -> list[int]:
    """Return the elements of program ``number``."""
    found = torch.zeros(BLOCK, dtype=torch.int64)
    _write_elements[(1,)](found, number, BLOCK)
    return found.tolist()


def main() -> None:
    """Print the comparison of each case, and the elements of a program far beyond 2**31."""
    complete_interpreter()
    torch.manual_seed(0)
    for length, dtype, adds in itertools.product(
        LENGTHS, (torch.float32, torch.bfloat16, torch.float16), (False, True)
    ):
        for offset in (0, 1):
            found = compared(normal(length, torch.float32, offset), normal(length, dtype, offset), adds)
            print(json.dumps({"case": f"{length} {dtype} {adds} {offset}"} | found))
    for value, dtype, adds in itertools.product((nan, inf, -inf), (torch.float32, torch.bfloat16), (False, True)):
        received, shard = normal(100, dtype), normal(100, torch.float32)
        received[70] = value
        shard[3] = -inf
        print(json.dumps({"case": f"{value} {dtype} {adds}"} | compared(shard, received, adds)))
    print(
        json.dumps(
            {"case": "default block"} | compared(normal(5000, torch.float32), normal(5000, torch.bfloat16), True, 4096)
        )
    )
    print(json.dumps({"case": "elements", "elements": indices((1 << 31) // BLOCK * 3 + 1)}))


if __name__ == "__main__":
    main()
