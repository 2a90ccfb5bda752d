"""Checks for silent corruption: products of integers that any correct device computes exactly, bit by bit."""

from __future__ import annotations

import hashlib
from time import perf_counter

import torch

from weft.conf.host.diagnosis import CheckResult, Outcome

SIZE = 512
ROUNDS = 3
FORMAT_S = 1.0
"""Seconds of a processor for all rounds in a format, if that is enough for a tile each."""
CHECK = "GEMM bits"
# SHA-256 of the product's float32 bytes, little-endian, for factors of odd numbers up to `spread` - 1. Sums
# stay below 2**24, which float32 holds, and for +-1 below 2**8, which bfloat16 holds: the order of summation
# does not matter, and neither do the device, its formats inside (TF32) and torch's build.
CHECKSUMS = {
    16: "bc94614960780f0ecd095f1d6306b973d4b1248ea2fe8fe2498d401b3b8d011f",
    2: "7c0d560be11c4d0b7a03444a9a026588d11febb4441abda7c64202c638dbfd5f",
}
_FORMATS = {torch.float32: 16, torch.bfloat16: 2}


def factor(seed: int, spread: int) -> torch.Tensor:
    """Return a matrix of odd numbers from 1 - ``spread`` to ``spread`` - 1, a hash of row, column and seed.

    Returns:
        int64 [SIZE, SIZE].
    """
    index = torch.arange(SIZE, dtype=torch.int64)
    mixed = (index[:, None] * 2654435761 + index[None, :] * 2246822519 + seed * 3266489917 + 1) % 2**32
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> 15)) * multiplier % 2**32
    mixed = mixed ^ (mixed >> 16)
    return 2 * (mixed % spread) - (spread - 1)


def check_bits(device: torch.device, flip: bool = False) -> CheckResult:
    """Multiply `ROUNDS` times in each format; every tile of every product must have the known checksum.

    Args:
        flip: for tests: flip the lowest bit of one number of a result, as a faulty device would.
    """
    wrong, multiplied = [], []
    for form, spread in _FORMATS.items():
        tiles, name = _tiles(device, form, spread), str(form).removeprefix("torch.")
        multiplied.append(f"{tiles * tiles} of {name}")
        for number in range(ROUNDS):
            product = _product(device, form, spread, tiles)
            if flip and number == 1:
                product[-1, 5:6].view(torch.int32)[0] ^= 1
            bad = [
                f"{row},{column}"
                for row, line in enumerate(product.split(SIZE))
                for column, tile in enumerate(line.split(SIZE, dim=1))
                if checksum(tile) != CHECKSUMS[spread]
            ]
            if bad:
                wrong.append(
                    f"{name}, round {number + 1}: tile {bad[0]}" + (f" and {len(bad) - 1} more" * (len(bad) > 1))
                )
    if wrong:
        says = f"wrong bits in {len(wrong)} of {ROUNDS * len(_FORMATS)} products ({wrong[0]})"
        return CheckResult(CHECK, Outcome.failed, says, float(len(wrong)), "wrong products")
    says = f"{ROUNDS} rounds of tiles, {' and '.join(multiplied)}: every bit as it has to be"
    return CheckResult(CHECK, Outcome.passed, says, 0.0, "wrong products")


def _tiles(device: torch.device, form: torch.dtype, spread: int) -> int:
    """Return the tiles per row of a product: enough to fill a GPU, and on a CPU as many as the time limit allows.

    A CPU without bfloat16 instructions takes half a second for a bfloat16 tile, others take milliseconds.
    """
    if device.type == "cuda":
        return 16
    begun = perf_counter()
    _product(device, form, spread, 1)
    return max(1, min(4, int((FORMAT_S / ROUNDS / (perf_counter() - begun)) ** 0.5)))


def checksum(tile: torch.Tensor) -> str:
    """Return the checksum of a tile's bits.

    Args:
        tile: float32 [SIZE, SIZE], on the host.
    """
    return hashlib.sha256(tile.contiguous().numpy().astype("<f4", copy=False).tobytes()).hexdigest()


def _product(device: torch.device, form: torch.dtype, spread: int, tiles: int) -> torch.Tensor:
    """Return the product of a column of ``tiles`` copies of one factor and a row of copies of another, on the host."""
    left = factor(1, spread).to(device, form).repeat(tiles, 1)
    right = factor(2, spread).to(device, form).repeat(1, tiles)
    return (left @ right).float().cpu()
