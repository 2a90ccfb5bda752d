"""The hardware table is found by what people and torch call a GPU."""

import pytest

from weft.pipeline.hardware import EFFICIENCY, GPU_KINDS, gpu_kind, kind_of_device


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A40", "A40"),
    ],
)
def test_torch_names_devices_of_the_table(device, kind):
    assert kind_of_device(device) is GPU_KINDS[kind]


def test_a_device_that_is_not_in_the_table_is_not_guessed():
    assert kind_of_device("NVIDIA GeForce RTX 4090") is None


def test_an_unknown_kind_names_the_nearest():
    assert gpu_kind("h100") is GPU_KINDS["H100"]
    with pytest.raises(ValueError, match=r"sites\.gpu=H1000: no such kind.*H100"):
        gpu_kind("H1000", "sites.gpu")


DATA_SHEETS = """
            TFLOP/s           HBM or GDDR     a link, both ways    NVLink
            bf16  tf32  fp32  GB    GB/s      GB/s
A40         149.7 74.8  37.4  48    696       64                   no
A100        312   156   19.5  80    2039      600                  yes
A100-40GB   312   156   19.5  40    1555      600                  yes
A800        312   156   19.5  80    2039      400                  yes
H100        989.4 494.7 67    80    3350      900                  yes
H100-PCIE   756   378   51    80    2000      128                  no
H200        989.4 494.7 67    141   4800      900                  yes
B200        2250  1125  75    180   7700      1800                 yes
L40S        362   183   91.6  48    864       64                   no
"""


def test_kinds_have_the_figures_of_their_data_sheets():
    """Written down a second time, in the units of the sheets."""
    rows = {name: rest for name, *rest in map(str.split, DATA_SHEETS.splitlines()[3:])}
    assert rows.keys() == GPU_KINDS.keys()
    for name, (*figures, joined) in rows.items():
        kind, (bf16, tf32, fp32, size, memory, both_ways) = GPU_KINDS[name], map(float, figures)
        assert kind.peak == {"bf16": bf16 * 1e12, "fp16": bf16 * 1e12, "tf32": tf32 * 1e12, "fp32": fp32 * 1e12}
        assert (kind.name, kind.flops_per_s, kind.has_nvlink) == (name, bf16 * 1e12, joined == "yes")
        assert (kind.memory_bytes, kind.bytes_per_s) == (size * 1e9, memory * 1e9)
        assert kind.scale_up_bytes_per_s == both_ways / 2 * 1e9
        assert 1e-6 <= kind.scale_up_latency_s <= 1e-5, "microseconds"
    assert 0.2 < EFFICIENCY < 0.6, "of the peak, what training reaches"


def test_every_kind_computes_faster_in_less_precision():
    for kind in GPU_KINDS.values():
        assert kind.peak["bf16"] > kind.peak["tf32"] > kind.peak["fp32"]
