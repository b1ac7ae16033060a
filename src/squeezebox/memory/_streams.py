"""Copies between a CUDA device and pinned host memory, while the current stream computes."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is recorded there, during which nothing may be asked or waited for."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # torch asks the current device's current stream
        return torch.cuda.is_current_stream_capturing()


class CudaStreams:
    """As :class:`squeezebox.memory.Streams`: one stream for each direction, ordered by events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._leaving = torch.cuda.Stream(device)
        self._arriving = torch.cuda.Stream(device)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """From torch's cache of pinned memory, which heeds the streams that a block was copied on."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def leave(self, host: torch.Tensor, flat: torch.Tensor) -> torch.cuda.Event:
        """Copy to the host, after all that the current stream was asked for until now."""
        return self._copy(self._leaving, host, flat, self._now())

    def arrive(self, flat: torch.Tensor, host: torch.Tensor, left: torch.cuda.Event) -> torch.cuda.Event:
        """Copy back, after that and after ``left``."""
        return self._copy(self._arriving, flat, host, self._now(), left)

    def wait(self, event: torch.cuda.Event) -> None:
        """What the current stream is asked for from now on comes after the event."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def happened(self, event: torch.cuda.Event) -> bool:
        """Whether it has; while a graph is captured nothing has."""
        return not is_capturing(self.device) and event.query()

    def finish(self, event: torch.cuda.Event) -> None:
        """The host waits for the event."""
        event.synchronize()

    def abandon(self, flat: torch.Tensor) -> None:
        """The allocator keeps the tensor's memory until the copy into it is over."""
        flat.record_stream(self._arriving)

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _copy(
        self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor, *after: torch.cuda.Event
    ) -> torch.cuda.Event:
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream), torch.no_grad():
            to.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(stream)
        return done
