"""Devices that many people train on, by their makers' data sheets."""

from __future__ import annotations

from squeezebox.schema import Device

_FLOPS_A_SAMPLE = 12_582_912  # of the network by which speeds are measured: profiling/_speed.py


def _device(name: str, gigabytes: int, teraflops: float, gigabytes_a_second: int) -> Device:
    return Device(
        name=name,
        memory_bytes=gigabytes * 10**9,
        speed=teraflops * 1e12 / _FLOPS_A_SAMPLE,
        flops_per_second=teraflops * 1e12,
        bytes_per_second=gigabytes_a_second * 1e9,
        type="cuda",
    )


# Memory, float32 without tensor cores, and bandwidth: what a data sheet promises, and nobody measured here.
KNOWN_DEVICES = (
    _device("RTX 4060 8GB", 8, 15.1, 272),
    _device("RTX 3060 12GB", 12, 12.7, 360),
    _device("T4 16GB", 16, 8.1, 320),
    _device("V100 16GB", 16, 15.7, 900),
    _device("RTX 3090 24GB", 24, 35.6, 936),
    _device("RTX 4090 24GB", 24, 82.6, 1008),
    _device("L4 24GB", 24, 30.3, 300),
    _device("A10 24GB", 24, 31.2, 600),
    _device("RTX 5090 32GB", 32, 104.8, 1792),
    _device("A100 40GB", 40, 19.5, 1555),
    _device("L40S 48GB", 48, 91.6, 864),
    _device("A100 80GB", 80, 19.5, 2039),
    _device("H100 80GB", 80, 66.9, 3350),
    _device("H200 141GB", 141, 66.9, 4800),
)
