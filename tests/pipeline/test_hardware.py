"""The hardware table is found by what people and torch call a GPU."""

import pytest

from weft.pipeline.hardware import GPU_KINDS, gpu_kind, kind_of_device


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


def test_every_kind_computes_faster_in_less_precision():
    for kind in GPU_KINDS.values():
        assert kind.peak["bf16"] > kind.peak["tf32"] > kind.peak["fp32"]
