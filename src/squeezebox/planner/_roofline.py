"""Seconds of a step on a device, by what its operators compute and move."""

from __future__ import annotations

from collections.abc import Iterable

from squeezebox.schema import Device, Work


def roofline_seconds(work: Iterable[Work], device: Device) -> float:
    """Each operator takes its flops or its bytes at the device's rates, whichever is longer, and one call.

    Args:
        work: of one step.
        device: with figures of its own (:attr:`~squeezebox.schema.Device.is_rated`).
    """
    return sum(
        each.times
        * (
            max(each.flops / device.flops_per_second, each.moved_bytes / device.bytes_per_second)
            + device.call_seconds
        )
        for each in work
    )
