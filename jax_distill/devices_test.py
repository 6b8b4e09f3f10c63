"""What a card promises is known by its whole name, and for no other card."""

import pytest

from jax_distill import devices

# As the drivers report them, with the dense bf16 figures of the data sheets.
KNOWN = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8e12,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 503.8e12,
    "NVIDIA L40S": 362e12,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_card_has_the_peak_of_its_data_sheet(name):
    assert devices.peak_bf16_flops(name) == pytest.approx(KNOWN[name])


def test_every_card_that_can_be_planned_for_has_a_peak():
    for gpu in devices.GPUS.values():
        assert devices.peak_bf16_flops(gpu.name) == gpu.bf16_tflops * 1e12


def test_the_memory_is_what_the_driver_reports_not_what_the_box_says():
    """nvidia-smi of an RTX PRO 6000 Blackwell, every edition: 97887 MiB, of 96 GiB on the card."""
    assert devices.GPUS["rtx6000pro"].memory_bytes == 97887 * 2**20


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "NVIDIA",
        "NVIDIA A10",
        "NVIDIA A100",
        "NVIDIA H20",
        "NVIDIA H100 PCIe",
        "NVIDIA H200 NVL",
        "NVIDIA L4",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    ],
)
def test_a_card_of_a_similar_name_has_no_peak(name):
    assert devices.peak_bf16_flops(name) is None
