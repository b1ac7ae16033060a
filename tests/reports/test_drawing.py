"""A pipeline's drawing and trace show every action once, when it runs."""

import re
from xml.etree import ElementTree

import pytest

from squeezebox.reports import ChartKind, ChartSpan, PipelineChart, draw_svg, trace_events
from squeezebox.reports._svg import nice_step
from squeezebox.schedules import (
    Costs,
    Kind,
    breadth_first,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    simulate,
    two_bw,
    zero_bubble,
)

SVG = "{http://www.w3.org/2000/svg}"
RECTANGLE = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-([\d.]+)z")

SCHEDULES = (
    gpipe(3, 4, batches=2),
    one_f_one_b(4, 8),
    interleaved(2, 4, loops=3),
    breadth_first(2, 3, loops=2),
    zero_bubble(3, 5),
    zero_bubble(3, 5, doubled=True, batches=2),
    pipedream(3, batches=5),
    two_bw(2, 3, batches=3),
)


def timeline_of(schedule):
    stages = range(schedule.num_stages)
    return simulate(
        schedule,
        Costs(
            forward=tuple(1.0 + 0.25 * stage for stage in stages),
            backward=tuple(2.0 - 0.125 * stage for stage in stages),
            transfer=0.375,
            activation_bytes=tuple(100 + stage for stage in stages),
        ),
    )


def chart_of(timeline, **changes):
    a_batch = timeline.schedule.microbatches

    def drawn(span):
        action = span.action
        updates = action.kind is Kind.UPDATE
        batch = action.microbatch if updates else action.microbatch // a_batch
        kind = ChartKind[action.kind.name]
        return ChartSpan(kind, action.stage, action.microbatch, batch, span.start, span.end)

    stages = range(timeline.schedule.num_stages)
    return PipelineChart(
        **{
            "title": timeline.schedule.name,
            "notes": ("a note",),
            "rows": tuple(tuple(map(drawn, spans)) for spans in timeline.spans),
            "activation_bytes": tuple(100 + stage for stage in stages),
            **changes,
        }
    )


def rows_of(root):
    """Each rank's paths: (class, outlines, tooltip)."""

    def described(path):
        return path.get("class"), RECTANGLE.findall(path.get("d")), path.findtext(f"{SVG}title")

    return [list(map(described, group.findall(f"{SVG}path"))) for group in root.findall(f"{SVG}g")]


def scale_of(root, seconds):
    return float(root.find(f"{SVG}rect[@class='waiting']").get("width")) / seconds


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_every_rectangle_is_where_its_action_is(schedule):
    timeline = timeline_of(schedule)
    root = ElementTree.fromstring(draw_svg(chart_of(timeline)))
    scale, rows = scale_of(root, timeline.seconds), rows_of(root)
    assert len(rows) == schedule.num_ranks
    for spans, row in zip(timeline.spans, rows, strict=True):
        assert len(spans) == len(row)
        drawn = sorted(spans, key=lambda span: span.action.kind is Kind.UPDATE)  # on top of the others
        for span, (name, outlines, tip) in zip(drawn, row, strict=True):
            ((x, _, width, _, back),) = outlines
            assert name.startswith(span.action.kind.name.lower())
            assert float(x) == pytest.approx(span.start * scale, abs=0.02)
            assert float(width) == pytest.approx((span.end - span.start) * scale, abs=0.02)
            assert width == back
            assert f"batch {span.action.microbatch} at stage {span.action.stage}: {span.start:.6g} s" in tip


def test_many_actions_are_one_path_a_colour_with_a_rectangle_each(monkeypatch):
    monkeypatch.setattr("squeezebox.reports._svg._TOOLTIPS", 10)
    timeline = timeline_of(one_f_one_b(3, 7))
    root = ElementTree.fromstring(draw_svg(chart_of(timeline)))
    scale = scale_of(root, timeline.seconds)
    for spans, row in zip(timeline.spans, rows_of(root), strict=True):
        assert len(row) == 3 and all(tip is None for _, _, tip in row)
        for name, outlines, _ in row:
            own = [span for span in spans if name.startswith(span.action.kind.name.lower())]
            assert [float(each[0]) for each in outlines] == pytest.approx(
                [span.start * scale for span in own], abs=0.02
            )
            assert sum(float(each[2]) for each in outlines) == pytest.approx(
                sum(span.end - span.start for span in own) * scale, abs=0.02 * len(own)
            )


