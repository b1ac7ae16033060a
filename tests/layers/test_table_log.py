"""Rows of a table that are written one behind another are those that were written last."""

import os

import numpy as np
import pytest

from squeezebox.layers._table_log import RowLog
from squeezebox.schema import OutputError


@pytest.mark.parametrize("count", [1, 700, 150_000])
def test_rows_are_those_written_last_however_often_a_zone_is_full(tmp_path, count):
    generator = np.random.default_rng(count)
    log, expected = RowLog(tmp_path, count, 3, np.dtype(np.float32)), np.zeros((count, 3), np.float32)
    assert np.array_equal(log.read(np.arange(count)), expected)
    away = np.zeros(count, bool)
    for number in range(60):
        ids = np.sort(generator.choice(count, max(count // (2 + number % 5), 1), replace=False))
        rows = generator.normal(size=(len(ids), 3)).astype(np.float32)
        log.write(ids, rows)
        expected[ids], away[ids] = rows, False
        taken = ids[:: 3 + number % 2]
        log.where[taken] = taken  # their owner has them now
        away[taken] = True
        here = np.flatnonzero(~away)
        assert np.array_equal(log.read(here), expected[here])


def test_the_file_has_room_for_half_as_many_rows_again_and_never_grows(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(os, "posix_fallocate", lambda number, begin, nbytes: made.append((number, nbytes)))
    log = RowLog(tmp_path, 40_000, 4, np.dtype(np.float32))
    for number in range(200):
        ids = np.arange(number % 7, 40_000, 7)
        log.write(ids, np.ones((len(ids), 4), np.float32))
    ((number, nbytes),) = made
    assert 40_000 * 16 < nbytes <= 1.5 * 40_000 * 16
    assert os.fstat(number).st_size <= nbytes


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system is told to drop them")
def test_rows_that_the_system_dropped_from_memory_are_read_from_the_disk(tmp_path):
    log, rows = RowLog(tmp_path, 100_000, 8, np.dtype(np.float32)), np.arange(800_000, dtype=np.float32)
    log.write(np.arange(100_000), rows.reshape(-1, 8))
    number = log._file._number
    os.fsync(number)
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    ids = np.arange(5, 100_000, 37)
    assert np.array_equal(log.read(ids), rows.reshape(-1, 8)[ids])


def test_a_disk_that_fails_is_named(tmp_path):
    log = RowLog(tmp_path, 100, 4, np.dtype(np.float32))
    os.ftruncate(log._file._number, 8)
    with pytest.raises(OutputError, match="row 1 of tables could not be read back"):
        log.read(np.arange(1, 100))
