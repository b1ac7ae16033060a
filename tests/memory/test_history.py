"""A device's allocations and frees in their order, with marks between them; the allocator is a stand-in."""

import pytest
import torch

from squeezebox.memory import Recording

DEVICE = torch.device("cuda:1")


class Allocator:
    """Torch's, as far as a history asks it: it counts, and records where it was told to."""

    def __init__(self, monkeypatch):
        self.counts, self.live_bytes = {"allocated": 7, "freed": 3}, 1 << 20  # of before
        self.recorded, self.is_recording, self.time_us = [], False, 1
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.is_recording, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        for name in ("_free_workspaces", "_take_workspaces"):
            monkeypatch.setattr(f"{Recording.__module__}.{name}", lambda device: None)

    def record(self, enabled, **options):
        self.is_recording = enabled == "all"
        assert not self.is_recording or options["clear_history"]

    def snapshot(self):
        return {"device_traces": [[], self.recorded]}

    def stats(self, device):
        assert device == 1
        live = {"all": {"current": self.live_bytes}}
        return {"allocation": {"all": dict(self.counts)}, "allocated_bytes": live}

    def take(self, address, size, block):
        self.live_bytes += block
        self.counts["allocated"] += 1
        self._note("alloc", address, size)

    def free(self, address, size, block):
        self.live_bytes -= block
        self.counts["freed"] += 1
        self._note("free_requested", address, size)
        self._note("free_completed", address, size)

    def _note(self, action, address, size):
        self.time_us += 1
        entry = {"action": action, "addr": address, "size": size, "time_us": self.time_us}
        if self.is_recording:
            self.recorded.append(entry)


def test_marks_stand_where_they_were_made_and_sizes_are_the_allocators(monkeypatch):
    allocator, recording = Allocator(monkeypatch), Recording(DEVICE)
    recording.mark("too early")
    assert recording.start()
    recording.mark("first")
    allocator.take(64, 1000, 1024)
    allocator.take(4096, 1, 512)
    recording.mark("second")
    allocator.free(64, 1000, 1024)
    recording.mark("third")
    recording.mark("fourth")
    recording.close()
    allocator.take(8192, 5, 512)
    assert recording.events() == [
        ("first", 0, 0),
        ("", 64, 1024),
        ("", 4096, 512),
        ("second", 0, 0),
        ("", 64, -1024),
        ("third", 0, 0),
        ("fourth", 0, 0),
    ]
    assert not allocator.is_recording


def test_what_blocks_have_beyond_what_was_asked_for_is_there_from_the_start(monkeypatch):
    allocator, recording = Allocator(monkeypatch), Recording(DEVICE)
    recording.start()
    for number, block in enumerate((512, 1024, 2048)):
        allocator.take(number, 512, block)
        recording.mark(str(number))
    assert recording.events()[:2] == [("", -1, 512 + 1536), ("", 0, 512)]


@pytest.mark.parametrize("by", ("history", "profiler"))
def test_where_somebody_else_records_nothing_begins(by, monkeypatch):
    allocator = Allocator(monkeypatch)
    allocator.is_recording = by == "history"
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", by == "profiler")
    recording = Recording(DEVICE)
    assert not recording.start()
    recording.close()
    assert allocator.is_recording == (by == "history")
