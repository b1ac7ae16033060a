"""Safe sharing against every way in which a few operators can run beside each other."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from squeezebox import memory
from squeezebox.schema import Operator, OptionError

TENSORS = "abcde"


@st.composite
def graphs(draw):
    """Up to six operators on up to three streams, each reading what was written or there before."""
    operators = []
    for number in range(draw(st.integers(1, 6))):
        earlier = [each.name for each in operators]
        operators.append(
            Operator(
                name=f"op{number}",
                stream=draw(st.sampled_from("xyz")),
                reads=tuple(draw(st.sets(st.sampled_from(TENSORS), max_size=2))),
                writes=tuple(draw(st.sets(st.sampled_from(TENSORS), max_size=2))),
                waits=tuple(draw(st.sets(st.sampled_from(earlier), max_size=1))) if earlier else (),
            )
        )
    return tuple(operators), draw(st.sets(st.sampled_from(TENSORS), max_size=1))


def earlier_of(operators):
    """Whom each operator must find ended, from the words of the rule: stream, first writers, waits."""
    written, before = {}, {}
    for number, operator in enumerate(operators):
        same = {each.name for each in operators[:number] if each.stream == operator.stream}
        for name in operator.reads:
            written.setdefault(name, None)
        for name in operator.writes:
            written.setdefault(name, operator.name)
        first = {written[name] for name in (*operator.reads, *operator.writes)} - {None, operator.name}
        before[operator.name] = same | first | set(operator.waits)
    return before


def moments(operators):
    """Every state that some interleaving reaches: who has begun, and who has ended."""
    before = earlier_of(operators)
    seen, waiting = set(), [(frozenset(), frozenset())]
    while waiting:
        state = waiting.pop()
        if state in seen:
            continue
        seen.add(state)
        begun, ended = state
        waiting += [(begun | {name}, ended) for name in before.keys() - begun if before[name] <= ended]
        waiting += [(begun, ended | {name}) for name in begun - ended]
    return seen


def alive(tensor, operators, kept, begun, ended):
    """Does the tensor hold, or receive, a value that somebody has yet to use?"""
    users = [each for each in operators if tensor in (*each.reads, *each.writes)]
    if not users or tensor in users[0].reads:
        born = True
    else:
        born = users[0].name in begun
    done = bool(users) and all(each.name in ended for each in users)
    return born and (tensor in kept or not done)


@given(case=graphs())
@example(
    case=(
        (Operator(name="op0", stream="x", writes=("a",)), Operator(name="op1", stream="y", writes=("b",))),
        set(),
    )
)
def test_allowed_pairs_are_safe_in_all_interleavings_and_refused_ones_unsafe_in_some(case):
    operators, kept = case
    buffers, conflicts = memory.safe_sharing(operators, dict.fromkeys(TENSORS, 1), kept=kept)
    assert [each.name for each in buffers] == list(TENSORS)
    unsafe = set()
    for begun, ended in moments(operators):
        living = [name for name in TENSORS if alive(name, operators, kept, begun, ended)]
        unsafe |= set(itertools.combinations(living, 2))
    for (i, first), (j, second) in itertools.combinations(enumerate(TENSORS), 2):
        assert conflicts[i, j] == conflicts[j, i] == ((first, second) in unsafe)


@given(case=graphs())
def test_what_overlaps_as_issued_is_refused(case):
    operators, kept = case
    buffers, conflicts = memory.safe_sharing(operators, dict.fromkeys(TENSORS, 1), kept=kept)
    for (i, a), (j, b) in itertools.combinations(enumerate(buffers), 2):
        assert conflicts[i, j] or a.upper <= b.lower or b.upper <= a.lower


@given(case=graphs())
def test_on_one_stream_the_order_of_issue_decides(case):
    operators, kept = case
    operators = [Operator(name=o.name, stream="x", reads=o.reads, writes=o.writes) for o in operators]
    buffers, conflicts = memory.safe_sharing(operators, dict.fromkeys(TENSORS, 1), kept=kept)
    for (i, a), (j, b) in itertools.combinations(enumerate(buffers), 2):
        assert conflicts[i, j] == (a.lower < b.upper and b.lower < a.upper)


def offload(*waits):
    """A tensor is copied out on one stream while the other one goes on and writes the next."""
    return [
        Operator(name="make", stream="main", writes=("activation",)),
        Operator(name="copy", stream="out", reads=("activation",), writes=("host",)),
        Operator(name="next", stream="main", writes=("other",), waits=waits),
    ]


def test_a_copy_beside_holds_its_tensor_until_it_is_waited_for():
    sizes = {"activation": 64, "other": 64}
    buffers, conflicts = memory.safe_sharing(offload(), sizes)
    assert buffers[0].upper <= buffers[1].lower  # as issued, one is gone before the other comes
    assert memory.layout(buffers).nbytes == 64
    assert conflicts.any() and memory.layout(buffers, conflicts=conflicts).nbytes == 128
    buffers, conflicts = memory.safe_sharing(offload("copy"), sizes)
    assert not conflicts.any() and memory.layout(buffers, conflicts=conflicts).nbytes == 64


def test_without_operators_nothing_is_shared():
    _, conflicts = memory.safe_sharing([], {"a": 1, "b": 1})
    assert conflicts.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize(
    ("operators", "kept", "words"),
    [
        (offload("later"), (), "'next' waits for 'later', which is not issued before it"),
        ([*offload(), Operator(name="copy", stream="main")], (), "two operators are called 'copy'"),
        (offload(), ("nothing",), "'nothing' is kept, but has no size"),
    ],
)
def test_wrong_graphs_are_refused(operators, kept, words):
    with pytest.raises(OptionError, match=words):
        memory.safe_sharing(operators, {"activation": 1}, kept=kept)
