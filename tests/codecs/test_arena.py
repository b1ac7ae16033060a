"""An arena's memory goes to nobody else while a stream that it was used on may still be at it."""

import pytest
import torch

from squeezebox import codecs
from squeezebox.schema import OptionError

CPU = torch.device("cpu")


class OnDevice:
    """A tensor as if on a device; notes the streams that it is recorded on, or copied to."""

    device = torch.device("cuda:0")

    def __init__(self, current):
        self.current, self.streams = current, []

    def record_stream(self, stream):
        self.streams.append(stream)

    def numel(self):
        return 1

    def copy_(self, source, non_blocking):
        assert non_blocking and source.numel() == 1  # for which torch's pinned memory notes the stream
        self.streams.append(self.current[0])


def test_every_stream_is_noted_once_for_the_device_and_for_pinned_memory(monkeypatch):
    current = ["home"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    arena = codecs.Arena(64, CPU, spill_bytes=64)
    arena.words, arena.counters, arena._witness = (OnDevice(current) for _ in range(3))
    for current[0] in ("home", "home", "side", "home", "side"):
        arena.note_stream()
    for memory in (arena.words, arena.counters, arena._witness):
        assert memory.streams == ["home", "side"]


def test_packing_notes_its_stream(monkeypatch):
    noted = []
    monkeypatch.setattr(codecs.Arena, "note_stream", lambda arena: noted.append(arena))
    arena = codecs.Arena(1 << 13, CPU)
    codecs.get("blocks").pack(torch.randn(1000), 0.1, codecs.Hints(arena=arena))
    assert noted == [arena]


def test_an_arena_beyond_what_a_table_can_name_is_refused():
    with pytest.raises(OptionError, match="more than the 34359738368"):
        codecs.Arena(codecs.Arena.MOST_BYTES + 4, CPU)


def test_what_is_pinned_lies_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        assert codecs.Arena(64, CPU, spill_bytes=64).spill.device == CPU
