"""A recorded step as torch's snapshot: torch's own readers take it, and its bytes are the step's."""

import itertools
import pickle
import pickletools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.cuda import _memory_viz
from torch.nn import functional

import squeezebox
from squeezebox.cli import main
from squeezebox.reports import Timeline
from squeezebox.reports._snapshot import snapshot
from squeezebox.schema import Kind, OutputError, StepTrace, Storage

# Of MemoryViz.js, which pytorch.org/memory_viz runs.
OPCODES = set(
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST "
    "EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM "
    "SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3".split()
)


@pytest.fixture(scope="module")
def timeline():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(8, 3, 32, 32), torch.arange(8)
    session = squeezebox.attach(model, optimizer=optimizer, noise=1e-2)

    def step():
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    found = session.timeline(step)
    session.detach()
    return found


@pytest.fixture(scope="module")
def written(timeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshot") / "step.pickle"
    timeline.to_snapshot(path)
    return path.read_bytes()


def live(found):
    """Bytes after each event, as readers find them: back from the end to what was there before."""
    (segment,), (events,) = found["segments"], found["device_traces"]
    now = sum(block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
    signs = {"alloc": 1, "free_requested": 0, "free_completed": -1}
    changes = [signs[event["action"]] * event["size"] for event in events]
    return [*itertools.accumulate(changes, initial=now - sum(changes))]


def test_the_highest_and_the_last_bytes_are_the_steps(timeline, written):
    bytes_after = live(pickle.loads(written))
    trace = timeline.figures.trace
    assert max(bytes_after) == trace.peak().nbytes == timeline.figures.record.peak_bytes
    assert bytes_after[0] == sum(each.nbytes for each in trace.living(0))
    assert bytes_after[-1] == sum(each.nbytes for each in trace.storages if each.freed_at == trace.end)


def test_torchs_own_readers_take_it(timeline, written):
    found = pickle.loads(written)
    held = live(found)[-1]
    assert f"total_allocated: {_memory_viz.Bytes(held)}" in _memory_viz.segsum(found)
    trace = timeline.figures.trace
    made = sum(storage.allocated_at > 0 for storage in trace.storages)
    assert len(re.findall(r"^\w+ = \w+\[", _memory_viz.trace(found), re.M)) == made > 20
    for draw in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in draw(found)
    lines = _memory_viz.memory(found, format_flamegraph=str.splitlines)
    frames = [line for line in lines if ";active_allocated;" in line]
    assert sum(int(line.rpartition(" ")[2]) for line in frames) == held
    parameters = sum(each.nbytes for each in trace.storages if each.kind is Kind.PARAMETER)
    assert parameters == sum(int(line.rpartition(" ")[2]) for line in frames if ":parameters " in line)
    lines = _memory_viz.compare([], found["segments"], format_flamegraph=str.splitlines)
    assert all(line.startswith("only_after") for line in lines) and len(lines) >= len(frames)


def test_frames_name_operator_module_kind_and_phase(written):
    (events,) = pickle.loads(written)["device_traces"]
    stacks = {";".join(_memory_viz._frames_fmt(event["frames"])) for event in events}
    assert "0:0:convolution;forward:0:temporaries" in stacks  # packed, and gone before backward
    assert any(stack.endswith(";forward:0:packed tensors") for stack in stacks)
    assert any(stack.endswith(";backward:0:gradients") for stack in stacks)
    assert [event["time_us"] for event in events] == sorted(event["time_us"] for event in events)


def test_the_page_of_pytorch_org_knows_all_that_is_in_it(written):
    assert {opcode.name for opcode, _, _ in pickletools.genops(written)} <= OPCODES
    (protocol,) = (argument for opcode, argument, _ in pickletools.genops(written) if opcode.name == "PROTO")
    assert 2 <= protocol <= 4


def test_the_command_writes_the_same(timeline, written, tmp_path):
    timeline.save(tmp_path / "run.json")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "run.json"), "--snapshot", str(tmp_path / "step.pickle")])
    assert ended.value.code in (None, 0)
    assert pickle.loads((tmp_path / "step.pickle").read_bytes()) == pickle.loads(written)
    with pytest.raises(OutputError, match="cannot write"):
        Timeline.load(tmp_path / "run.json").to_snapshot(tmp_path / "none" / "step.pickle")


@st.composite
def traces(draw):
    """Storages that come and go, each at a time of its own, but for what is there before and after."""
    moves, living, storages = draw(st.lists(st.integers(0, 9), max_size=40)), [], []
    storages += [[draw(st.integers(1, 100)), 0, None] for _ in range(draw(st.integers(0, 3)))]
    living += range(len(storages))
    for time, move in enumerate(moves, 1):
        if living and move < 4:
            storages[living.pop(move % len(living))][2] = time
        else:
            living.append(len(storages))
            storages.append([draw(st.integers(1, 100)), time, None])
    end = len(moves) + 1
    kind = Kind.TEMPORARY
    made = (
        Storage(nbytes=nbytes, kind=kind, allocated_at=begun, freed_at=end if freed is None else freed)
        for nbytes, begun, freed in storages
    )
    return StepTrace(storages=tuple(made), calls=(), end=end)


@given(traces())
def test_no_two_storages_share_an_address_and_bytes_add_up(trace):
    found = snapshot(trace)
    (segment,), (events,) = found["segments"], found["device_traces"]
    assert max(live(found)) == trace.peak().nbytes
    blocks = segment["blocks"]
    assert sum(block["size"] for block in blocks) == segment["total_size"]
    held = {b["address"]: b["size"] for b in blocks if b["state"] == "active_allocated"}
    for event in reversed(events):  # as MemoryViz.js goes through them
        if event["action"] == "alloc":
            assert held.pop(event["addr"]) == event["size"]
        elif event["action"] == "free_completed":
            assert event["addr"] not in held
            held[event["addr"]] = event["size"]
        spans = sorted((address, address + size) for address, size in held.items())
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        assert not spans or spans[-1][1] <= segment["address"] + segment["total_size"]
