"""Tables and what is said under them: names are shown as they are, whatever brackets they have."""

from pathlib import Path

import pytest

from squeezebox.cli._show import show_demo, show_gigapixel

ARM = {
    "saved_bytes": 1,
    "peak_bytes": 1,
    "activation_peak_bytes": 1,
    "refresh_peak_bytes": 1,
    "step_seconds": 1.0,
    "step_seconds_ratio": 1.0,
    "test_accuracy": 0.5,
    "noise": 0.0,
    "predicted_noise": None,
}
STORY = {
    "limit_bytes": 1,
    "plain_batch": 1,
    "squeezed_batch": 1,
    "peak_bytes": 1,
    "refresh_peak_bytes": None,
}
DEMO = {
    "settings": {"data": "subset of squeezebox[demo]", "steps": 1, "batch": 1},
    "plain": ARM,
    "squeezed": ARM,
    "story": STORY,
    "seconds": 1.0,
}
GIGAPIXEL = {
    "image": {"height": 64, "width": 64, "bytes": 1},
    "plan": {"stages": []},
    "parameters": 1,
    "peak_bytes": None,
    "step_seconds": 1.0,
    "losses": [1.0],
    "seconds": 1.0,
}


@pytest.mark.parametrize("name", ["run[a].json", "[/x].json", ":warning:.json"])
def test_names_are_shown_as_they_are(capsys, name):
    show_demo(DEMO, Path(name))
    show_gigapixel(GIGAPIXEL, Path(name))
    out = capsys.readouterr().out
    assert out.count(f"the same figures are in {name}.") == 2
    assert "(subset of squeezebox[demo])" in out
