"""The instances are the published ones, a trace tells a step's storages, and races are seen as such."""

import numpy as np
import pytest

from benchmarks import _offload_streams, static_allocation
from benchmarks._step_trace import Trace, trace
from squeezebox import memory
from squeezebox.schema import Layout, Operator

SMALL = {"num_classes": 16, "width": 16, "depth": 2, "heads": 2, "context": 8}


@pytest.mark.slow
def test_the_instances_are_the_published_ones():
    paths = sorted(static_allocation.INSTANCES.glob("*.csv"))
    assert [path.stem for path in paths] == list("ABCDEFGHIJK")
    for path in paths:
        assert (
            0.9 * 2**20
            < memory.layout(memory.read_buffers(path), alignment=1, seconds=0).lower_bound_bytes
            <= 2**20
        )


@pytest.mark.slow
def test_the_search_fits_an_instance_into_its_capacity():
    buffers = memory.read_buffers(static_allocation.INSTANCES / "C.csv")
    heuristic, found = (
        memory.layout(buffers, packer=packer, alignment=1, seconds=60).nbytes
        for packer in (memory.somas, memory.search)
    )
    assert found <= 2**20 < heuristic


@pytest.fixture(scope="module")
def step():
    return trace("gpt", 2, **SMALL)


def test_a_trace_holds_what_the_step_made(step):
    assert isinstance(step, Trace) and 0 < step.backward < len(step.operators)
    names = {each.name for each in step.buffers}
    uses = {name for operator in step.operators for name in (*operator.reads, *operator.writes)}
    assert step.kept < names <= uses
    lives = {each.name: each for each in step.buffers}
    for number, operator in enumerate(step.operators):
        for name in {*operator.reads, *operator.writes} & names:
            assert lives[name].lower <= number < lives[name].upper


def test_the_arena_of_a_step_is_as_low_as_can_be(step):
    made = memory.layout(step.buffers)
    assert made.nbytes == made.lower_bound_bytes


def test_moved_tensors_come_back_before_they_are_read():
    gpt = trace("gpt", 64, num_classes=64, width=64, depth=2, heads=2, context=64)
    operators, nbytes = _offload_streams.offloaded(gpt)
    again = {name for name in nbytes if name.endswith("again")}
    written = set()
    for operator in operators:
        assert again & set(operator.reads) <= written
        written |= again & set(operator.writes)
    assert written == again and again


RACE = [
    Operator(name="make", stream="main", writes=("a",)),
    Operator(name="copy", stream="out", reads=("a",)),
    Operator(name="next", stream="main", writes=("b",)),
]


@pytest.mark.parametrize(("copying", "offsets", "wrong"), [(5, (0, 0), True), (5, (0, 8), False)])
def test_a_slow_copy_loses_bytes_that_are_handed_on(copying, offsets, wrong):
    order = _offload_streams.events(RACE, np.array([1.0, copying, 1.0]))
    assert order == [(0.0, 1, 0), (1.0, 0, 0), (1.0, 1, 1), (1.0, 1, 2), (2.0, 0, 2), (1.0 + copying, 0, 1)]
    made = Layout(offsets=offsets, nbytes=16, lower_bound_bytes=8, alignment=1, packer="by hand")
    assert _offload_streams.clobbered(RACE, order, ["a", "b"], {"a": 8, "b": 8}, made) == wrong


def test_tables_name_every_row():
    row = {"name": "A", "buffers": 3, "somas_ratio": 1.25, "search_ratio": 1.0, "search_seconds": 0.5}
    text = static_allocation.instance_table([row | {"supermalloc_ratio": 1.125}], 60.0)
    assert "| A | 3 | 1.2500 | 1.0000 | 0.5 | 1.1250 |" in text and "worst: 1.0000" in text
