"""Folders in memory are refused by name; what is moved to a disk is not left in the system's cache."""

import ctypes
import mmap
import os
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from squeezebox.memory import BUFFER_BYTES, DiskFile, Spill, disk_folder
from squeezebox.memory import _disk as disk
from squeezebox.schema import CaptureError, OptionError

MIB = 1 << 20
IN_MEMORY = Path("/dev/shm")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about its cache")


def is_tmpfs(folder):
    return folder.is_dir() and disk._mount(str(folder))[0] == "tmpfs"


needs_tmpfs = pytest.mark.skipif(not is_tmpfs(IN_MEMORY), reason="there is no folder in memory")


def cached_bytes(descriptor):
    """Of the file, in the system's page cache."""
    size = os.fstat(descriptor).st_size
    library = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(descriptor, size) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        assert library.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages) == 0
        del start
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@needs_tmpfs
def test_a_folder_in_memory_is_refused_by_name_and_another_proposed():
    with pytest.raises(OptionError, match=r"/dev/shm, which is in memory itself \(tmpfs\)") as refused:
        disk_folder(IN_MEMORY)
    assert f"offload={disk_folder().path!r}" in str(refused.value)


@needs_tmpfs
def test_another_folder_is_chosen_where_the_temporary_one_is_in_memory(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(IN_MEMORY))
    spill = Spill()
    spill.write(torch.ones(9))
    assert spill.record.folder != str(IN_MEMORY)
    assert spill.record.filesystem not in ("tmpfs", "ramfs")


def test_folders_that_are_none_or_cannot_be_written_are_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path, reason in ((file, "is no folder"), (tmp_path / "gone", "is no folder")):
        with pytest.raises(OptionError, match=reason):
            disk_folder(path)


def test_a_link_into_memory_and_hidden_mounts_are_seen_through(monkeypatch, tmp_path):
    table = (
        "1 0 8:1 / / rw - ext4 /dev/root rw\n"
        "2 1 0:9 / /a\\040b rw,relatime shared:1 - tmpfs tmpfs rw\n"
        "3 1 8:2 / /c rw - tmpfs tmpfs rw\n"
        "4 1 8:2 / /c rw - xfs /dev/sdb1 rw\n"
        "5 1 8:3 / /z rw - ext4 /dev/zram1 rw\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: table)
    assert disk._mount("/a b/x") == ("tmpfs", "tmpfs")
    assert disk._mount("/c/x") == ("xfs", "/dev/sdb1")
    assert disk._mount("/cc") == ("ext4", "/dev/root")
    assert disk._MEMORY_DEVICE.fullmatch(disk._mount("/z")[1])


@on_linux
@pytest.mark.parametrize("direct", (True, False))
def test_what_is_written_and_read_leaves_the_cache(direct):
    file = DiskFile(disk_folder().path, direct=direct)
    page = mmap.mmap(-1, MIB)
    page.write(os.urandom(MIB))
    expected = page[:]
    for number in range(32):
        file.write(memoryview(page), number * MIB)
    assert cached_bytes(file.fileno()) == 0
    for number in range(32):
        page[:] = bytes(MIB)
        file.read(memoryview(page), number * MIB)
        assert page[:] == expected
    assert cached_bytes(file.fileno()) == 0


@on_linux
def test_a_step_leaves_no_more_in_the_cache_than_is_stated():
    spill = Spill()
    tensors = [torch.randn(size) for size in (3 * MIB, 1000, MIB + 7, 5 * MIB, 2, 4 * MIB)]
    for _ in range(2):
        slots = []
        for tensor in tensors:
            slots.append(spill.write(tensor))
            assert cached_bytes(spill._file.fileno()) <= spill.record.cache_bytes <= BUFFER_BYTES
        while slots:
            out = torch.empty_like(tensors[len(slots) - 1])
            spill.read(slots[-1], out)
            assert torch.equal(out, tensors[len(slots) - 1])
            slots.pop()
            assert cached_bytes(spill._file.fileno()) <= spill.record.cache_bytes
    spill.settle()
    assert cached_bytes(spill._file.fileno()) == 0
    assert spill.record.file_bytes == os.fstat(spill._file.fileno()).st_size


def test_closing_ends_files_and_threads_and_waits_for_what_is_needed():
    before = set(threading.enumerate())
    spill = Spill()
    slot, x = spill.write(torch.arange(99.0)), torch.empty(99)
    descriptor = spill._file.fileno()
    spill.close()
    spill.read(slot, x)
    assert torch.equal(x, torch.arange(99.0))
    threads = set(threading.enumerate()) - before
    assert len(threads) == 1
    del slot
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_many_orders_of_reading(seed=0):
    generator = torch.Generator().manual_seed(seed)
    spill = Spill()
    for _ in range(2):
        sizes = torch.randint(1, 3 * MIB, (9,), generator=generator).tolist()
        tensors = [torch.randint(99, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
        slots = {number: spill.write(tensor) for number, tensor in enumerate(tensors)}
        for number in torch.randperm(len(sizes), generator=generator).tolist():
            for _ in range(1 + number % 2):
                out = torch.empty_like(tensors[number])
                spill.read(slots[number], out)
                assert torch.equal(out, tensors[number])
            if number % 3:
                del slots[number]
                slots[number] = spill.write(tensors[number].flip(0))
                tensors[number] = tensors[number].flip(0)
        for number, slot in slots.items():
            out = torch.empty_like(tensors[number])
            spill.read(slot, out)
            assert torch.equal(out, tensors[number])
        del slots, slot


@on_linux
def test_bytes_that_did_not_reach_the_disk_are_said_to_be_missing_when_they_are_read():
    resource = pytest.importorskip("resource")
    spill, data = Spill(), torch.ones(3 * BUFFER_BYTES, dtype=torch.uint8)
    spill.write(data)  # so that the disk's bytes are reserved
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        slot = spill.write(data)
        spill.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(CaptureError, match="do not come back: .*File too large"):
        spill.read(slot, torch.empty_like(data))
    slot, out = spill.write(data), torch.empty_like(data)
    spill.read(slot, out)
    assert torch.equal(out, data)
