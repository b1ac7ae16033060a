"""The page of a profiled step in a real browser: what is drawn equals the figures, and nothing is fetched."""

import dataclasses
import itertools
import json
import re

import pytest

from squeezebox.reports import Timeline, timeline_html
from squeezebox.reports._page import bits
from squeezebox.schema import (
    Activity,
    BoundRecord,
    Forecast,
    Kind,
    LiveSample,
    Role,
    SavedTensor,
    Span,
    StepRecord,
    StepTimeline,
    StepTrace,
    TimelineCell,
)
from tests.reports.browser import PATH, Browser

MIB = 2**20
KINDS = tuple(Kind)
CODECS = ("entropy", "keep", "offload", "recompute", "none", "sign")
needs_browser = pytest.mark.skipif(
    PATH is None, reason="no Chromium is installed; on Debian and Ubuntu: apt install chromium"
)


def saved(number, module):
    codec = CODECS[number % len(CODECS)]
    held = {"entropy": MIB // 7, "keep": MIB, "sign": MIB // 32}.get(codec, 0)
    return SavedTensor(
        key=f"{module}:Conv.input",
        role=Role.CONV_INPUT,
        roles=(Role.CONV_INPUT,),
        module=module,
        shape=(MIB // 4,),
        dtype="float32",
        saved_bytes=MIB,
        packed_bytes=held,
        codec=codec,
        bound=1e-3 * (number + 1) if codec == "entropy" else 0.0,
        noise_share=1e-5 * (number % 9) if codec == "entropy" else None,
    )


def sampled(number, count):
    """A step that rises to its middle and falls again."""
    height = min(number, count - number)
    nbytes = [(100 + 37 * height * (kind + 1)) * 1024 for kind in range(len(KINDS))]
    return LiveSample(
        seconds=0.002 * number,
        phase="forward" if number < count // 2 else "backward",
        module=f"layers.{number % 7}",
        operator="convolution",
        nbytes=tuple(nbytes),
    )


def timeline(modules=12, samples=40, budget=13 * MIB):
    names = [f"<layers>.{number}.a_rather_long_name_of_a_module" for number in range(modules)]
    tensors = tuple(itertools.starmap(saved, enumerate(names)))
    taken = tuple(sampled(number, samples) for number in range(samples))
    lossy = {tensor.key: tensor.bound for tensor in tensors if tensor.bound}
    record = StepRecord(
        step=40,
        tensors=tensors,
        saved_bytes=sum(t.saved_bytes for t in tensors) + 3000,
        packed_bytes=sum(t.packed_bytes for t in tensors) + 3000,
        borrowed_bytes=0,
        noise=2e-3,
        predicted_noise=1e-3,
        peak_bytes=max(sum(each.nbytes) for each in taken),
        budget_bytes=budget,
    )
    cells = [
        TimelineCell(phase=phase, module=name, seconds=0.001 * (number + 1), saved_bytes=MIB, highest_bytes=5)
        for phase in ("forward", "backward")
        for number, name in enumerate(names)
    ]
    seconds = 0.002 * samples
    return StepTimeline(
        model="Made </script><b>up</b>",
        record=record,
        seconds=seconds,
        unprofiled_seconds=seconds / 2,
        spans=(Span(began_seconds=0, seconds=1, phase="forward", module="", activity=Activity.COMPUTING),),
        cells=tuple(cells),
        kinds=KINDS,
        samples=taken,
        peak=max(taken, key=lambda each: sum(each.nbytes)),
        trace=StepTrace(storages=(), calls=(), end=1),
        history=tuple(
            BoundRecord(step=step, bounds={key: bound * (1 + step % 3) for key, bound in lossy.items()})
            for step in range(40)
        ),
        forecasts=(
            Forecast(name="peak", unit="bytes", estimated=9.0 * MIB, measured=9.5 * MIB),
            Forecast(name="step", unit="seconds", estimated=0.5, measured=0.25),
        ),
        planned_bytes={tensor.key: tensor.packed_bytes for tensor in tensors},
    )


def test_bits_are_of_all_that_a_storage_has():
    query = dataclasses.replace(saved(1, "kept"), shape=(MIB // 12,))  # of a projection to q, k and v
    assert bits([query]) == 32.0
    assert bits([query, dataclasses.replace(query, dtype="bool", packed_bytes=MIB // 8)]) == 7.2


def test_large_models_stay_small():
    figures = timeline(modules=3000, samples=480)
    page = timeline_html(figures)
    assert len(page.encode()) < 500_000
    layers = figures_in(page)["layers"]
    assert sum(layer["saved"] for layer in layers) == figures.record.saved_bytes
    assert sum(layer["held"] for layer in layers) == figures.record.packed_bytes


def test_nothing_is_fetched_and_text_is_escaped():
    page = timeline_html(timeline())
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "</script><b>" not in page


def figures_in(page):
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.S)[1])


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def shown(browser, tmp_path):
    figures = timeline()
    path = tmp_path / "run.html"
    Timeline(figures).to_html(path)
    browser.open(path)
    yield browser, figures
    assert browser.errors == []
    assert {url for url in browser.requests if not url.startswith("data:")} == {path.as_uri()}


def read(browser, selector, expression):
    """What the expression says of every element ``e``."""
    return browser.evaluate(f"[...document.querySelectorAll(`{selector}`)].map(e => {expression})")


def scale(browser):
    """Bytes at a height of the drawing, from its axis: (origin, bytes a pixel)."""
    ticks = read(browser, "#memory .tick", "[+e.getAttribute('y') - 4, +e.dataset.nbytes]")
    (y0, low), (y1, high) = ticks[0], ticks[-1]
    return y0, (high - low) / (y0 - y1)


def corners(path):
    return [tuple(map(float, pair.split(","))) for pair in re.findall(r"[-0-9.]+,[-0-9.]+", path)]


@needs_browser
def test_the_memory_is_drawn_as_it_was(shown):
    browser, figures = shown
    origin, unit = scale(browser)
    drawn = read(browser, "#memory path", "[e.dataset.kind, e.getAttribute('d')]")
    assert [kind for kind, _ in drawn] == [kind.value for kind in KINDS]
    samples = figures.samples
    for column, (_, path) in enumerate(drawn):
        points = corners(path)
        assert len(points) == 4 * len(samples)
        upper, lower = points[: 2 * len(samples)], points[2 * len(samples) :][::-1]
        for number, sample in enumerate(samples):
            for (_, top), (_, bottom) in zip(upper[2 * number :][:2], lower[2 * number :][:2], strict=True):
                assert (bottom - top) * unit == pytest.approx(sample.nbytes[column], abs=unit / 200)
            place = 78 + 910 * sample.seconds / figures.seconds
            assert upper[2 * number][0] == pytest.approx(place, abs=0.01)
            assert (origin - top) * unit == pytest.approx(sum(sample.nbytes[: column + 1]), abs=unit / 200)
    (budget,) = read(browser, "#budget", "+e.getAttribute('y1')")
    (peak,) = read(browser, "#peak", "+e.getAttribute('cy')")
    budget, peak = (origin - budget) * unit, (origin - peak) * unit
    assert budget == pytest.approx(figures.record.budget_bytes, rel=1e-6)
    assert peak == pytest.approx(figures.record.peak_bytes, rel=1e-6)
    text = browser.evaluate("document.getElementById('memory').textContent")
    assert f"in {figures.peak.phase} of {figures.peak.module}, convolution" in text


@needs_browser
@pytest.mark.parametrize("letters", (20, 500))
def test_long_names_leave_the_peak_in_the_drawing_and_the_page_in_the_window(browser, tmp_path, letters):
    figures = timeline()
    peak = dataclasses.replace(figures.peak, module="m" * letters)
    samples = tuple(peak if each == figures.peak else each for each in figures.samples)
    Timeline(dataclasses.replace(figures, samples=samples, peak=peak)).to_html(tmp_path / "run.html")
    browser.open(tmp_path / "run.html")
    boxes = read(browser, "#memory text", "(b => [b.x, b.x + b.width])(e.getBBox())")
    assert min(left for left, _ in boxes) >= 0.0 and max(right for _, right in boxes) <= 1000.0
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@needs_browser
def test_the_layers_are_drawn_as_they_were_and_sort(shown):
    browser, figures = shown
    row = """[e.dataset.module, +e.querySelector('.before').getAttribute('width'),
        [...e.querySelectorAll('.after')].map(r => [r.dataset.action, +r.getAttribute('width')])]"""
    rows = read(browser, "#layers g", row)
    tensors = figures.record.tensors
    assert len(rows) == len(tensors) + 1  # and the small ones
    unit = rows[0][1] / tensors[0].saved_bytes
    for (module, before, after), tensor in zip(rows, tensors, strict=False):
        assert (module, before) == (tensor.module, pytest.approx(tensor.saved_bytes * unit))
        ((_, width),) = after
        assert width == pytest.approx(max(1.0, tensor.packed_bytes * unit))
    names = {"entropy": "compressed", "keep": "kept", "offload": "offloaded", "recompute": "recomputed"}
    assert [after[0][0] for _, _, after in rows[:4]] == [names[codec] for codec in CODECS[:4]]
    read(browser, "#sort", "(e.value = 'held', e.dispatchEvent(new Event('change')))")
    widths = [sum(width for _, width in after) for _, _, after in read(browser, "#layers g", row)]
    assert widths == sorted(widths, reverse=True)


@needs_browser
def test_bounds_and_forecasts_are_drawn(shown):
    browser, figures = shown
    dots = read(browser, "#history circle", "+e.dataset.bound")
    expected = [bound for each in figures.history for bound in each.bounds.values()]
    assert sorted(dots) == pytest.approx(sorted(expected), rel=1e-6)
    heights = read(browser, "#history circle", "+e.getAttribute('cy')")
    order = sorted(range(len(dots)), key=lambda number: -dots[number])
    assert all(heights[a] <= heights[b] + 1e-6 for a, b in itertools.pairwise(order))
    bars = read(browser, "#forecasts rect", "+e.getAttribute('width')")
    figures_of = [value for each in figures.forecasts for value in (each.estimated, each.measured)]
    for pair in range(0, len(bars), 2):
        ratio = figures_of[pair] / figures_of[pair + 1]
        assert bars[pair] / bars[pair + 1] == pytest.approx(ratio)


@needs_browser
def test_hover_zoom_and_keys(shown):
    browser, figures = shown
    box = "(b => [b.left, b.top, b.width, b.height])(e.getBoundingClientRect())"
    tip = "(t => t.hidden ? '' : t.textContent)(document.querySelector('#memory .tip'))"
    span = "(d => [+d.from, +d.to])(document.getElementById('memory').dataset)"
    ((left, top, width, height),) = read(browser, "#memory svg", box)
    browser.mouse("mouseMoved", left + width / 2, top + height / 2)
    assert "convolution" in browser.evaluate(tip)
    for kind, share in (("mousePressed", 0.3), ("mouseMoved", 0.6), ("mouseReleased", 0.6)):
        browser.mouse(kind, left + width * share, top + height / 2, button="left", clickCount=1)
    low, high = browser.evaluate(span)
    assert low == pytest.approx(figures.seconds * (300 - 78) / 910, rel=0.02)
    assert high == pytest.approx(figures.seconds * (600 - 78) / 910, rel=0.02)
    browser.evaluate("document.getElementById('memory').focus()")
    browser.press("0")
    assert browser.evaluate(span) == [0, pytest.approx(figures.seconds)]
    browser.press("Home", "Home")
    browser.press("ArrowRight", "ArrowRight")
    first = figures.samples[1]
    assert f"{1e3 * first.seconds:.2f} ms" in browser.evaluate(tip)
    assert browser.evaluate("document.getElementById('spoken').textContent") == browser.evaluate(tip)
    browser.press("+")
    assert browser.evaluate(span)[1] < figures.seconds / 1.5
    browser.press("p")
    assert f"{figures.record.peak_bytes / MIB:.2f} MiB" in browser.evaluate(tip)
    browser.evaluate("document.querySelector('#layers g').focus()")
    browser.press("ArrowDown", "ArrowDown")
    assert browser.evaluate("document.activeElement.dataset.module") == figures.record.tensors[1].module


@needs_browser
def test_tables_say_the_same_and_sort(shown):
    browser, figures = shown
    row = "[e.cells[0].textContent, +e.cells[2].dataset.v]"
    cells = "section[aria-labelledby=h-cells]"
    rows = read(browser, f"{cells} tbody tr", row)
    assert sum(seconds for _, seconds in rows) == pytest.approx(sum(c.seconds for c in figures.cells))
    read(browser, f"{cells} th:nth-child(3) button", "e.click()")
    seconds = [value for _, value in read(browser, f"{cells} tbody tr", row)]
    assert seconds == sorted(seconds, reverse=True)
    tabbed = len(read(browser, "button, select, summary, [tabindex='0']", "1"))
    assert tabbed > 20


@needs_browser
def test_light_dark_and_without_script(browser, tmp_path):
    path = tmp_path / "run.html"
    Timeline(timeline()).to_html(path)
    colours = "(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))"
    found = {}
    for scheme in ("light", "dark"):
        browser.open(path, scheme)
        both = [re.findall(r"\d+", colour)[:3] for colour in browser.evaluate(colours)]
        found[scheme] = [sum(map(int, colour)) for colour in both]
        assert browser.errors == []
    assert found["light"][0] - found["light"][1] > 500 and found["dark"][1] - found["dark"][0] > 500
    browser.open(path, script=False)
    assert browser.evaluate("document.querySelectorAll('table').length") == 5
    browser.open(path)
