"""The hardware table: data sheets of GPUs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

EFFICIENCY = 0.4
"""Share of its peak that a device is taken to reach before anything is measured."""


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """The data sheet of a kind of GPU.

    Attributes:
        peak: dense operations per second by number format.
        scale_up_bytes_per_s: one way, between GPUs of a host: NVLink, otherwise PCIe.
        scale_up_latency_s: latency of a collective inside of a host, per member.
    """

    name: str
    peak: dict[str, float]
    memory_bytes: float
    bytes_per_s: float
    scale_up_bytes_per_s: float
    scale_up_latency_s: float = 5e-6

    @property
    def flops_per_s(self) -> float:
        """Dense bf16 operations per second."""
        return self.peak["bf16"]


def _kind(
    name: str, bf16: float, tf32: float, fp32: float, gb: float, gb_per_s: float, scale_up: float, fp8: float = 0.0
) -> GpuKind:
    peak = {"bf16": bf16 * 1e12, "fp16": bf16 * 1e12, "tf32": tf32 * 1e12, "fp32": fp32 * 1e12}
    peak |= {"fp8": fp8 * 1e12} if fp8 else {}
    return GpuKind(
        name=name,
        peak=peak,
        memory_bytes=gb * 1e9,
        bytes_per_s=gb_per_s * 1e9,
        scale_up_bytes_per_s=scale_up * 1e9,
    )


# TFLOP/s without sparsity in bf16, tf32 and fp32; GB; GB/s of memory; GB/s one way to a GPU of the
# same host (data sheets state both ways together); TFLOP/s in fp8, if there is hardware for it.
_KINDS = (
    # "NVIDIA A40 GPU Accelerator" product brief PB-10147 and data sheet (2021). NVLink joins pairs only.
    _kind("A40", 149.7, 74.8, 37.4, 48, 696, 32),
    # "NVIDIA A100 Tensor Core GPU" data sheet (2021), SXM and PCIe.
    _kind("A100", 312, 156, 19.5, 80, 2039, 300),
    _kind("A100-40GB", 312, 156, 19.5, 40, 1555, 300),
    # "NVIDIA A800" data sheet (2023): an A100 whose NVLink does 400 GB/s.
    _kind("A800", 312, 156, 19.5, 80, 2039, 200),
    # "NVIDIA H100 Tensor Core GPU" data sheet (2023), SXM and PCIe; it states figures with sparsity, twice these.
    _kind("H100", 989.4, 494.7, 67, 80, 3350, 450, fp8=1978.9),
    _kind("H100-PCIE", 756, 378, 51, 80, 2000, 64, fp8=1513),
    # "NVIDIA H200 Tensor Core GPU" data sheet (2024).
    _kind("H200", 989.4, 494.7, 67, 141, 4800, 450, fp8=1978.9),
    # "NVIDIA HGX B200" data sheet (2025): a GPU of eight.
    _kind("B200", 2250, 1125, 75, 180, 7700, 900, fp8=4500),
    # "NVIDIA L40S" data sheet (2023): PCIe 4.0 x16.
    _kind("L40S", 362, 183, 91.6, 48, 864, 32, fp8=733),
)
GPU_KINDS = {kind.name: kind for kind in _KINDS}
"""The table, by name."""


def gpu_kind(name: str, field: str = "gpu") -> GpuKind:
    """Return the kind of GPU with this name, in upper or lower case.

    Raises:
        ValueError: there is no such GPU; the message has the nearest names.
    """
    by_upper = {known.upper(): kind for known, kind in GPU_KINDS.items()}
    if (found := by_upper.get(name.upper())) is not None:
        return found
    near = difflib.get_close_matches(name.upper(), by_upper, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(GPU_KINDS)}"
    raise ValueError(f"{field}={name}: no such kind of GPU is known; {hint}")


def kind_of_device(name: str) -> GpuKind | None:
    """Return the kind for torch's device name, such as ``NVIDIA A100-SXM4-80GB``, or None if it is not in the table."""
    plain = name.upper().replace(" ", "-")
    if "A100" in plain and "40GB" in plain:
        return GPU_KINDS["A100-40GB"]
    known = sorted(GPU_KINDS, key=len, reverse=True)  # a longer name is more specific
    return next((GPU_KINDS[kind] for kind in known if kind in plain), None)
