"""Layouts never overlap, whoever packs them, and small ones are as low as can be."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from squeezebox import memory
from squeezebox.schema import Buffer, Layout, OptionError, PlanError

PACKERS = [memory.somas, memory.search]


@st.composite
def buffers(draw, most=12, longest=10, largest=300):
    count = draw(st.integers(0, most))
    starts = [draw(st.integers(0, longest)) for _ in range(count)]
    return tuple(
        Buffer(
            name=f"b{number}",
            lower=start,
            upper=start + draw(st.integers(1, longest)),
            nbytes=draw(st.integers(0, largest)),
        )
        for number, start in enumerate(starts)
    )


@st.composite
def related(draw, most=7):
    """Buffers and conflicts that have nothing to do with their times."""
    found = draw(buffers(most=most))
    relation = np.zeros((len(found), len(found)), bool)
    for pair in itertools.combinations(range(len(found)), 2):
        relation[pair] = relation[pair[::-1]] = draw(st.booleans())
    return found, relation


def conflict(first, second):
    return first.lower < second.upper and second.lower < first.upper


def overlap(first, start, second, other):
    return start < other + second.nbytes and other < start + first.nbytes


def fullest(found):
    """The most bytes that live at the same time."""
    return max((sum(b.nbytes for b in found if b.lower <= a.lower < b.upper) for a in found), default=0)


def least_height(found, conflicts):
    """By trying every order, each buffer as low as those before it let it."""
    best = sum(each.nbytes for each in found)
    for order in itertools.permutations(range(len(found))):
        offsets = {}
        for number in order:
            below = sorted(
                (offsets[other], offsets[other] + found[other].nbytes)
                for other in offsets
                if conflicts[number][other]
            )
            offset = 0
            for start, end in below:
                if start >= offset + found[number].nbytes:
                    break
                offset = max(offset, end)
            offsets[number] = offset
        best = min(best, max((offsets[i] + found[i].nbytes for i in offsets), default=0))
    return best


@pytest.mark.parametrize("packer", PACKERS)
@given(found=buffers(), alignment=st.sampled_from([1, 64]))
def test_no_two_that_live_together_overlap(packer, found, alignment):
    made = memory.layout(found, packer=packer, seconds=0.05, alignment=alignment)
    for (a, start), (b, other) in itertools.combinations(zip(found, made.offsets, strict=True), 2):
        assert not (conflict(a, b) and overlap(a, start, b, other))
    assert all(offset % alignment == 0 for offset in made.offsets)
    assert all(o + b.nbytes <= made.nbytes for o, b in zip(made.offsets, found, strict=True))
    assert fullest(found) <= made.lower_bound_bytes <= made.nbytes
    assert made.packer == packer.__name__


@given(found=buffers(most=6, longest=5, largest=9))
def test_the_search_is_exact_on_small_cases(found):
    conflicts = [[conflict(a, b) for b in found] for a in found]
    made = memory.layout(found, packer=memory.search, alignment=1)
    assert made.nbytes == least_height(found, conflicts)


@given(case=related(most=6))
def test_the_search_is_exact_for_any_relation(case):
    found, relation = case
    made = memory.layout(found, conflicts=relation, packer=memory.search, alignment=1)
    assert made.nbytes == least_height(found, relation)
    assert made.lower_bound_bytes <= made.nbytes


@pytest.mark.parametrize("packer", PACKERS)
@given(case=related(most=12))
def test_a_relation_alone_decides(packer, case):
    found, relation = case
    made = memory.layout(found, conflicts=relation, packer=packer, seconds=0.05, alignment=1)
    for a, b in itertools.combinations(range(len(found)), 2):
        if relation[a, b]:
            assert not overlap(found[a], made.offsets[a], found[b], made.offsets[b])


@pytest.mark.parametrize("packer", PACKERS)
@given(found=buffers(), data=st.data())
def test_groups_lie_side_by_side(packer, found, data):
    names = data.draw(st.permutations([each.name for each in found]))
    cut = data.draw(st.integers(0, len(names)))
    groups = [group for group in (names[:cut], names[cut : cut + 2]) if group]
    made = memory.layout(found, groups=groups, packer=packer, seconds=0.05, alignment=1)
    place = {each.name: (offset, each) for each, offset in zip(found, made.offsets, strict=True)}
    for group in groups:
        for before, after in itertools.pairwise(group):
            assert place[after][0] == place[before][0] + place[before][1].nbytes
    for a, b in itertools.combinations(found, 2):
        assert not (conflict(a, b) and overlap(a, place[a.name][0], b, place[b.name][0]))


def test_buffers_without_bytes_are_in_nobodys_way():
    rows = [(2, 4, 2), (4, 7, 7), (0, 2, 0), (2, 6, 7), (1, 3, 8), (3, 6, 2)]
    found = [
        Buffer(name=str(number), lower=lower, upper=upper, nbytes=nbytes)
        for number, (lower, upper, nbytes) in enumerate(rows)
    ]
    assert memory.layout(found, alignment=1).nbytes == 17


def test_a_group_takes_over_its_members_conflicts():
    first = Buffer(name="a", lower=0, upper=1, nbytes=10)
    second = Buffer(name="b", lower=5, upper=6, nbytes=10)
    between = Buffer(name="c", lower=3, upper=4, nbytes=20)
    made = memory.layout([first, second, between], groups=[("a", "b")], alignment=1)
    assert made.nbytes == 20  # it conflicts with neither
    made = memory.layout([first, second, between], groups=[("b", "a", "c")], alignment=1)
    assert made.offsets == (10, 0, 20)


def test_the_search_beats_the_heuristics_where_these_leave_gaps():
    rng = np.random.default_rng(3)
    starts, lengths = rng.integers(0, 40, 60), rng.integers(1, 25, 60)
    found = [
        Buffer(name=str(i), lower=int(a), upper=int(a + b), nbytes=int(n))
        for i, (a, b, n) in enumerate(zip(starts, lengths, rng.integers(1, 2000, 60), strict=True))
    ]
    quick, searched = (memory.layout(found, packer=each, seconds=5, alignment=1) for each in PACKERS)
    assert quick.nbytes > searched.nbytes >= searched.lower_bound_bytes == fullest(found)


@pytest.mark.slow
def test_of_many_buffers_the_largest_are_searched():
    hard = memory.read_buffers("benchmarks/minimalloc/C.csv")
    step = max(each.upper for each in hard) // 2000
    crowd = [
        Buffer(name=f"small {number}", lower=number * step, upper=(number + 3) * step, nbytes=number % 5)
        for number in range(2000)
    ]
    found = memory.layout([*hard, *crowd], alignment=1, seconds=8.0)
    quick = memory.layout([*hard, *crowd], alignment=1, packer=memory.somas)
    assert found.nbytes <= 1.01 * found.lower_bound_bytes < quick.nbytes


def test_more_buffers_than_a_table_of_all_pairs_has_room_for_are_refused():
    many = [Buffer(name=str(number), lower=0, upper=1, nbytes=1) for number in range(50_001)]
    with pytest.raises(OptionError, match="50001 buffers"):
        memory.layout(many)


def test_one_stream_of_a_training_step_needs_no_more_than_lives_at_once():
    sizes = [100, 700, 300, 300, 900, 50, 400] * 4
    forward = [
        Buffer(name=f"saved {i}", lower=i, upper=2 * len(sizes) - i, nbytes=n) for i, n in enumerate(sizes)
    ]
    backward = [
        Buffer(name=f"gradient {i}", lower=2 * len(sizes) - i - 1, upper=2 * len(sizes) - i + 1, nbytes=n)
        for i, n in enumerate(sizes)
    ]
    made = memory.layout((*forward, *backward), packer=memory.somas, alignment=1)
    assert made.nbytes == made.lower_bound_bytes == fullest((*forward, *backward))


PAIR = [Buffer(name="left", lower=0, upper=2, nbytes=8), Buffer(name="right", lower=1, upper=3, nbytes=8)]


@pytest.mark.parametrize(
    ("offsets", "words"),
    [((0, 7), "'right' at [7, 15) and 'left' at [0, 8)"), ((0, -8), "'right' at [-8, 0) is outside")],
)
def test_wrong_offsets_are_refused_and_named(offsets, words):
    def wrong(problem, seconds):
        return np.array(offsets)

    with pytest.raises(PlanError, match="packer 'wrong' is wrong") as caught:
        memory.layout(PAIR, packer=wrong, alignment=1)
    assert words in str(caught.value)


def test_a_layout_can_be_verified_again():
    made = Layout(offsets=(0, 4), nbytes=12, lower_bound_bytes=12, alignment=1, packer="by hand")
    with pytest.raises(PlanError, match="may not share"):
        memory.verify(PAIR, made, conflicts=np.array([[False, True], [True, False]]))
    memory.verify(PAIR, made, conflicts=np.zeros((2, 2), bool))


def test_no_bytes_within_others_are_no_overlap():
    found = [
        Buffer(name=name, lower=0, upper=1, nbytes=nbytes) for name, nbytes in (("a", 2), ("b", 0), ("c", 2))
    ]
    made = Layout(offsets=(0, 1, 2), nbytes=4, lower_bound_bytes=4, alignment=1, packer="by hand")
    memory.verify(found, made, conflicts=~np.eye(3, dtype=bool))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"alignment": 0}, "alignment 0 is below 1"),
        ({"conflicts": np.zeros((3, 3), bool)}, r"2 buffers need \(2, 2\)"),
        ({"conflicts": np.array([[False, True], [False, False]])}, "two things of 'left' and 'right'"),
        ({"groups": [("left", "nobody")]}, "'nobody', which is no buffer"),
        ({"groups": [("left",), ("right", "left")]}, "'left' is in groups twice"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(OptionError, match=words):
        memory.layout(PAIR, **arguments)


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (Buffer(name="left", lower=4, upper=5, nbytes=1), "two buffers are called 'left'"),
        (Buffer(name="late", lower=5, upper=5, nbytes=1), "'late' lives during \\[5, 5\\)"),
        (Buffer(name="less", lower=4, upper=5, nbytes=-1), "'less' has -1 bytes"),
        (
            Buffer(name="vast", lower=4, upper=5, nbytes=2**62 - 64),
            "bytes together; offsets are counted up to",
        ),
        (
            Buffer(name="old", lower=-(2**70), upper=5, nbytes=1),
            "'old' lives during .* times are counted up",
        ),
    ],
)
def test_wrong_buffers_are_refused(buffer, words):
    with pytest.raises(OptionError, match=words):
        memory.layout([*PAIR, buffer])
