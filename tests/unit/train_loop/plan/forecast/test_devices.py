"""The table of GPUs: names, units, and what CUDA calls them."""

import re

import pytest

from train_loop.plan import DEVICES, device_named, device_of

GIB = 1 << 30


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
    ],
)
def test_reported_name_finds_the_device(reported: str, name: str) -> None:
    found = device_of(reported)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("reported", ["cpu", "NVIDIA X999", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_unknown_name_finds_none(reported: str) -> None:
    assert device_of(reported) is None


@pytest.mark.parametrize("given", ["h100-80g", "H100-80GB", " h100_80g "])
def test_name_is_found_in_any_case(given: str) -> None:
    assert device_named(given).name == "h100-80g"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("a100", "did you mean a100-80g-pcie or a100-80g or a100-40g-pcie or a100-40g? known devices: gb200, b200"),
        ("h100-80", "did you mean h100-80g"),
        ("cerebras", "unknown device 'cerebras'; known devices: gb200"),
    ],
)
def test_unknown_device_is_refused_with_names(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=re.escape(meant)):
        device_named(given)


def test_rates_have_the_units_of_the_table() -> None:
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert 16 * GIB <= device.memory <= 192 * GIB, device
        assert 3e11 <= device.bandwidth <= 8e12, device
        assert device.plain_flops < device.tensor_flops <= 2.5e15, device
        assert 16e9 <= device.host_link <= device.link <= 900e9, device
        assert 0 < device.efficiency[0] < device.efficiency[1] < 1, device


def test_data_sheet_of_an_h100() -> None:
    device = device_named("h100-80g")
    assert (device.memory, device.bandwidth, device.link, device.network) == (80 * GIB, 3.35e12, 450e9, 50e9)
    assert (device.peak("bf16"), device.peak("fp32"), device_named("t4").peak("bf16")) == (989.5e12, 67e12, None)