def test_merged_colours_have_the_area_of_their_seconds_and_are_few(monkeypatch):
    monkeypatch.setattr("squeezebox.reports._svg._TILES", 150)
    timeline = timeline_of(zero_bubble(4, 60))
    root = ElementTree.fromstring(draw_svg(chart_of(timeline)))
    scale, rows = scale_of(root, timeline.seconds), rows_of(root)
    assert sum(len(outlines) for row in rows for _, outlines, _ in row) <= 150
    assert "Too many actions" in "".join(root.itertext())
    for spans, row in zip(timeline.spans, rows, strict=True):
        areas = {
            name[:-2]: sum(float(w) * float(h) for _, _, w, h, _ in outlines) for name, outlines, _ in row
        }
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT):
            seconds = sum(span.end - span.start for span in spans if span.action.kind is kind)
            assert areas[kind.name.lower()] == pytest.approx(22.0 * seconds * scale, rel=0.01)


def test_more_ranks_than_rectangles_are_drawn(monkeypatch):
    monkeypatch.setattr("squeezebox.reports._svg._TILES", 8)
    root = ElementTree.fromstring(draw_svg(chart_of(timeline_of(breadth_first(4, 2, loops=4)))))
    colours = {f"{kind}-{shade}" for kind in ("forward", "backward") for shade in range(4)}
    assert all({name for name, _, _ in row} >= colours for row in rows_of(root))


@pytest.mark.slow
def test_a_drawing_of_many_ranks_stays_small():
    timeline = simulate(one_f_one_b(300, 20, batches=15), Costs.even(300, forward=0.0123, backward=0.0321))
    text = draw_svg(chart_of(timeline))
    assert len(text.encode()) < 5_000_000
    assert len(rows_of(ElementTree.fromstring(text))) == 300


def test_text_is_escaped():
    timeline = timeline_of(gpipe(2, 2))
    text = draw_svg(chart_of(timeline, title="</title><script>&", notes=("a < b & c",)))
    root = ElementTree.fromstring(text)
    assert root.findtext(f"{SVG}title") == "</title><script>&"
    assert "a < b & c" in [each.text for each in root.findall(f"{SVG}text")]


def test_it_stands_alone_and_follows_the_scheme():
    text = draw_svg(chart_of(timeline_of(gpipe(2, 2))))
    assert "prefers-color-scheme:dark" in text
    assert set(re.findall(r"https?://[^\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in text and "var(" not in text


def test_shades_tell_loops_or_else_batches_apart():
    looped = {name for row in rows_of_schedule(breadth_first(2, 3, loops=2)) for name, _, _ in row}
    assert looped == {"forward-0", "forward-1", "backward-0", "backward-1", "update-0"}
    for row in rows_of_schedule(gpipe(2, 2, batches=3)):
        assert [name[-1] for name, _, _ in row if name.startswith("forward")] == list("001100")


def rows_of_schedule(schedule):
    return rows_of(ElementTree.fromstring(draw_svg(chart_of(timeline_of(schedule)))))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_the_trace_has_every_span_in_microseconds(schedule):
    timeline = timeline_of(schedule)
    events = trace_events(chart_of(timeline))["traceEvents"]
    for rank, spans in enumerate(timeline.spans):
        own = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert len(own) == len(spans)
        for span, event in zip(spans, own, strict=True):
            assert event["pid"] == 0
            assert event["ts"] == pytest.approx(span.start * 1e6)
            assert event["dur"] == pytest.approx((span.end - span.start) * 1e6)
            assert event["args"]["stage"] == span.action.stage
            assert event["name"].endswith(f" {span.action.microbatch}")
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {rank: f"rank {rank}" for rank in range(schedule.num_ranks)}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_the_counters_reach_what_simulate_counts(schedule):
    timeline = timeline_of(schedule)
    events = trace_events(chart_of(timeline))["traceEvents"]
    for unit, most in (("microbatches", timeline.live), ("bytes", timeline.live_bytes)):
        for rank in range(schedule.num_ranks):
            values = [event["args"][unit] for event in events if event["name"] == f"rank {rank}: live {unit}"]
            assert max(values) == most[rank] and values[-1] == 0 and min(values) == 0


def test_bytes_are_not_counted_unless_they_are_known():
    events = trace_events(chart_of(timeline_of(gpipe(2, 2)), activation_bytes=None))["traceEvents"]
    assert {unit for event in events if event["ph"] == "C" for unit in event["args"]} == {"microbatches"}


@pytest.mark.parametrize(
    ("least", "step"), [(0.0, 1.0), (0.3, 0.5), (1.0, 1.0), (1.1, 2.0), (6.0, 10.0), (4e-7, 5e-7), (2e8, 2e8)]
)
def test_ticks_are_round_numbers(least, step):
    assert nice_step(least) == pytest.approx(step)
