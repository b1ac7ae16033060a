"""The ways to hold a step are rendered a row each, and a step's samples keep every byte."""

from benchmarks.ways import PARTS, _rows, render
from squeezebox.schema import Kind, LiveSample


def test_a_row_has_the_peak_the_time_and_the_noise():
    spread = {"median": 1.25, "minimum": 1.0, "maximum": 1.5}
    plain = {"peak_bytes": 2**22, "noise": 0.0, "first_step_seconds": 1.0}
    packed = {"peak_bytes": 2**21, "noise": 1e-3, "first_step_seconds": 9.0, "over_plain": spread}
    lines = render({"net": {"plain": plain, "squeezebox": packed}}).splitlines()
    assert lines[-2:] == [
        "| net | plain | 4.0 | 1.00 | 1.00 | 0.0e+00 | 1.0 |",
        "| net | squeezebox | 2.0 | 2.00 | 1.25 (1.00 to 1.50) | 1.0e-03 | 9.0 |",
    ]


def test_the_parts_of_a_sample_add_up():
    nbytes = tuple(10**at for at in range(len(Kind)))
    sample = LiveSample(seconds=1.0, phase="backward", module="", operator="mm", nbytes=nbytes)
    share, phase, *parts = _rows([sample], 4.0)[0].split()
    assert (share, phase) == ("0.2500", "backward")
    assert len(parts) == len(PARTS) and sum(map(int, parts)) == sum(nbytes)
